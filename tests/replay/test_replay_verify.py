"""Tests that verify accepts an unchanged log, and reports a divergence in a log with changed, missing or
added records.
"""

import msgspec
import numpy as np
import pytest

from mmengine.config import EngineConfig
from mmengine.core.fold.evolve import evolve
from mmengine.core.state.digest import state_digest
from mmengine.core.state.state import State
from mmengine.errors import CorruptLog, LogError
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from mmengine.replay import request_lines, step_lines, verify
from tests.events.logs import column, rewrite, segments, write_log
from tests.replay.runs import busy_run

replace = msgspec.structs.replace


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run a busy workload, and return the log's folder, its records, and the figures from `busy_run`."""
    folder = tmp_path_factory.mktemp("run") / "log"
    live = busy_run(folder, 5)
    return folder, list(LogReader(folder)), live


def with_event(records, index, event):
    changed = list(records)
    changed[index] = retold(records[index], event)
    return changed


def retold(record, event):
    return type(record)(record.sequence, record.step, record.mono_ns, event, record.offset)


def find(records, kind, test=lambda event: True, nth=0):
    of_kind = [n for n, record in enumerate(records) if isinstance(record.event, kind)]
    return [n for n in of_kind if test(records[n].event)][nth]


def test_the_run_has_all_event_types(run):
    _, records, live = run
    kinds = {type(record.event) for record in records}
    assert kinds == set(ev.TYPES.values()) - {
        ev.Stalled, ev.Evicted, ev.Dispatched, ev.Recovered, ev.Encoded, ev.AdmittedWithState, ev.StatesKept,
        ev.AdapterLoaded, ev.AdapterUnloaded, ev.AdmittedWithAdapter, ev.Drafted, ev.Noted,
        ev.Offered, ev.Fetched, ev.Arrived, ev.Lost,  # tests/core/test_store_chaos.py covers these events.
        # test_replay_sessions.py covers these events.
        ev.SessionOpened, ev.Appended, ev.Leased, ev.LeaseTaken, ev.SessionClosed,
    }  # fmt: skip
    events = [record.event for record in records]
    ends = {event.reason for event in events if isinstance(event, ev.Finished)}
    assert ends == {"stop", "length", "abort", "error", "rejected"}
    reasons = {event.reason for event in events if isinstance(event, ev.Preempted)}
    assert reasons == {"no free blocks", "the step failed"}
    assert any(event.encode for event in events if isinstance(event, (ev.Scheduled, ev.Admitted)))
    assert any(event.evict for event in events if isinstance(event, (ev.Scheduled, ev.Admitted)))
    assert any(event.cached_blocks for event in events if isinstance(event, ev.Admitted))


def test_item_parts_are_verified(tmp_path):
    """If items are encoded in parts, verify detects a wrong part and a missing part."""
    busy_run(tmp_path / "run", 5, encoder_piece=4)
    records = list(LogReader(tmp_path / "run"))
    assert verify(tmp_path / "run").ok
    index = find(records, ev.Encoded, nth=3)
    event = records[index].event
    nearer = with_event(records, index, replace(event, until=event.until - 1))
    found = verify(rewrite(nearer, tmp_path / "nearer")).divergence
    assert (found.sequence, found.field) == (index, "until")
    found = verify(rewrite(records[:index] + records[index + 1 :], tmp_path / "dropped")).divergence
    assert (found.sequence, found.field, found.derived) == (index, "event", "Encoded")


@pytest.mark.parametrize("seed", range(1, 7))
def test_an_unchanged_run_verifies(tmp_path, seed):
    settings = [{}, {"policy": "fcfs"}, {"enable_prefix_caching": False}, {"block_size": 1, "num_blocks": 60}]
    live = busy_run(tmp_path / "log", seed, fail_at=(seed, 20), **settings[seed % 4])
    report = verify(tmp_path / "log")
    assert report.ok and report.rederived and report.torn is None and not report.unfinished
    assert report.tokens >= sum(map(len, live.tokens.values()))
    assert report.requests == len(live.queued) and report.checkpoints > 1
    assert report.events == len(list(LogReader(tmp_path / "log")))
    state = State(live.core.config)
    for record in LogReader(tmp_path / "log"):
        evolve(state, record.event)
    assert state_digest(state) == state_digest(live.core.state)


def test_progress_is_reported_per_record(run):
    folder, records, _ = run
    seen = []
    assert verify(folder, progress=seen.append).ok
    assert seen == records


def change_token(event):
    tokens = np.frombuffer(event.token_ids, np.int32).copy()
    tokens[0] += 1
    return replace(event, token_ids=tokens.tobytes())


def test_the_step_of_a_record_is_compared(run, tmp_path):
    """Verify detects a changed step in a record with a valid checksum."""
    _, records, _ = run
    for index in range(1, len(records), 7):
        changed = list(records)
        changed[index] = replace(records[index], step=records[index].step + 1)
        found = verify(rewrite(changed, tmp_path / str(index))).divergence
        assert (found.sequence, found.field) == (index, "step")
        assert (found.logged, found.derived) == (records[index].step + 1, records[index].step)


def test_all_steps_moved_by_one_are_found_under_other_rules_too(run, tmp_path):
    _, records, _ = run
    for version in (records[0].event.decision_version, 99):
        first = retold(records[0], replace(records[0].event, decision_version=version))
        moved = [first, *(replace(record, step=record.step + 1) for record in records[1:])]
        found = verify(rewrite(moved, tmp_path / str(version))).divergence
        assert (found.sequence, found.field) == (1, "step")


@pytest.mark.parametrize("version", [None, 99])
def test_time_goes_back_only_for_another_process(run, tmp_path, version):
    _, records, _ = run
    if version is not None:
        records = with_event(records, 0, replace(records[0].event, decision_version=version))
    index = len(records) // 2
    changed = list(records)
    changed[index] = replace(records[index], mono_ns=records[index - 1].mono_ns - 1)
    found = verify(rewrite(changed, tmp_path / "log")).divergence
    assert (found.sequence, found.field) == (index, "mono_ns")
    assert found.derived == f"{records[index - 1].mono_ns} or later"


def lower_first(event):
    counts = np.frombuffer(event.num_tokens, np.int32).copy()
    counts[counts > 1] -= 1
    return replace(event, num_tokens=counts.tobytes())


def no_blocks(event):
    return replace(event, new_blocks=b"")


def no_hits(event):
    return replace(event, cached_blocks=b"")


PLANTED = {
    "tokens of a row": (ev.Scheduled, lambda e: e.num_tokens is not None, lower_first, "num_tokens"),
    "rows": (ev.Scheduled, lambda e: e.rows is not None, lambda e: replace(e, rows=e.rows[::-1]), "rows"),
    "blocks": (ev.Scheduled, lambda e: e.new_blocks, no_blocks, "new_blocks"),
    "hits": (ev.Admitted, lambda e: e.cached_blocks, no_hits, "cached_blocks"),
    "who": (ev.Admitted, lambda e: True, lambda e: replace(e, request_id="r0"), "request_id"),
    "an image": (ev.Admitted, lambda e: e.encode, lambda e: replace(e, encode=()), "encode"),
    "a victim": (ev.Preempted, lambda e: True, lambda e: replace(e, row=e.row + 1), "row"),
    "an end": (ev.Finished, lambda e: e.reason == "stop", lambda e: replace(e, reason="length"), "reason"),
    "an error": (ev.Finished, lambda e: e.reason == "error", lambda e: replace(e, detail="x"), "detail"),
    "a digest": (ev.Checkpoint, lambda e: True, lambda e: replace(e, digest=bytes(16)), "digest"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_changed_decision_is_named_at_its_record(run, tmp_path, name):
    _, records, _ = run
    kind, test, change, field = PLANTED[name]
    index = find(records, kind, test, nth=1 if name == "who" else 0)
    event = change(records[index].event)
    assert event != records[index].event
    report = verify(rewrite(with_event(records, index, event), tmp_path / "log"))
    found = report.divergence
    assert not report.ok and (found.event, found.field) == (kind.__name__, field)
    assert (found.sequence, found.step) == (index, records[index].step)
    assert found.logged != found.derived
    assert report.events == index, "all records before the changed one agreed"
    assert found.recent and all(record.sequence < index for record in found.recent)


def test_a_changed_number_is_shown_as_numbers(run, tmp_path):
    _, records, _ = run
    index = find(records, ev.Scheduled, lambda e: e.num_tokens is not None)
    log = rewrite(with_event(records, index, lower_first(records[index].event)), tmp_path / "log")
    found = verify(log).divergence
    assert sum(found.logged) < sum(found.derived) and len(found.logged) == len(found.derived)


@pytest.mark.parametrize("nth", [0, 10, -1])
def test_a_changed_token_of_a_finished_run_is_found_by_the_next_digest(run, tmp_path, nth):
    _, records, _ = run
    index = find(records, ev.Executed, lambda e: e.token_ids, nth)
    report = verify(rewrite(with_event(records, index, change_token(records[index].event)), tmp_path / "log"))
    assert report.divergence is not None and report.divergence.sequence > index
    if nth == -1:
        assert (report.divergence.event, report.divergence.field) == ("Checkpoint", "digest")


def test_a_digest_mismatch_names_column_request_row_and_last_match(run, tmp_path):
    _, records, _ = run
    checkpoints = [n for n, record in enumerate(records) if isinstance(record.event, ev.Checkpoint)]
    found = None
    for index in (n for n, record in enumerate(records) if isinstance(record.event, ev.Executed)):
        if not records[index].event.token_ids:
            continue
        log = rewrite(with_event(records, index, change_token(records[index].event)), tmp_path / str(index))
        found = verify(log).divergence
        if found.field == "digest" and "token_ids" in found.columns and found.agreed is not None:
            break
    assert "history" in found.columns and any(row >= 0 for _, row in found.requests)
    before = [n for n in checkpoints if n < index]
    assert found.agreed == (before[-1], records[before[-1]].step) and found.sequence > index
    state = State(EngineConfig.from_dict(records[0].event.config))
    for record in records[: found.sequence]:
        evolve(state, record.event)
    for name, row in found.requests:
        assert state.requests[name].row == row


def test_a_changed_prompt_is_found(run, tmp_path):
    _, records, _ = run
    index = find(records, ev.Queued, nth=-1)
    event = records[index].event
    changed = replace(event, prompt=event.prompt[:-4] + column(77))
    assert verify(rewrite(with_event(records, index, changed), tmp_path / "log")).divergence is not None


DROPPED = [ev.Preempted, ev.Scheduled, ev.Admitted, ev.Finished, ev.Checkpoint, ev.Executed, ev.Failed]


@pytest.mark.parametrize("kind", DROPPED)
def test_a_dropped_record_is_missed(run, tmp_path, kind):
    _, records, _ = run
    after = [type(record.event) for record in records[1:]]
    kinds = [type(record.event) for record in records]
    index = next(n for n, pair in enumerate(zip(kinds, after)) if pair[0] is kind != pair[1])
    found = verify(rewrite(records[:index] + records[index + 1 :], tmp_path / "log")).divergence
    assert (found.sequence, found.field) == (index, "event")
    expected = "Executed" if kind is ev.Failed else kind.__name__
    assert (found.logged, found.derived) == (type(records[index + 1].event).__name__, expected)


def test_an_added_record_is_found(run, tmp_path):
    _, records, _ = run
    index = find(records, ev.Finished)
    doubled = records[: index + 1] + records[index:]
    found = verify(rewrite(doubled, tmp_path / "log")).divergence
    assert found.sequence == index + 1 and found.logged == "Finished"


@pytest.mark.parametrize(
    "name, value", [("token_budget", 11), ("num_blocks", 17), ("policy", "fcfs"), ("encoder_budget", 64)]
)
def test_other_settings_diverge(run, tmp_path, name, value):
    _, records, _ = run
    started = records[0].event
    config = {**started.config, name: value}
    changed = replace(started, config=config, num_blocks=config["num_blocks"])
    report = verify(rewrite(with_event(records, 0, changed), tmp_path / "log"))
    assert not report.ok and report.divergence.logged != report.divergence.derived


def test_a_log_cut_between_any_two_records_agrees_up_to_there(run, tmp_path):
    """A log that was cut after any record verifies up to this record."""
    _, records, _ = run
    near = find(records, ev.Failed)
    cuts = {*range(1, len(records), 17), *range(near - 3, near + 8)}
    for cut in sorted(cuts):
        report = verify(rewrite(records[:cut], tmp_path / str(cut)))
        assert report.ok and report.events == cut, report.divergence
        queued = {r.event.request_id for r in records[:cut] if isinstance(r.event, ev.Queued)}
        ended = {r.event.request_id for r in records[:cut] if isinstance(r.event, ev.Finished)}
        assert set(report.unfinished) == queued - ended


def test_a_torn_tail_is_reported(run, tmp_path):
    folder, records, _ = run
    (path,) = segments(folder)
    last = records[-1].offset
    (tmp_path / path.name).write_bytes(path.read_bytes()[: last + 50])
    report = verify(tmp_path)
    whole = sum(record.offset < last for record in records)
    assert report.ok and report.torn.offset == last and report.events == whole < len(records)


def test_another_rule_version_is_folded_only(run, tmp_path):
    # verify applies the log's decisions without deriving them, if the log has another decision_version.
    folder, records, _ = run
    started = replace(records[0].event, decision_version=99)
    report = verify(rewrite(with_event(records, 0, started), tmp_path / "log"))
    assert report.ok and not report.rederived and report.logged_version == 99
    ours = verify(folder)
    assert ours.rederived
    for name in ("steps", "events", "requests", "tokens", "checkpoints", "unfinished"):
        assert getattr(report, name) == getattr(ours, name)


def test_digests_are_compared_under_other_rules_too(run, tmp_path):
    _, records, _ = run
    records = with_event(records, 0, replace(records[0].event, decision_version=99))
    index = find(records, ev.Executed, lambda e: e.token_ids)
    changed = with_event(records, index, change_token(records[index].event))
    found = verify(rewrite(changed, tmp_path / "log")).divergence
    assert (found.event, found.field) == ("Checkpoint", "digest") and found.sequence > index


@pytest.mark.parametrize("place", [0.1, 0.5, 0.9])
def test_damage_in_the_middle_is_no_divergence(run, tmp_path, place):
    folder, _, _ = run
    (path,) = segments(folder)
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 4
    (tmp_path / path.name).write_bytes(data)
    for look in (verify, request_lines, lambda folder: list(step_lines(folder))):
        with pytest.raises(CorruptLog, match="is damaged|is cut short"):
            look(tmp_path)


def test_a_log_must_begin_with_started(run, tmp_path):
    _, records, _ = run
    log = rewrite(records[1:], tmp_path / "log")
    for look in (verify, request_lines, lambda folder: list(step_lines(folder))):
        with pytest.raises(CorruptLog, match="does not begin with STARTED"):
            look(log)


def test_no_log_at_all(tmp_path):
    for look in (verify, request_lines, lambda folder: list(step_lines(folder))):
        with pytest.raises(LogError, match="has no log"):
            look(tmp_path)


def test_a_log_of_one_record(run, tmp_path):
    _, records, _ = run
    report = verify(write_log(tmp_path / "log", [records[0].event]))
    assert report.ok and report.events == 1
