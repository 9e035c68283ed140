"""Tests the explanations for a request: its events, its steps, and the causes of its delays."""

import random
from collections import defaultdict
from dataclasses import replace

import pytest

from mmengine.core.engine import EngineCore
from mmengine.core.state.digest import state_digest
from mmengine.errors import LogError
from mmengine.events import vocabulary as ev
from mmengine.events.call_ids import call_id
from mmengine.events.log import LogReader, LogWriter
from mmengine.replay import open_log, request_lines
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.queries.reasons import GAVE_WAY
from mmengine.replay.queries.request_events import request_events
from mmengine.replay.queries.request_names import find_requests, matching_ids
from mmengine.replay.queries.state_report import state_report
from mmengine.replay.queries.step_report import step_report
from mmengine.replay.queries.why import why
from mmengine.simulation.simulated_executor import SimulatedExecutor
from tests.core.small_engine import image, request, settings_of
from tests.replay.runs import busy_run
from tests.replay.step_reasons import reasons_of
from tests.replay.test_replay_reasons import random_log


def run(folder, *rounds, **settings):
    """Submit each round of requests after the previous round has ended."""
    config = settings_of(**settings)
    core = EngineCore(config, SimulatedExecutor(config), sink=LogWriter(folder))
    for requests in rounds:
        for each in requests:
            core.submit(each)
        while core.has_work:
            core.step()
    core.close()
    return folder


def claim(folder, name, kind):
    (found,) = [each for each in why(folder, name) if each.kind == kind]
    return found


# A request's events, and steps.


@pytest.mark.parametrize("seed, settings", [(0, {}), (5, {"num_draft_tokens": 3}), (2, {"max_in_flight": 2})])
def test_a_life_has_every_token(tmp_path, seed, settings):
    live = busy_run(tmp_path / "log", seed, **settings)
    for line in request_lines(tmp_path / "log"):
        life = list(request_events(CheckedLog(tmp_path / "log"), line.request_id))
        tokens = [token for each in life for token in each.changed.get("token_ids", ())]
        assert tokens == live.tokens[line.request_id] and len(tokens) == line.num_output_tokens
        kinds = [each.event for each in life]
        assert kinds[0] == "Queued" and kinds[-2:] == ["Finished", "Delivered"]
        assert kinds.count("Preempted") == line.num_preemptions
        assert [each.sequence for each in life] == sorted(each.sequence for each in life)
        assert life[0].since_ns == 0 and all(each.since_ns >= 0 for each in life)


@pytest.mark.parametrize("settings", [{}, {"max_in_flight": 2}])
def test_steps_equal_the_steps_that_ran(tmp_path, settings):
    live = busy_run(tmp_path / "log", 1, **settings)
    numbers = [step.number for step in open_log(tmp_path / "log").steps()]
    for number in numbers[::5]:
        report = step_report(tmp_path / "log", number)
        rows, tokens, admitted, encoded, running, waiting, free, encoder, error = live.steps[number]
        assert len(report.batch) == rows and report.budgets["tokens"].used == tokens
        assert sum(row.num_tokens for row in report.batch) == tokens
        assert sum(bool(row.start) for row in report.batch) == admitted
        assert sum(len(row.encode) for row in report.batch) == encoded
        assert (
            report.budgets["KV blocks"].used == 18 - free and report.budgets["encoder cache"].used == encoder
        )
        assert len(report.waits) == running + waiting - rows
        assert (report.outcome, report.error) == (("failed", "planted") if error else ("executed", ""))
        before = state_report(tmp_path / "log", number)
        assert before.step == number and len(before.digest) == 32
        held = {block for each in before.running for block in each["blocks"]}
        assert len(held) == before.blocks["total"] - before.blocks["free"] or settings


def test_the_state_at_the_end(tmp_path):
    live = busy_run(tmp_path / "log", 1)
    report = state_report(tmp_path / "log", -1)
    assert not report.running and not report.waiting and report.blocks["free"] == 18
    assert report.digest == state_digest(live.core.state).hex()


# Claims about causes.


def test_claims_cover_all_waiting_steps(tmp_path):
    """The explanations cover every step in which the request got no tokens."""
    log = random_log(tmp_path / "log", 3)
    waited = defaultdict(list)
    for step in log.steps():
        for reason in reasons_of(step):
            if reason.kind != GAVE_WAY:
                waited[reason.request_id].append(reason.kind)
    for line in request_lines(tmp_path / "log"):
        told = [each.facts for each in why(tmp_path / "log", line.request_id) if each.kind == "wait"]
        assert sum(facts["steps"] for facts in told) == len(waited[line.request_id])
        parts = [part for facts in told for part in facts["reasons"]]
        for kind in set(waited[line.request_id]):
            steps = sum(part["steps"] for part in parts if part["reason"] == kind)
            assert steps == waited[line.request_id].count(kind)


@pytest.mark.parametrize("seed", range(6))
def test_claims_agree_with_the_log(tmp_path, seed):
    log = random_log(tmp_path / "log", seed)
    records = list(LogReader(log.folder))
    for line in request_lines(log.folder):
        claims, name = why(log.folder, line.request_id), line.request_id
        kinds = [each.kind for each in claims]
        own = [record for record in records if getattr(record.event, "request_id", "") == name]
        for kind, event in {"preemption": ev.Preempted, "start": ev.Admitted, "end": ev.Finished}.items():
            steps = [record.step for record in own if isinstance(record.event, event)]
            assert [each.step for each in claims if each.kind == kind] == steps
        assert kinds[0] == "arrival" and kinds[-1] == "end"
        assert claims[-1].facts["output_tokens"] == line.num_output_tokens
        encoded = [
            index
            for record in records
            for key, row, index in getattr(record.event, "encode", ())
            if isinstance(record.event, ev.Admitted) and record.event.request_id == name
        ]
        told = [each.facts["item"] for each in claims if each.kind == "encoder cache"]
        assert set(encoded) <= set(told)
        for each in claims:
            check_loss(records, each)


def check_loss(records, each):
    """Check that the log confirms a claim about which request took a block, and in which step."""
    loss = each.facts.get("loss")
    if loss is None or loss["why"] != "taken":
        return
    assert loss["since"] <= loss["until"] <= each.step
    events = [record.event for record in records if record.step == loss["until"]]
    takers = [event for event in events if getattr(event, "new_blocks", b"")]
    names = [event.request_id for event in takers if isinstance(event, ev.Admitted)]
    assert loss["taken_by"] in names or any(isinstance(event, ev.Scheduled) for event in takers)


def test_an_evicted_prefix(tmp_path):
    old, prompt = [7] * 40, [9] * 16
    folder = run(
        tmp_path / "log",
        [request("first", prompt, max_tokens=1)],
        [request("big", old, max_tokens=8)],
        [request("again", prompt, max_tokens=1)],
        num_blocks=13,
        max_model_len=48,
    )
    found = claim(folder, "again", "prefix cache")
    assert found.facts["cached_tokens"] < 12 and found.facts["miss"] == "lost"
    assert (found.facts["loss"]["by"], found.facts["loss"]["taken_by"]) == ("first", "big")
    assert "computed by first in step 0, but step" in found.text and "took it for big" in found.text


def test_a_prefix_that_differs(tmp_path):
    first, second = [9] * 16, [9] * 6 + [8] * 10
    rounds = [request("first", first, max_tokens=1)], [request("other", second, max_tokens=1)]
    found = claim(run(tmp_path / "log", *rounds), "other", "prefix cache")
    assert (found.facts["cached_tokens"], found.facts["miss"], found.facts["at"]) == (4, "tokens", 6)


def test_another_tenants_prefix_and_an_unknown_prefix(tmp_path):
    prompt = [9] * 16
    folder = run(
        tmp_path / "log",
        [request("new", prompt, max_tokens=1)],
        [request("tenant", prompt, max_tokens=1, cache_salt="t")],
        [request("same", prompt, max_tokens=1)],
    )
    assert claim(folder, "new", "prefix cache").facts["miss"] == "never there"
    assert claim(folder, "tenant", "prefix cache").facts["miss"] == "media or salt"
    hit = claim(folder, "same", "prefix cache")
    assert "miss" not in hit.facts and hit.facts["cached_tokens"] == 12


def test_a_prefix_that_was_reset(tmp_path):
    config = settings_of()
    core = EngineCore(config, SimulatedExecutor(config), sink=LogWriter(tmp_path / "log"))
    for name in ("before", "behind"):
        core.submit(request(name, [9] * 16, max_tokens=1))
        while core.has_work:
            core.step()
        core.reset_prefix_cache()
    core.close()
    found = claim(tmp_path / "log", "behind", "prefix cache")
    assert found.facts["loss"]["why"] == "reset" and "the cache was reset in step" in found.text


def test_an_image_that_was_evicted(tmp_path):
    pictures = [[image(tag, 0, 8)] for tag in (1, 2, 1)]
    rounds = [
        [request(f"q{n}", 12, max_tokens=1, media=media, cache_salt=f"{n}" if n == 9 else "")]
        for n, media in enumerate(pictures)
    ]
    folder = run(tmp_path / "log", *rounds, encoder_cache_size=12)
    assert claim(folder, "q0", "encoder cache").facts["miss"] == "never there"
    found = claim(folder, "q2", "encoder cache").facts
    assert (found["miss"], found["for"]) == ("lost", "q1")


def test_a_preemption_names_the_missing_resource(tmp_path):
    requests = [request("a", 20, max_tokens=30), request("b", 20, max_tokens=30)]
    folder = run(tmp_path / "log", requests, num_blocks=17, max_model_len=60)
    found = claim(folder, "b", "preemption")
    assert found.facts["needed"] > found.facts["free"] >= 0 and "the last admitted request" in found.text
    again = [each for each in why(folder, "b") if each.kind == "start"]
    assert len(again) == 2 and "again" in again[1].text


def test_ends(tmp_path):
    config = settings_of(max_waiting=1, max_num_seqs=1, max_model_len=12)
    core = EngineCore(config, SimulatedExecutor(config), sink=LogWriter(tmp_path / "log"))
    core.submit(request("long", 4, max_tokens=60))
    core.step()
    core.submit(request("left", 4))
    core.step()
    core.inbox.put(ev.Queued("refused", b"\0\0\0\0", request("x", 1).sampling))
    core.step()
    core.cancel("left")
    while core.has_work:
        core.step()
    core.submit(request("open", 4))
    core.step()
    core.step()
    core.sink.close()
    folder = tmp_path / "log"
    assert "max_model_len 12" in claim(folder, "long", "end").text
    assert claim(folder, "left", "end").facts["reason"] == "abort"
    assert "Rejected on arrival" in claim(folder, "refused", "end").text
    assert "Still running" in claim(folder, "open", "open").text
    with pytest.raises(LogError, match="no request in .* has this id"):
        why(folder, "nobody")


def test_why_of_random_requests_of_all_kinds_never_fails(tmp_path):
    for seed in range(20, 24):
        folder = random_log(tmp_path / f"{seed}", seed).folder
        names = [line.request_id for line in request_lines(folder)]
        for name in random.Random(seed).sample(names, 4):
            assert all(each.text.endswith(".") for each in why(folder, name))


KEY = "0123456789abcdef:"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("r1", ["r1"]),
        ("chatcmpl-r1", ["r1"]),
        ("cmpl-r2", ["r2/0", "r2/1"]),
        ("resp_r3", [f"{KEY}r3"]),
        ("r3", [f"{KEY}r3"]),
        ("msg_r3", [f"{KEY}r3"]),
        ("msg_r1_0", ["r1"]),
        ("ctc_r3_1", [f"{KEY}r3"]),
        ("embd-r4", ["r4-0", "r4-1/0", "r4-1/1"]),
        ("pool-r4-0", ["r4-0"]),
        ("rerank-r3", [f"{KEY}r3"]),
        ("score-r1", ["r1"]),
        ("batch_req_7-3", [f"{KEY}batch_7-3"]),
        ("batch_7-3", [f"{KEY}batch_7-3"]),
        ("r4", ["r4-0", "r4-1/0", "r4-1/1"]),
        ("r4-1", ["r4-1/0", "r4-1/1"]),
        ("chatcmpl-msg_x", ["msg_x"]),
        ("msg_x", ["msg_x"]),
        ("r", []),
        (KEY, []),
        ("", []),
    ],
)
def test_a_clients_id_finds_its_requests(given, found):
    names = ["r1", "r2/0", "r2/1", f"{KEY}r3", f"{KEY}batch_7-3", "r4-0", "r4-1/0", "r4-1/1", "msg_x", "r1"]
    assert matching_ids(names, given) == found


@pytest.mark.parametrize("prefix", ["call_", "toolu_"])
def test_a_tool_calls_id_finds_the_answer_that_made_it(tmp_path, prefix):
    names = ["r1", "r2/0", "r2/1", f"{KEY}r3"]
    for answer, found in ((("r1", 0), "r1"), (("r2", 1), "r2/1"), (("r3", 0), f"{KEY}r3")):
        for index in (0, 5):
            given = prefix + call_id(*answer, index).removeprefix("call_")
            assert matching_ids(names, given) == [found]
    log = run(tmp_path / "log", [request(name, 20) for name in names])
    with pytest.raises(LogError, match="no request in .* has made this tool call; mmengine log show"):
        find_requests(log, prefix + 24 * "0")


def test_a_batch_line_is_found_by_its_custom_id(tmp_path):
    """Several batch lines may have the same custom_id, and an envelope may be damaged."""
    envelopes = [b'{"api":"chat","custom_id":"row 1"}', b'{"api":"chat","custom_id":"row 1"}', b"{]"]
    asked = [replace(request(f"{KEY}batch_a-{n}", 20), envelope=each) for n, each in enumerate(envelopes)]
    asked.append(replace(request("bad", 20), envelope=b'"custom_id"'))
    log = run(tmp_path / "log", asked)
    assert find_requests(log, "row 1") == [f"{KEY}batch_a-0", f"{KEY}batch_a-1"]
    assert find_requests(log, "batch_req_a-1") == [f"{KEY}batch_a-1"]
    with pytest.raises(LogError, match="similar ids: row 1; mmengine log show"):
        find_requests(log, "row 2")


def test_an_unknown_id_names_near_ids(tmp_path):
    log = run(tmp_path / "log", [request("long-name-1", 20), request(f"{KEY}other", 20)])
    assert find_requests(log, "chatcmpl-other") == [f"{KEY}other"]
    for given in ("long-nama-1", "chatcmpl-long-nam", "name-1"):
        with pytest.raises(LogError, match="similar ids: long-name-1; mmengine log show"):
            find_requests(log, given)
    with pytest.raises(LogError, match="this id; mmengine log show"):
        find_requests(log, "zzz")
