"""Tests an EAGLE-3 draft head with the auxiliary hidden states of a Qwen3-VL model."""

import numpy as np
import torch

from mmengine.models.plugin import AuxHiddenStates
from mmengine.runtime.drafting.eagle3.loading import load_head
from mmengine.runtime.executor import ON_CPU
from mmengine.spec_decode.eagle3.config import Target
from mmengine.spec_decode.eagle3.loading import open_head
from tests.qwen3_vl.qwen3_vl_reference import (
    DenseAttention,
    make_prompt,
    make_reference,
    reference_inputs,
    run_rows,
)
from tests.spec_decode.eagle3_dense import dense, dense_fuse
from tests.spec_decode.eagle3_heads import DEFAULT_AUX_LAYERS, FAMILIES, TARGET


def test_a_head_beside_a_qwen3_vl(tmp_path):
    """The prompt has an image. The head reads mmengine's auxiliary states, the reference reads transformers'
    layer inputs, and their outputs are equal.
    """
    from mmengine_qwen3_vl import plugin

    reference = make_reference(tmp_path / "target", seed=14, text={"num_hidden_layers": TARGET.num_layers})
    model = plugin.load_model(tmp_path / "target", device="cpu", dtype="float32")
    spec = model.spec
    assert Target(spec.hidden_size, spec.vocab_size, spec.num_layers) == TARGET
    written = FAMILIES["angelslim"]()
    head = load_head(open_head(written.save(tmp_path / "head"), TARGET), model, ON_CPU)
    prompt = make_prompt([3, ("image", (4, 6)), 5], np.random.default_rng(15))
    states = inputs_of_layers(reference, prompt, DEFAULT_AUX_LAYERS)
    aux_hidden_states = torch.empty(len(prompt.ids), 3 * 48)
    aux_recording = AuxRecording(model, AuxHiddenStates(head.config.aux_layers, aux_hidden_states))
    with torch.inference_mode():
        run_rows(aux_recording, [prompt], [[(0, len(prompt.ids))]])
        attention = DenseAttention()
        attention.begin([(0, len(prompt.ids) - 1)])
        embeds = head.embed(torch.from_numpy(prompt.ids[1:]).long())
        positions = aux_recording.positions[:, :-1]
        z, _ = head.forward(head.fuse(aux_hidden_states[:-1]), embeds, positions, attention, spec.num_layers)
    embedding = reference.get_input_embeddings().weight.detach()
    next_embeds = embedding[torch.from_numpy(prompt.ids[1:]).long()]
    wanted, _ = dense(written, dense_fuse(written, states[:-1]), next_embeds, positions)
    torch.testing.assert_close(z, wanted, atol=1e-4, rtol=1e-4)


class AuxRecording:
    def __init__(self, model, aux_hidden_states):
        self._model, self._aux_hidden_states = model, aux_hidden_states

    def __getattr__(self, name):
        return getattr(self._model, name)

    def forward(self, embeds, deepstack, positions, attention):
        self.positions = positions
        return self._model.forward(embeds, deepstack, positions, attention, self._aux_hidden_states)


def inputs_of_layers(reference, prompt, layers):
    seen = []

    def keep(module, args, kwargs):
        seen.append((args[0] if args else kwargs["hidden_states"])[0])

    decoder = reference.model.language_model
    hooks = [decoder.layers[i].register_forward_pre_hook(keep, with_kwargs=True) for i in layers]
    with torch.inference_mode():
        reference(**reference_inputs(prompt), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.cat(seen, -1)
