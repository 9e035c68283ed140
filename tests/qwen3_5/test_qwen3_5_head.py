"""Tests an EAGLE-3 head that drafts for a hybrid model. The head reads the inputs of the layers that its
config names. Its drafts do not change an answer's bits.
"""

import random
from itertools import accumulate

import numpy as np
import pytest
import torch

from mmengine.replay import verify
from mmengine.spec_decode.base import Proposed
from mmengine.spec_decode.eagle3.config import Target
from tests.qwen3_5.test_equal_bits import ALONE, PROMPTS, answers, engine_of
from tests.qwen3_5.tiny import TEXT, make_text
from tests.spec_decode import eagle3_heads

TAPS = [0, 2, 4]  # The first layer, the attention layer, and the final norm.
SETTINGS = {
    "at once": {},
    "in chunks, from kept states": {
        "token_budget": 12,
        "max_num_seqs": 3,
        "num_state_slots": 32,
        "enable_prefix_caching": True,
        "snapshot_every": 8,
    },
    "preempted": {"num_blocks": 48, "max_model_len": 160, "enable_prefix_caching": True, "snapshot_every": 8},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return the folder of a model, its transformers model, and the folder of a head."""
    folder, head = tmp_path_factory.mktemp("hybrid"), tmp_path_factory.mktemp("head")
    model = make_text(folder)
    target = Target(TEXT["hidden_size"], model.config.vocab_size, TEXT["num_hidden_layers"])
    fields = {
        "eagle_aux_hidden_state_layer_ids": TAPS,
        "transformer_layer_config__vocab_size": target.vocab_size,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eagle3_heads, "TARGET", target)
        eagle3_heads.edited("speculators", **fields).save(head)
    return folder, model, head


@pytest.fixture(scope="module")
def alone(made):
    with engine_of(made[0], **ALONE) as engine:
        return answers(engine)


def drafting(made, log=None, **settings):
    sizes = {"spec": f"eagle3={made[2]}", "draft_policy": "all", "num_draft_tokens": 3}
    return engine_of(made[0], log, **sizes | settings)


def test_the_head_reads_the_layers_inputs(made):
    seen, entered = [], []
    with drafting(made) as engine:
        head = engine.built.executor._runner._drafting.head._head
        fuse = head.fuse
        head.fuse = lambda rows: (seen.append(rows.clone()), fuse(rows))[1]
        (found,) = engine.generate([PROMPTS[-1]], max_tokens=2, ignore_eos=True)
        ids = engine.processor.prepare([{"role": "user", "content": PROMPTS[-1]}]).prompt_token_ids
    decoder = made[1].model

    def keep(module, args, kwargs):
        entered.append((args[0] if args else kwargs["hidden_states"])[0])

    hooks = [
        part.register_forward_pre_hook(keep, with_kwargs=True) for part in [*decoder.layers, decoder.norm]
    ]
    with torch.inference_mode():
        made[1](torch.from_numpy(ids).long()[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    wanted = torch.cat([entered[layer] for layer in TAPS], 1)
    assert seen[0].shape == wanted.shape and len(found.token_ids) == 2
    assert torch.allclose(seen[0], wanted, atol=2e-4)


class Steered:
    """Replaces a random number of each row's first drafts by the next tokens of the answer without drafts,
    which are accepted. Most other drafts are rejected.
    """

    def __init__(self, drafter, texts, seed=3):
        self._propose, self._texts, self._random = drafter.propose, texts, random.Random(seed)
        drafter.propose = self.propose

    def propose(self, rows, texts, most, given=None):
        found = self._propose(rows, texts, most, given)
        if found is None:
            return None
        ends = accumulate(found.counts.tolist())
        drafts = found.token_ids.copy()
        for row, count, end in zip(rows.tolist(), found.counts.tolist(), ends, strict=True):
            known = texts.tokens[row, : texts.lengths[row]].tolist()
            (text,) = {text for text in self._texts if list(text[: len(known)]) == known}
            right = min(self._random.randint(0, count), len(text) - len(known))
            drafts[end - count : end - count + right] = text[len(known) : len(known) + right]
        return Proposed(drafts, found.counts)


@pytest.mark.parametrize("name", SETTINGS)
def test_bits_with_drafts_equal_a_single_row(made, alone, tmp_path, name):
    with drafting(made, tmp_path / "log", **SETTINGS[name]) as engine:
        prompts = [
            engine.processor.prepare([{"role": "user", "content": prompt}]).prompt_token_ids.tolist()
            for prompt in PROMPTS
        ]
        texts = [(*prompt, *tokens) for prompt, (tokens, _) in zip(prompts, alone, strict=True)]
        Steered(engine.built.executor._runner._drafting.head, texts)
        for _ in range(2):
            for (tokens, scores), (wanted, exact) in zip(answers(engine), alone, strict=True):
                assert tokens == wanted
                assert np.array_equal(scores, exact)
        stats = engine.stats()
    (counts,) = stats.drafts.values()
    assert 0 < counts.accepted < counts.proposed
    assert (stats.num_cached_tokens > 0) is bool(SETTINGS[name].get("enable_prefix_caching"))
    assert (stats.num_preemptions > 0) is (name == "preempted")
    report = verify(tmp_path / "log", invariants=True)
    assert report.ok and report.rederived and not report.unfinished
