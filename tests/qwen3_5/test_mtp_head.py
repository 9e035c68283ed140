"""Tests the multi-token-prediction head of a hybrid checkpoint. The head's outputs equal a reference built
from transformers' modules. The head's drafts change no bit of an answer.
"""

import numpy as np
import pytest
import torch

from mmengine.replay import verify
from tests.qwen3_5.mtp_heads import add_head
from tests.qwen3_5.test_equal_bits import ALONE, PROMPTS, answers, engine_of
from tests.qwen3_5.tiny import make_text

DRAFTED = {"spec": "mtp", "draft_policy": "all", "num_draft_tokens": 3}
KEPT = {"enable_prefix_caching": True, "snapshot_every": 8}
SETTINGS = {
    "at once": {},
    "in chunks, from kept states": {"token_budget": 12, "max_num_seqs": 3, "num_state_slots": 32} | KEPT,
    "preempted": {"num_blocks": 48, "max_model_len": 160} | KEPT,
    "as many as pay": {"draft_policy": "goodput", "max_num_seqs": 3} | KEPT,
}


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "mixture"])
def made(request, tmp_path_factory):
    """Return the folder of a model with a head, its transformers model, and the head's tensors."""
    folder = tmp_path_factory.mktemp("hybrid")
    model = make_text(folder, mixture=request.param)
    return folder, model, add_head(folder, model)


@pytest.fixture(scope="module")
def alone(made):
    with engine_of(made[0], **ALONE) as engine:
        return answers(engine)


def reference(model, tensors, ids):
    """Return the head's outputs for a prompt, computed with transformers' modules: [n - 1, hidden]."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as dense
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as mixture

    decoder, config = model.model, model.model.config
    parts = mixture if hasattr(config, "num_experts") else dense
    norm_of = mixture.Qwen3_5MoeRMSNorm if parts is mixture else dense.Qwen3_5RMSNorm
    layer_of = mixture.Qwen3_5MoeDecoderLayer if parts is mixture else dense.Qwen3_5DecoderLayer

    def load(module, prefix):
        found = {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
        module.load_state_dict(found)
        return module.eval()

    def norm(name):
        return load(norm_of(config.hidden_size, eps=config.rms_norm_eps), f"mtp.{name}.")

    layer = load(layer_of(config, config.layer_types.index("full_attention")), "mtp.layers.0.")
    token_ids = torch.tensor(ids, dtype=torch.long)[None]
    with torch.inference_mode():
        hidden = decoder(token_ids, use_cache=False).last_hidden_state[:, :-1]
        embeds = decoder.embed_tokens(token_ids[:, 1:])
        both = torch.cat((norm("pre_fc_norm_embedding")(embeds), norm("pre_fc_norm_hidden")(hidden)), -1)
        count = both.shape[1]
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        out = layer(
            both @ tensors["mtp.fc.weight"].T,
            position_embeddings=decoder.rotary_emb(both, positions),
            attention_mask=mask,
            position_ids=positions,
        )
        return norm("norm")(out[0] if isinstance(out, tuple) else out)[0]


def test_the_head_computes_its_description(made):
    """The head's outputs for a prompt equal the reference."""
    folder, model, tensors = made
    with engine_of(folder, **DRAFTED) as engine:
        head = engine.built.executor._runner._drafting.head._head
        forward, seen = head.forward, []
        head.forward = lambda *given: (seen.append(found := forward(*given)), found)[1]
        (found,) = engine.generate([PROMPTS[-1]], max_tokens=3, ignore_eos=True)
        prepared = engine.processor.prepare([{"role": "user", "content": PROMPTS[-1]}])
    ids = [*prepared.prompt_token_ids.tolist(), *found.token_ids]
    wanted = reference(model, tensors, ids[: len(prepared.prompt_token_ids) + 1])
    assert seen[0][0].shape == wanted.shape
    assert torch.allclose(seen[0][0], wanted, atol=2e-4)
    assert torch.equal(seen[0][0], seen[0][1]), "the next draft reads the normed output"


@pytest.mark.parametrize("name", SETTINGS)
def test_bits_with_drafts_equal_a_single_row(made, alone, tmp_path, name):
    with engine_of(made[0], tmp_path / "log", **DRAFTED | SETTINGS[name]) as engine:
        assert engine.built.executor._runner._drafting.names == ["mtp"]
        for _ in range(2):
            for (tokens, scores), (wanted, exact) in zip(answers(engine), alone, strict=True):
                assert tokens == wanted
                assert np.array_equal(scores, exact)
        stats = engine.stats()
        failures = engine.built.executor._runner._drafting.failures
    (counts,) = stats.drafts.values()
    print(f"{name}: {counts}")
    assert failures == [0]
    assert 0 < counts.accepted < counts.proposed
    if "draft_policy" not in SETTINGS[name]:  # The policy goodput depends on measured times.
        assert 0.1 < counts.accepted / counts.proposed < 0.9
    assert (stats.num_preemptions > 0) is (name == "preempted")
    report = verify(tmp_path / "log", invariants=True)
    assert report.ok and report.rederived and not report.unfinished
