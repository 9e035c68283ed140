"""Tests that the hidden states for a draft head equal the inputs of the same layers in transformers. Hooks
record these inputs, because transformers' `output_hidden_states` lack the deepstack features.
"""

import numpy as np
import pytest
import torch
from qwen3_vl_reference import (
    PagedRows,
    make_prompt,
    make_reference,
    ragged_steps,
    reference_inputs,
    run_rows,
)

from mmengine.models.decoder.native_text import NativeTextDecoder
from mmengine.models.decoder.text import TextDecoder
from mmengine.models.plugin import AuxHiddenStates
from mmengine.native.decoder import Decoder
from mmengine.runtime.attention.native_paged import NativePagedAttention
from mmengine_qwen3_vl import plugin

NUM_LAYERS, HIDDEN = 4, 48
DEEPSTACK = [2, 0, 1]  # Vision blocks whose features are added after text layers 0, 1 and 2.
PARTS = (
    [3, ("image", (4, 6)), 5],
    [9],
    [2, ("image", (2, 8)), 1, ("video", (3, 4, 4)), 6],
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Return a checkpoint's folder, prompts, and each prompt's `inputs_of_layers`."""
    folder = tmp_path_factory.mktemp("taps")
    text, vision = {"num_hidden_layers": NUM_LAYERS}, {"deepstack_visual_indexes": DEEPSTACK}
    reference = make_reference(folder, seed=8, text=text, vision=vision)
    rng = np.random.default_rng(9)
    prompts = [make_prompt(parts, rng) for parts in PARTS]
    return folder, prompts, [inputs_of_layers(reference, prompt) for prompt in prompts]


def inputs_of_layers(reference, prompt):
    """Return the inputs of all layers and of the final norm, float32 [n, NUM_LAYERS + 1, HIDDEN]."""
    seen = []

    def keep(module, args, kwargs):
        seen.append((args[0] if args else kwargs["hidden_states"])[0])

    decoder = reference.model.language_model
    hooks = [
        part.register_forward_pre_hook(keep, with_kwargs=True) for part in [*decoder.layers, decoder.norm]
    ]
    with torch.inference_mode():
        reference(**reference_inputs(prompt), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, 1)


class AuxRecording:
    """Wraps a model and records the layers' inputs in each forward."""

    def __init__(self, model, layers):
        self._model, self._layers, self.rows = model, layers, []

    def __getattr__(self, name):
        return getattr(self._model, name)

    def forward(self, embeds, deepstack, positions, attention):
        wide = torch.full((len(embeds), (len(self._layers) + 2) * HIDDEN), torch.nan, dtype=embeds.dtype)
        rows = wide[:, HIDDEN:-HIDDEN]  # A view with a row stride larger than the row.
        hidden = self._model.forward(
            embeds, deepstack, positions, attention, AuxHiddenStates(self._layers, rows)
        )
        assert wide[:, :HIDDEN].isnan().all() and wide[:, -HIDDEN:].isnan().all()
        self.rows.append(rows.reshape(len(rows), len(self._layers), HIDDEN))
        return hidden


def load(folder, library, dtype="float32"):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmengine.models.network.native.load", lambda: library)
        model = plugin.load_model(folder, device="cpu", dtype=dtype)
    assert type(model._text) is (TextDecoder if library is None else NativeTextDecoder)
    return model


def aux_rows(model, prompts, layers, attention=None):
    """Return each prompt's layer inputs and logits. The steps have random chunks of several prompts."""
    steps = ragged_steps(prompts, np.random.default_rng(10), 6)
    aux_recording = AuxRecording(model, layers)
    with torch.inference_mode():
        logits = run_rows(aux_recording, prompts, steps, attention)
    parts = [[] for _ in prompts]
    for step, rows in zip(steps, aux_recording.rows, strict=True):
        for (row, _), part in zip(step, rows.split([count for _, count in step]), strict=True):
            parts[row].append(part)
    return [torch.cat(part) for part in parts], logits


@pytest.mark.parametrize("layers", [(0, 1, 2, 3, 4), (1, 2, 4), (3,), (4, 0)])
@pytest.mark.parametrize("attention", ["dense", "paged"])
def test_taps_are_the_inputs_of_transformers_layers(checkpoint, library, layers, attention):
    folder, prompts, wanted = checkpoint
    for kernels in (None, library):
        model = load(folder, kernels)
        port = None
        if attention == "paged":
            port = PagedRows(
                lambda spec, kv: NativePagedAttention(spec, kv, library),
                model.spec,
                model.dtype,
                len(prompts),
            )
        got, _ = aux_rows(model, prompts, layers, port)
        for ours, theirs in zip(got, wanted, strict=True):
            theirs = theirs[:, list(layers)]
            # The error is relative to the layer's largest value, because the residual stream grows to about
            # 10.
            scale = theirs.abs().amax((0, 2), keepdim=True)
            assert ((ours - theirs).abs() / scale).max() < 1e-5


def test_taps_include_deepstack_features(checkpoint):
    """Without deepstack features the states would differ clearly, so the test above would detect missing
    features.
    """
    folder, prompts, _ = checkpoint
    model = load(folder, None)
    with_features, _ = aux_rows(model, prompts, (1, 2, 3))
    model.encode = without_deepstack(model.encode)
    without, _ = aux_rows(model, prompts, (1, 2, 3))
    media = torch.from_numpy(prompts[0].types > 0)
    assert (with_features[0] - without[0])[media].abs().mean() > 0.1


def without_deepstack(encode):
    def encoded(patches, grids):
        features = encode(patches, grids)
        features[:, HIDDEN:] = 0
        return features

    return encoded


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tapping_changes_no_bit(checkpoint, library, dtype):
    folder, prompts, _ = checkpoint
    for kernels in (None, library):
        model = load(folder, kernels, dtype)
        _, logits = aux_rows(model, prompts, (0, 2, 4))
        steps = ragged_steps(prompts, np.random.default_rng(10), 6)
        with torch.inference_mode():
            assert all(map(torch.equal, logits, run_rows(model, prompts, steps)))


def test_kernels_refuse_unsuitable_tap_buffers(checkpoint, library):
    folder, prompts, _ = checkpoint
    model = load(folder, library)
    embeds, positions = torch.randn(3, HIDDEN), torch.zeros(3, 3, dtype=torch.int64)
    assert isinstance(model._text._decoder, Decoder)
    for layers, rows in (
        ((0, 1), torch.empty(3, HIDDEN)),
        ((0,), torch.empty(2, HIDDEN)),
        ((0,), torch.empty(3, HIDDEN, dtype=torch.bfloat16)),
        ((0,), torch.empty(HIDDEN, 3).t()),
        ((NUM_LAYERS + 1,), torch.empty(3, HIDDEN)),
        ((-1,), torch.empty(3, HIDDEN)),
    ):
        with pytest.raises(ValueError, match="auxiliary"):
            model.forward(embeds, None, positions, None, AuxHiddenStates(layers, rows))
