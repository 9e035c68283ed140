"""Tests that drafts change neither an answer's tokens, logprobs and end, nor the token at which a row with
NaN fails. NaN in a draft affects at most the draft's row.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_toy import EOS, VOCAB, ToyModel, positions_of

from mmengine.config import EngineConfig
from mmengine.core.engine import EngineCore
from mmengine.request import Request, SamplingParams
from mmengine.runtime.device.cpu import CpuDevice
from mmengine.runtime.device.placement import Placement
from mmengine.runtime.executor import TorchExecutor
from mmengine.spec_decode.base import Proposed

CONFIG = EngineConfig(
    max_num_seqs=4,
    token_budget=64,
    max_model_len=120,
    num_blocks=64,
    encoder_cache_size=64,
    block_size=4,
    num_draft_tokens=7,
    eos_token_ids=(EOS,),
)


class Drafts:
    """A drafter that proposes what `ahead_of(request id, output tokens so far)` returns."""

    name = "test"

    def __init__(self, ahead_of):
        self._ahead_of, self._names = ahead_of, {}

    def admit(self, row, request, texts):
        self._names[row] = request.request_id
        return True

    def leave(self, row, texts):
        pass

    def propose(self, rows, texts, most):
        found = []
        for row, room in zip(rows.tolist(), most.tolist()):
            said = texts.tokens[row, texts.num_prompt[row] : texts.lengths[row]].tolist()
            found.append(list(self._ahead_of(self._names[row], said))[:room])
        return Proposed(np.array([t for each in found for t in each], np.int32), np.array([*map(len, found)]))


def run(model, wanted, ahead_of=None, attention="auto"):
    """Run requests with drafts from `ahead_of`. Return the results and the number of steps.

    `wanted`: request name -> sampling parameters. The results: request name -> [tokens, finish reason,
    detail, logprobs].
    """
    drafters = [Drafts(ahead_of)] if ahead_of else []
    placement = Placement(CpuDevice(), torch.float32, attention)
    executor = TorchExecutor(model, positions_of, CONFIG, placement, drafters=drafters)
    core = EngineCore(CONFIG, executor)
    ends = {name: [[], None, "", []] for name in wanted}
    for name, sampling in wanted.items():
        prompt = np.random.default_rng(sampling.get("seed", 0)).integers(0, EOS, 7).astype(np.int32)
        core.submit(Request(name, prompt, SamplingParams(**sampling)))
    while core.has_work:
        for output in core.step():
            end = ends[output.request_id]
            end[0] += output.token_ids
            end[3] += output.logprobs or []
            if output.finish_reason:
                end[1], end[2] = output.finish_reason, output.detail
    if drafters:
        assert executor._runner._drafting.failures == [0]
    return ends, core.stats().steps


def true_ahead(plain):
    return lambda name, said: plain[name][0][len(said) :]


def same(found, want):
    for name, (tokens, reason, detail, logprobs) in want.items():
        assert found[name][:3] == [tokens, reason, detail]
        for mine, theirs in zip(found[name][3], logprobs, strict=True):
            assert mine[0][0] == theirs[0][0]
            assert np.allclose([v for _, v in mine], [v for _, v in theirs], atol=1e-5)


FREE = {"ignore_eos": True, "max_tokens": 17}


def test_an_accepted_run_is_kept_up_to_the_texts_end():
    # The drafts continue after the token at which the answer must end. The answer still ends at this token.
    model = ToyModel()
    base, _ = run(model, {"a": FREE})
    stop = next(t for t in base["a"][0][2:] if t not in base["a"][0][:2])
    place = base["a"][0].index(stop)
    wanted = {
        "a": FREE,
        "b": {**FREE, "max_tokens": 2},
        "token": {**FREE, "stop_token_ids": (stop,), "logprobs": 2},
        "late": {**FREE, "stop_token_ids": (stop,), "min_tokens": place + 2},
        "biased": {"max_tokens": 17, "logit_bias": {EOS: 4.0}, "logprobs": 0},
    }
    plain, slow = run(model, wanted)
    assert plain["token"][2] == "token" and len(plain["token"][0]) == place + 1

    def ahead_of(name, said):
        """Return the tokens that follow `said`, even beyond the token at which the request must stop."""
        return plain["a" if name in ("a", "b", "token") else name][0][len(said) :]

    found, fast = run(model, wanted, ahead_of)
    same(found, plain)
    assert fast < slow / 2


class LateNan(ToyModel):
    """A model whose last hidden state is NaN for the token `broken`."""

    broken = None

    def embed(self, input_ids):
        self.ids = input_ids
        return super().embed(input_ids)

    def forward(self, *inputs):
        out = super().forward(*inputs)
        out[self.ids == self.broken] = float("nan")
        return out


def unsaid(plain):
    """Return a token id that occurs in no prompt and no answer."""
    held = {token for tokens, *_ in plain.values() for token in tokens}
    held |= {int(t) for n in range(9) for t in np.random.default_rng(n).integers(0, EOS, 7)}
    return next(token for token in range(VOCAB) if token not in held)


MIXED = {"a": FREE, "b": {**FREE, "temperature": 1.0, "seed": 3}, "c": {**FREE, "logprobs": 1}}


def test_a_draft_with_nonfinite_logits_is_rejected_alone():
    model = LateNan()
    plain, slow = run(model, MIXED)
    model.broken = unsaid(plain)

    def ahead_of(name, said):
        rest = plain[name][0][len(said) :]
        return [*rest[: len(said) % 3], model.broken, *rest]

    found, fast = run(model, MIXED, ahead_of)
    same(found, plain)
    assert fast < slow


def test_nan_inside_a_run_fails_the_row_at_the_same_token():
    model = LateNan()
    plain, _ = run(model, {"a": FREE, "b": FREE})
    model.broken = plain["a"][0][4]
    want, slow = run(model, {"a": FREE, "b": FREE})
    assert want["a"][1] == "error" and "NaN" in want["a"][2]
    found, fast = run(model, {"a": FREE, "b": FREE}, true_ahead(plain))
    same(found, want)
    assert fast < slow


@pytest.mark.parametrize("attention", ["torch", "auto"])
def test_a_draft_with_nonfinite_keys_fails_only_its_row(attention):
    """The draft's row fails because attention multiplies masked values by 0, and 0 times NaN is NaN."""
    model = ToyModel()
    plain, _ = run(model, MIXED, attention=attention)
    model.poisoned = unsaid(plain)
    ahead = {"a": lambda said: [model.poisoned] if len(said) == 5 else ()}
    again = {**MIXED, "d": FREE, "e": FREE}  # d and e get the rows of requests that ended

    def ahead_of(name, said):
        return ahead[name](said) if name in ahead else plain.get(name, [()])[0][len(said) :]

    clean, _ = run(model, again, attention=attention)
    found, _ = run(model, again, ahead_of, attention)
    tokens, reason, detail, _ = found.pop("a")
    assert tokens == plain["a"][0][: len(tokens)] and (reason, "NaN" in detail) == ("error", True)
    same(found, {name: clean[name] for name in found})


def test_an_end_of_sequence_that_was_proposed_ends_the_text_there():
    model = ToyModel()
    wanted = {"a": {"max_tokens": 17, "logit_bias": {EOS: 3.5}}, "b": {**FREE, "logit_bias": {EOS: 3.5}}}
    plain, _ = run(model, wanted)
    assert plain["a"][0][-1] == EOS and plain["a"][2] == "eos"
    found, _ = run(model, wanted, lambda name, said: [*plain[name][0][len(said) :], EOS, EOS, 1, 2])
    same(found, plain)


@pytest.mark.parametrize("attention", ["torch", "auto"])
def test_penalties_and_noise_count_a_runs_earlier_tokens(attention):
    model = ToyModel()
    wanted = {
        f"{number}": {
            **FREE,
            "temperature": number % 2 * 1.2,
            "seed": number,
            "frequency_penalty": number / 3,
            "presence_penalty": 0.6 - number / 4,
            "repetition_penalty": 1 + number / 5,
        }
        for number in range(6)
    }
    plain, slow = run(model, wanted, attention=attention)
    found, fast = run(model, wanted, true_ahead(plain), attention)
    same(found, plain)
    assert fast < slow / 2


SWITCHED = {
    "a": FREE,
    "b": {**FREE, "temperature": 1.0, "seed": 3, "repetition_penalty": 1.2},
    "c": {"max_tokens": 17, "logprobs": 1, "logit_bias": {EOS: 3.5}, "seed": 1},
    "d": {**FREE, "frequency_penalty": 0.6, "presence_penalty": -0.3, "seed": 2},
    "e": {**FREE, "temperature": 0.8, "top_k": 9, "seed": 4},
}


@settings(max_examples=30, deadline=None)
@given(
    counts=st.lists(st.integers(0, 7), min_size=1, max_size=40),
    wrong=st.lists(st.none() | st.integers(0, 6), min_size=1, max_size=40),
)
def test_the_number_of_drafts_may_change_with_every_step(counts, wrong):
    """Proposal i has counts[i] drafts, and the draft at index wrong[i] is wrong (None: all are right)."""
    model = ToyModel()
    plain, slow = run(model, SWITCHED)
    asked = 0

    def ahead_of(name, said):
        nonlocal asked
        drafts = plain[name][0][len(said) :][: counts[asked % len(counts)]]
        place = wrong[asked % len(wrong)]
        if place is not None and place < len(drafts):
            drafts[place] = (drafts[place] + 1) % VOCAB
        asked += 1
        return drafts

    found, fast = run(model, SWITCHED, ahead_of)
    same(found, plain)
    assert fast <= slow
