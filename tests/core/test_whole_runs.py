"""Tests for models that must compute each media run (`atomic_runs`) or prompt (`whole_prompt`) in a single
step.
"""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_engine import Bench, image, ints, request, settings_of, video
from workloads import small_config

from mmengine.core.decide import admission, running, start
from mmengine.core.decide.whole_runs import whole_hits
from mmengine.errors import ErrorCode, InvalidRequest
from mmengine.events import vocabulary as ev
from mmengine.request import run_start
from mmengine.simulation.simulated_executor import SimulatedExecutor
from tests.core.chaos import check_seed

RULES = ("atomic_runs", "whole_prompt")


def seeds_with(rule, count):
    """Return the first `count` seeds whose random settings have the option `rule`."""
    found = (seed for seed in range(10_000) if getattr(small_config(random.Random(seed)), rule))
    return [next(found) for _ in range(count)]


@pytest.mark.parametrize("rule", RULES)
def test_no_run_and_no_prompt_is_split_despite_faults(rule, tmp_path):
    for seed in seeds_with(rule, 3):
        check_seed(seed, tmp_path / str(seed))


@pytest.mark.soak
@pytest.mark.parametrize("rule", RULES)
def test_no_run_and_no_prompt_is_split_despite_faults_in_the_long_run(rule, tmp_path):
    for seed in seeds_with(rule, 100)[3:]:
        check_seed(seed, tmp_path / str(seed))


PLANTED = {
    "chunks split runs": ("atomic_runs", ((admission, "whole_chunk"), (running, "whole_chunk"))),
    "chunks split prompts": ("whole_prompt", ((admission, "whole_chunk"), (running, "whole_chunk"))),
}


def any_chunk(view, req_state, start, length):
    return length


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_breaks_the_invariant_of_its_name(bug, tmp_path, monkeypatch):
    rule, places = PLANTED[bug]
    for module, name in places:
        monkeypatch.setattr(module, name, any_chunk)
    with pytest.raises(AssertionError, match=f"name='{rule}'"):
        for seed in seeds_with(rule, 60):
            check_seed(seed, tmp_path / str(seed))


runs_of_items = st.lists(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=3), max_size=4
)


def placed(drawn):
    """Return media with the drawn runs, and the runs. `drawn`: (gap before the run, length) pairs for each
    item.
    """
    items, runs, place = [], [], 0
    for number, item in enumerate(drawn):
        own = []
        for gap, length in item:
            own.append((place + gap, length))
            place += gap + length
        items.append(video(number, *own))
        runs += own
    return items, runs


@given(runs_of_items, st.integers(0, 80), st.integers(1, 8))
def test_a_position_in_a_run_and_the_blocks_before_it(drawn, position, size):
    media, runs = placed(drawn)
    inside = [first for first, length in runs if first < position < first + length]
    assert run_start(media, position) == (inside[0] if inside else position)
    count = position // size
    fits = [
        number
        for number in range(count + 1)
        if not any(first < number * size < first + length for first, length in runs)
    ]
    assert whole_hits(media, count, size) == max(fits)


class Steps(SimulatedExecutor):
    """Records how many tokens each step computes for each request."""

    def __init__(self, config):
        super().__init__(config, check_kv=True)
        self.names, self.steps = {}, []

    def dispatch(self, plan):
        self.names.update((one.row, one.request.request_id) for one in plan.admitted)
        names = [self.names[row] for row in plan.rows.tolist()]
        self.steps.append(dict(zip(names, plan.num_scheduled.tolist(), strict=True)))
        super().dispatch(plan)


def bench_of(**settings):
    settings = {"token_budget": 16, "block_size": 4, "num_blocks": 40, "max_model_len": 64, **settings}
    return Bench(executor=Steps(settings_of(**settings)), **settings)


def test_an_image_waits_until_a_step_has_tokens_for_it():
    bench = bench_of(atomic_runs=True)
    bench.submit(request("text", 12, max_tokens=3))
    bench.submit(request("image", 20, media=[image(1, 2, 12)], max_tokens=1))
    bench.submit(request("after", 4, max_tokens=1))
    bench.run()
    assert bench.executor.steps == [
        {"text": 12, "image": 2, "after": 2},
        {"text": 1, "image": 15},
        {"text": 1, "image": 3, "after": 2},
    ]


def test_a_request_that_begins_with_an_image_holds_back_the_requests_after_it():
    bench = bench_of(atomic_runs=True)
    bench.submit(request("text", 12, max_tokens=2))
    bench.submit(request("image", 20, media=[image(1, 0, 16)], max_tokens=1))
    bench.submit(request("after", 4, max_tokens=1))
    bench.run()
    assert bench.executor.steps == [
        {"text": 12},
        {"text": 1},
        {"image": 16},
        {"image": 4, "after": 4},
    ]


def test_a_prompt_waits_for_its_step():
    bench = bench_of(whole_prompt=True)
    for name, length in (("first", 10), ("second", 12), ("third", 3)):
        bench.submit(request(name, length, max_tokens=2))
    bench.run()
    assert bench.executor.steps == [
        {"first": 10},
        {"first": 1, "second": 12, "third": 3},
        {"second": 1, "third": 1},
    ]


def cached_tokens(bench, one):
    """Run a request, and return the number of cached tokens at its admission."""
    bench.submit(one)
    admitted = next(event for event in bench.run() if isinstance(event, ev.Admitted))
    return len(ints(admitted.cached_blocks)) * bench.config.block_size


def test_a_prefix_with_part_of_an_image_is_not_shared():
    bench = bench_of(atomic_runs=True)
    prompt = list(range(30))
    first, second = image(1, 3, 8), image(2, 22, 4)
    found = {
        name: cached_tokens(bench, request(name, prompt[:length], media=media, max_tokens=1))
        for name, length, media in (
            ("new", 30, [first, second]),
            ("equal", 30, [first, second]),
            ("ends after an image", 13, [first]),
            ("ends with an image", 11, [first]),
            ("ends after another image", 27, [first, second]),
        )
    }
    assert found == {
        "new": 0,
        "equal": 28,
        "ends after an image": 12,
        "ends with an image": 0,
        "ends after another image": 20,
    }


def test_a_planted_hit_that_splits_an_image_breaks_the_invariant(monkeypatch):
    monkeypatch.setattr(start, "whole_hits", lambda media, count, block_size: count)
    bench = bench_of(atomic_runs=True)
    bench.submit(request("new", list(range(14)), media=[image(1, 3, 8)], max_tokens=1))
    bench.run()
    bench.submit(request("ends with an image", list(range(11)), media=[image(1, 3, 8)], max_tokens=1))
    with pytest.raises(AssertionError, match="name='atomic_runs'"):
        bench.run()


def test_only_an_equal_prompt_shares_its_blocks():
    bench = bench_of(whole_prompt=True)
    prompt = list(range(14))
    found = {
        name: cached_tokens(bench, request(name, prompt[:length], max_tokens=1))
        for name, length in (("new", 14), ("equal", 14), ("shorter", 13))
    }
    assert found == {"new": 0, "equal": 12, "shorter": 0}


def test_another_answer_shares_the_prompt_before_its_last_image():
    bench = bench_of(atomic_runs=True)
    media = [image(1, 6, 5)]
    bench.submit(request("one", list(range(11)), media=media, max_tokens=4))
    bench.submit(request("two", list(range(11)), media=media, max_tokens=4, sample_index=1, group="one"))
    bench.run()
    assert bench.executor.steps[:2] == [{"one": 11}, {"one": 1, "two": 5}]


REFUSED = {
    "image 0 needs 17 tokens at once .* token_budget is 16": (
        {"atomic_runs": True},
        {"length": 30, "media": [image(1, 2, 17)]},
        ErrorCode.INVALID_VALUE,
    ),
    "17 tokens > 16 maximum; .* token_budget is 16": (
        {"whole_prompt": True},
        {"length": 17},
        ErrorCode.CONTEXT_LENGTH_EXCEEDED,
    ),
    "12 tokens > 8 maximum; .* long_prefill_token_threshold is 8": (
        {"whole_prompt": True, "long_prefill_token_threshold": 8},
        {"length": 12},
        ErrorCode.CONTEXT_LENGTH_EXCEEDED,
    ),
    "the prompt needs 8 embeddings at once .* encoder_budget is 7": (
        {"whole_prompt": True, "encoder_budget": 7},
        {"length": 14, "media": [image(1, 0, 4), image(2, 8, 4)]},
        ErrorCode.INVALID_VALUE,
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_no_step_can_compute_is_refused(words):
    settings, asked, code = REFUSED[words]
    with pytest.raises(InvalidRequest, match=words) as error:
        bench_of(**settings).submit(request("r", asked["length"], media=asked.get("media", ())))
    assert error.value.code == code
