"""Tests that prompt logprobs equal transformers' with any chunks and batches, caches and restarts."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmengine.config import EngineConfig
from mmengine.core.decide.request_checks import check_request
from mmengine.core.resume import Resume
from mmengine.errors import InvalidRequest
from mmengine.events import vocabulary as ev
from mmengine.models.loader import resolve_folder
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.verify import verify
from mmengine.request import Request, SamplingParams
from mmengine.serve.engine.engine import Engine
from mmengine.serve.prompt.prompt import Prompt
from tests.log_copies import copied

TEXT = "The red triangle is small, the star to its left is large; nothing is behind them. "
PROMPTS = [Prompt(text=TEXT * 3), Prompt(text="What is a star?"), Prompt(text="a"), Prompt(text=TEXT * 5)]


@pytest.fixture(scope="module")
def reference():
    """Return each prompt's logprobs for all tokens at all positions but the last, [n - 1, vocab_size]."""
    from transformers import Qwen3VLForConditionalGeneration

    model = Qwen3VLForConditionalGeneration.from_pretrained(resolve_folder(None), dtype=torch.float32).eval()
    with Engine() as engine:
        ids = [prompt.prepare(engine.processor).prompt_token_ids for prompt in PROMPTS]
    with torch.inference_mode():
        return [
            model(input_ids=torch.as_tensor(np.asarray(each), dtype=torch.int64)[None])
            .logits[0, :-1]
            .log_softmax(-1)
            .numpy()
            for each in ids
        ]


def check(completion, reference, k):
    ids = completion.prompt_token_ids
    entries = completion.prompt_logprobs
    assert len(entries) == len(ids) and entries[0] is None
    for place, entry in enumerate(entries[1:]):
        assert len(entry) == 1 + k and entry[0][0] == ids[place + 1]
        assert np.allclose(
            [logprob for _, logprob in entry], reference[place][[t for t, _ in entry]], atol=1e-4
        )
        best = np.sort(reference[place])[::-1][:k]
        assert np.allclose([logprob for _, logprob in entry[1:]], best, atol=1e-4)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.integers(16, 90), st.integers(0, 4), st.booleans(), st.sampled_from([1, 2]))
def test_logprobs_equal_transformers_in_any_chunks(reference, budget, k, caching, in_flight):
    config = EngineConfig(
        token_budget=budget, max_num_seqs=3, enable_prefix_caching=caching, max_in_flight=in_flight
    )
    with Engine(config=config) as engine:
        engine.generate(PROMPTS[-1:], max_tokens=1)  # may cache blocks, which the next call must not use
        found = engine.generate(PROMPTS, max_tokens=3, prompt_logprobs=k)
        again = engine.generate(PROMPTS[-1:], max_tokens=1)[0]
    assert all(each.num_cached_tokens == 0 for each in found)
    assert (again.num_cached_tokens > 0) == caching and again.prompt_logprobs is None
    for each, wanted in zip(found, reference, strict=True):
        check(each, wanted, k)


def test_with_several_answers_they_come_once(reference):
    with Engine() as engine:
        engine.submit(PROMPTS[0], prompt_logprobs=1, n=3, max_tokens=2, temperature=1.0, seed=1)
        news = []
        while not engine.is_idle:
            news += engine.step()
    assert [each.index for each in news if each.prompt_scores is not None] == [0]
    check(next(each.completion for each in news if each.completion), reference[0], 1)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_prompt_logprobs_are_complete_after_a_preemption(reference, mode, tmp_path):
    config = EngineConfig(
        num_blocks=14,
        token_budget=48,
        long_prefill_token_threshold=16,
        admission_reserve="none",
        max_num_seqs=4,
        max_model_len=200,
        preempt_mode=mode,
        swap_blocks=64 * (mode == "swap"),
    )
    places = (3, 3, 0, 3)
    with Engine(config=config, log=tmp_path / "log") as engine:
        names = [
            engine.submit(PROMPTS[place], max_tokens=30, ignore_eos=True, prompt_logprobs=2)
            for place in places
        ]
        found = {}
        while not engine.is_idle:
            found |= {each.request_id: each.completion for each in engine.step() if each.completion}
    for name, place in zip(names, places, strict=True):
        check(found[name], reference[place], 2)
    told = [record.event for record in CheckedLog(tmp_path / "log")]
    scored = next(place for place, event in enumerate(told) if getattr(event, "prompt_logprobs", ()))
    assert any(isinstance(event, ev.Preempted) for event in told[:scored])
    assert verify(tmp_path / "log").ok


def test_another_process_finds_them_in_the_log_or_computes_them(reference, tmp_path):
    config = EngineConfig(token_budget=32, max_num_seqs=2)
    folders = []
    with Engine(config=config, log=tmp_path / "log") as engine:
        for name, prompt in zip("abc", (PROMPTS[3], PROMPTS[0], PROMPTS[3]), strict=True):
            engine.submit(prompt, request_id=name, prompt_logprobs=1, max_tokens=8, ignore_eos=True)
        for step in range(14):
            engine.step(received=False)
            if step % 3 == 1:
                folders.append(copied(tmp_path / "log", tmp_path / f"log{step}"))
    for folder in folders:
        with Engine(log=folder, resume=Resume()) as engine:
            found = {name: engine.requests.resume(name) for name in "abc"}
            while not engine.is_idle:
                for output in engine.step():
                    found[output.request_id] = output.completion or found[output.request_id]
        for name, place in (("a", 3), ("b", 0), ("c", 3)):
            check(found[name], reference[place], 1)
        assert verify(folder).ok
        sizes = [len(e[3]) for r in CheckedLog(folder) for e in getattr(r.event, "prompt_logprobs", ())]
        assert len(sizes) >= 3


def test_too_many_are_refused():
    prompt = np.full(20_000, 5, np.int32)
    for asked, says in (
        (20, "prompt_logprobs 20 for 20000 prompt tokens gives 420000 logprobs"),
        (21, "prompt_logprobs must lie in 0 to 20"),
    ):
        request = Request("a", prompt, SamplingParams(prompt_logprobs=asked))
        with pytest.raises(InvalidRequest, match=says):
            check_request(request, EngineConfig(max_model_len=40_000))
    check_request(Request("a", prompt, SamplingParams(prompt_logprobs=5)), EngineConfig(max_model_len=40_000))
