"""Tests that the scheduler and a second, naive scheduler make the same decisions in random scenarios."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_scheduler import NaiveScheduler
from simulated import SMALL, request, run

from mmengine.core.state.policy import Policy, register_policy
from mmengine.simulation import first_difference

RANGES = [[2000, 2100], [5000, 5200], [9000, 9010]]
SIZES = {"cat": 6, "dog": 11, "owl": 16}


def _rank(req_state):
    rest = req_state.num_prompt + req_state.request.sampling.max_tokens - len(req_state.tokens)
    return (rest, req_state.arrival)


def _victim(view):
    return max(view.running.tolist(), key=lambda row: _rank(view.requests_by_row[row]))


SHORTEST_REST = Policy(_rank, _victim)
register_policy("shortest_rest", SHORTEST_REST)


@st.composite
def requests(draw, number):
    name = f"q{number}"
    prompt, images = [["gen", draw(st.sampled_from("PQ")), draw(st.sampled_from([3, 8, 13, 24])), 0]], []
    start = prompt[0][2]
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        item = draw(st.sampled_from(sorted(SIZES)))
        images.append([start, SIZES[item], item])
        text = draw(st.integers(1, 9))
        prompt += [["img", SIZES[item]], ["gen", name if draw(st.booleans()) else "T", text, start]]
        start += SIZES[item] + text
    raw = {
        "id": name,
        "prompt": prompt,
        "images": images,
        "max_tokens": draw(st.sampled_from([1, 5, 14, 24])),
    }
    raw |= {"arrival_step": draw(st.integers(0, 5)), "priority": draw(st.integers(0, 1))}
    kind = draw(st.sampled_from(["plain", "plain", "stop", "grammar", "bad"]))
    if kind == "stop":
        raw |= {"stop_token": 900, "stop_at": draw(st.integers(0, 12))}
    elif kind != "plain":
        raw["grammar"] = {"ranges": RANGES}
        raw |= {"inject_bad_at": draw(st.integers(0, 9))} if kind == "bad" else {}
    return raw


@st.composite
def scenarios(draw):
    size = draw(st.sampled_from([2, 4, 8]))
    config = {
        **SMALL,
        "policy": draw(st.sampled_from(["fcfs", "priority", "prefill_first", "shortest_rest"])),
        "max_num_seqs": draw(st.integers(2, 5)),
        "max_num_batched_tokens": draw(st.sampled_from([16, 24, 48])),
        "max_model_len": 80,
        "block_size": size,
        "num_blocks": -(-draw(st.sampled_from([80, 80, 88, 120])) // size),
        "enable_prefix_caching": draw(st.booleans()),
        "encoder_compute_budget": draw(st.sampled_from([16, 24])),
        "encoder_cache_size": draw(st.sampled_from([16, 27, 48])),
        "admission_reserve": draw(st.sampled_from(["none", "prompt", "output"])),
        "disable_chunked_mm_input": draw(st.sampled_from([False, False, True])),
    }
    if not config["disable_chunked_mm_input"]:
        config["long_prefill_token_threshold"] = draw(st.sampled_from([0, 0, 5]))
    if draw(st.booleans()):
        config |= {
            "num_spec_tokens": draw(st.integers(1, 3)),
            "spec_method": draw(st.sampled_from(["ngram", "eagle3"])),
        }
    asked = [draw(requests(number)) for number in range(draw(st.integers(4, 8)))]
    events = []
    for raw in asked:
        at = raw["arrival_step"]
        if config["enable_prefix_caching"]:
            # After a row's error, the two schedulers have different prefix hits.
            raw.pop("inject_bad_at", None)
        if raw.get("grammar"):
            op = draw(st.sampled_from(["grammar_ready"] * 4 + ["grammar_error"]))
            events.append({"step": at + draw(st.integers(0, 5)), "op": op, "id": raw["id"]})
        if draw(st.integers(0, 7)) == 0:
            events.append({"step": at + draw(st.integers(0, 12)), "op": "abort", "id": raw["id"]})
    events.sort(key=lambda event: event["step"])
    return {"config": config, "requests": asked, "events": events, "max_steps": 3000}


def compare(scenario, path):
    path.write_text(json.dumps(scenario))
    report, ours, made = run(path)
    assert not report.num_refused and not report.unfinished
    naive = NaiveScheduler(path, scenario, made.config).run()
    gone = {event["id"] for event in scenario["events"] if event["op"] == "grammar_error"}
    assert first_difference(naive, ours, soft=True, open_ends=gone) == ""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("naive") / "scenario.json"


GRAMMAR = {"ranges": RANGES}
# Cases that random scenarios rarely reach: decision -> (settings, requests).
CASES = {
    "among equal requests the latest is preempted": (
        {"policy": "priority", "num_blocks": 5, "max_model_len": 40},
        [request("a", 14, out=9), request("b", 14, out=9), request("c", 3, out=9, at=1)],
    ),
    "a preempted request waits after a more important request": (
        {"policy": "priority", "num_blocks": 4, "max_model_len": 32, "max_num_seqs": 2},
        [request("a", 14, out=9), request("b", 14, out=9, priority=2), request("c", 6, at=1, priority=1)],
    ),
    "a preempted request waits after an earlier request": (
        {"num_blocks": 4, "max_model_len": 32},
        [request("g", grammar=GRAMMAR), request("a", 14, out=9), request("b", 14, out=9)],
    ),
    "a preempted request waits before a later request": (
        {"num_blocks": 4, "max_model_len": 32, "max_num_seqs": 2},
        [request("a", 14, out=9), request("b", 14, out=9), request("c", 6, at=1)],
    ),
    "a request that waits for the encoder is passed over": (
        {"encoder_cache_size": 16, "long_prefill_token_threshold": 6},
        [
            request("a", prompt=[["img", 16], ["gen", "a", 6, 0]], images=[[0, 16, "owl"]]),
            request("b", prompt=[["img", 11], ["gen", "b", 6, 0]], images=[[0, 11, "dog"]]),
            request("c", 9),
        ],
    ),
    "a request whose blocks are not free holds back later requests": (
        {"num_blocks": 6, "max_model_len": 48},
        [request("a", 30, out=12), request("b", 30, out=2), request("c", 3, out=2)],
    ),
    "blocks for the whole prompt must be free, not only for its first chunk": (
        {
            "num_blocks": 6,
            "max_model_len": 48,
            "long_prefill_token_threshold": 8,
            "admission_reserve": "prompt",
        },
        [request("a", 20, out=12), request("b", 30, out=2, at=1)],
    ),
    "a first block is hit with the image in it, and with no other": (
        {},
        [
            request("a", prompt=[["img", 6], ["gen", "T", 9, 0]], images=[[0, 6, "cat"]]),
            request("b", prompt=[["img", 6], ["gen", "T", 9, 0]], images=[[0, 6, "fox"]], at=4),
            request("c", prompt=[["img", 6], ["gen", "T", 9, 0]], images=[[0, 6, "cat"]], at=4),
        ],
    ),
    "an image that the encoder has no budget left for waits a step": (
        {"encoder_compute_budget": 16},
        [
            request("a", prompt=[["img", 6], ["gen", "a", 3, 0]], images=[[0, 6, "cat"]]),
            request("b", prompt=[["gen", "b", 3, 0], ["img", 11]], images=[[3, 11, "dog"]]),
        ],
    ),
    "a cached image that a request needs is not evicted for the request's next image": (
        {"encoder_cache_size": 16, "max_num_seqs": 2},
        [
            request("a", prompt=[["img", 6], ["gen", "a", 3, 0]], images=[[0, 6, "cat"]], out=1),
            request(
                "b",
                prompt=[["img", 6], ["gen", "b", 3, 0], ["img", 11], ["gen", "b", 3, 9]],
                images=[[0, 6, "cat"], [9, 11, "dog"]],
                at=2,
            ),
        ],
    ),
    "the last token of the budget starts a request": (
        {"max_num_batched_tokens": 16},
        [request("a", 15), request("b", 6)],
    ),
    "drafts end where the model's length does": (
        {"max_model_len": 24, "num_spec_tokens": 3, "spec_method": "eagle3"},
        [request("a", 14, out=10), request("b", 13, out=11)],
    ),
    "of equal blocks that one step fills, the block without an image after it is hit": (
        {"long_prefill_token_threshold": 5},
        [
            request(
                "a",
                prompt=[["gen", "Q", 8, 0], ["img", 6], ["gen", "a", 2, 0]],
                images=[[8, 6, "cat"]],
                out=9,
            ),
            request("b", prompt=[["gen", "Q", 8, 0]], out=1),
            request("c", prompt=[["gen", "Q", 9, 0]], at=4),
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_decision_is_that_of_a_naive_scheduler(path, case):
    config, asked = CASES[case]
    events = [{"step": 20, "op": "grammar_ready", "id": raw["id"]} for raw in asked if "grammar" in raw]
    compare({"config": {**SMALL, **config}, "requests": asked, "events": events, "max_steps": 500}, path)


@settings(max_examples=24, deadline=None, derandomize=True)
@given(scenarios())
def test_decisions_are_those_of_a_naive_scheduler(path, scenario):
    compare(scenario, path)


@pytest.mark.soak
@settings(max_examples=4000, deadline=None)
@given(scenarios())
def test_decisions_are_those_of_a_naive_scheduler_at_length(path, scenario):
    compare(scenario, path)
