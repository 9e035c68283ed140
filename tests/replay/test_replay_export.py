"""Tests that exports for other programs (Perfetto, Mooncake traces, CSV) meet the programs' requirements."""

import csv
import io
import json
from collections import defaultdict

import pytest

from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader, LogWriter
from mmengine.replay import request_lines, step_lines
from mmengine.replay.convert.export import MOONCAKE_BLOCK, csv_lines, mooncake_lines
from mmengine.replay.convert.perfetto import DECODE, PREEMPTED, PREFILL, QUEUED, perfetto_lines
from mmengine.simulation import Driver, read_settings
from mmengine.simulation.workload_files import load_workload
from tests.core.small_engine import Bench, request
from tests.replay.runs import busy_run


@pytest.fixture(scope="module", params=[{}, {"max_in_flight": 2}, {"num_draft_tokens": 2}])
def log(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "log"
    live = busy_run(folder, 4, mixed=True, **request.param)
    return folder, live


def trace(folder):
    whole = json.loads("\n".join(perfetto_lines(folder)))
    return whole["traceEvents"]


def by_phase(events, phase):
    return [event for event in events if event["ph"] == phase]


def test_slices_of_requests_nest(log):
    """A request's outer slice contains the slices of its states, one after another without a gap."""
    folder, live = log
    tracks = defaultdict(list)
    for event in trace(folder):
        if event["ph"] in "be":
            tracks[event["id"]].append(event)
    assert len(tracks) == len(live.queued)
    for name, events in zip(live.queued, (tracks[number] for number in sorted(tracks))):
        assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)
        begin, *inner, end = events
        assert (begin["ph"], begin["name"]) == ("b", name) and (end["ph"], end["name"]) == ("e", name)
        assert end["args"]["finish_reason"] == live.ends[name][0]
        pairs = list(zip(inner[::2], inner[1::2], strict=True))
        assert all((a["ph"], b["ph"], a["name"]) == ("b", "e", b["name"]) for a, b in pairs)
        assert all(one[1]["ts"] == two[0]["ts"] for one, two in zip(pairs, pairs[1:]))
        states = [a["name"] for a, _ in pairs]
        assert states[0] == QUEUED and DECODE in states or len(live.tokens[name]) == live.given[name]
        after = {QUEUED: {PREFILL}, PREFILL: {DECODE, PREEMPTED}, DECODE: {PREEMPTED}, PREEMPTED: {PREFILL}}
        assert all(two in after[one] for one, two in zip(states, states[1:]))


def test_rows_hold_one_request_at_a_time_and_flows_join_preemptions(log):
    folder, _ = log
    events, rows = trace(folder), defaultdict(list)
    for event in by_phase(events, "X"):
        assert event["dur"] >= 0
        rows[event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    names = {event["tid"]: event["args"]["name"] for event in by_phase(events, "M")}
    assert all(tid in names for tid in rows)
    for tid, spans in rows.items():
        if names[tid].startswith("row "):
            assert all(one[1] <= two[0] + 1e-6 for one, two in zip(sorted(spans), sorted(spans)[1:]))
    starts, ends = ({event["id"]: event for event in by_phase(events, phase)} for phase in "sf")
    lines = request_lines(folder)
    assert len(starts) == sum(line.num_preemptions for line in lines) > 0 and set(ends) <= set(starts)
    for number, event in starts.items():
        assert any(low <= event["ts"] <= high for low, high, _ in rows[event["tid"]])
        assert number not in ends or ends[number]["ts"] >= event["ts"]


def test_steps_and_counters(log):
    folder, live = log
    events = trace(folder)
    lines = list(step_lines(folder))
    steps = [event for event in by_phase(events, "X") if event["name"].startswith("step")]
    drawn = {event["name"]: event["args"]["rows"] for event in steps}
    assert drawn == {f"step {line.step}": line.num_rows for line in lines if not line.failed}
    assert len(by_phase(events, "i")) >= 1, "the planted failures"
    counters = defaultdict(list)
    for event in by_phase(events, "C"):
        counters[event["name"]].append(event["args"])
    most = max(args["used"] for args in counters["KV blocks"])
    assert most == 18 - min(line.num_free_blocks for line in lines)
    assert max(args["waiting"] for args in counters["requests"]) == max(step[5] for step in live.steps)


def test_a_log_that_ends_early_is_closed(tmp_path):
    bench = Bench(sink=LogWriter(tmp_path / "log"))
    bench.submit(request("runs", 5, max_tokens=30), request('"]}\n', 5, max_tokens=30))
    for _ in range(5):
        bench.core.step()
    bench.core.sink.close()
    events = trace(tmp_path / "log")
    assert len(by_phase(events, "b")) == len(by_phase(events, "e"))
    assert {event["name"] for event in by_phase(events, "b")} >= {"runs", '"]}\n'}


def test_a_mooncake_trace_round_trips(tmp_path):
    """A Mooncake trace that is simulated and exported again has the same lengths, times and shared
    prefixes.
    """
    rows = [
        {"timestamp": 0, "input_length": 1500, "output_length": 3, "hash_ids": [5, 6, 7]},
        {"timestamp": 250, "input_length": 1500, "output_length": 9, "hash_ids": [5, 6, 7]},
        {"timestamp": 250, "input_length": 1100, "output_length": 1, "hash_ids": [5, 8, 9]},
        {"timestamp": 9000, "input_length": 512, "output_length": 4, "hash_ids": [5]},
        {"timestamp": 9001, "input_length": 20, "output_length": 4, "hash_ids": [1]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def simulated(path, folder):
        work = load_workload(path, "mooncake", None)
        sink = LogWriter(folder)
        Driver(work, read_settings({}, work), log=sink).run()
        sink.close()
        return [json.loads(line) for line in mooncake_lines(folder)]

    def shape(lines):
        """Return each line's lengths and hash ids, with renumbered ids."""
        first = {}
        ids = [[first.setdefault(each, len(first)) for each in line["hash_ids"]] for line in lines]
        return [(line["input_length"], line["output_length"], own) for line, own in zip(lines, ids)]

    found = simulated(path, tmp_path / "log")
    assert shape(found) == shape(rows)
    assert all(len(line["hash_ids"]) == -(-line["input_length"] // MOONCAKE_BLOCK) for line in found)
    assert all(abs(a["timestamp"] - b["timestamp"]) < 100 for a, b in zip(found, rows))
    again = tmp_path / "again.jsonl"
    again.write_text("".join(json.dumps(line) + "\n" for line in found))
    assert shape(simulated(again, tmp_path / "log2")) == shape(rows)


def test_media_and_salts_change_the_prefix(tmp_path):
    busy_run(tmp_path / "log", 1)
    ids = [json.loads(line)["hash_ids"] for line in mooncake_lines(tmp_path / "log")]
    prompts = defaultdict(set)
    queued = [r.event for r in LogReader(tmp_path / "log") if isinstance(r.event, ev.Queued)]
    for event, (number,) in zip(queued, ids, strict=True):
        prompts[number].add((event.prompt, event.media, event.cache_salt))
    assert all(len(same) == 1 for same in prompts.values())


def test_tables(log):
    folder, live = log
    rows = list(csv.DictReader(io.StringIO("\n".join(csv_lines(folder, steps=False)))))
    assert [row["request_id"] for row in rows] == live.queued
    assert [int(row["num_output_tokens"]) for row in rows] == [
        len(live.tokens.get(n, ())) for n in live.queued
    ]
    rows = list(csv.DictReader(io.StringIO("\n".join(csv_lines(folder, steps=True)))))
    assert [int(row["num_rows"]) for row in rows] == [step[0] for step in live.steps]


def test_a_spreadsheet_sees_no_formula(tmp_path):
    # In CSV, a text that begins like a formula gets a quote in front, and a line break is replaced.
    bench = Bench(sink=LogWriter(tmp_path / "log"))
    bench.submit(request("=1+1", 5), request("a,b\n", 5))
    while bench.core.has_work:
        bench.core.step()
    bench.core.close()
    rows = list(csv.DictReader(io.StringIO("\n".join(csv_lines(tmp_path / "log", steps=False)))))
    assert [row["request_id"] for row in rows] == ["'=1+1", "a,b\ufffd"]
