"""Tests sessions in request files: a session's requests run in turn, and each continues the session."""

import json
from pathlib import Path

import numpy as np
import pytest

from mmengine.errors import InvalidRequest
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader, LogWriter
from mmengine.replay import request_lines, verify
from mmengine.simulation.driver import Driver
from mmengine.simulation.scenario import read_requests, read_scenario
from mmengine.simulation.settings import read_settings

EXAMPLE = Path(__file__).parents[2] / "examples" / "sessions.json"


def simulated(workload, folder):
    log = LogWriter(folder)
    settings = read_settings(workload.settings, workload)
    return Driver(workload, settings, log=log).run()


def test_the_example_has_questions_leases_and_an_end(tmp_path):
    report = simulated(read_scenario(EXAMPLE), tmp_path / "log")
    assert report.meter.ends == {"length": 8} and not report.num_refused
    assert verify(tmp_path / "log", invariants=True).ok
    lines = {line.request_id: line for line in request_lines(tmp_path / "log")}
    assert lines["door.3"].num_prompt_tokens == 24 + 36 + 36 + 12 and lines["door.3"].num_cached_tokens == 96
    events = [record.event for record in LogReader(tmp_path / "log")]
    taken = [event for event in events if isinstance(event, ev.LeaseTaken)]
    assert taken and {event.reason for event in taken} == {"no free blocks"}
    assert [e.session_id for e in events if isinstance(e, ev.SessionClosed)] == ["gate"]
    tokens = {e.request_id: np.frombuffer(e.prompt, np.int32) for e in events if isinstance(e, ev.Queued)}
    assert len(tokens["door.5"]) == 8, "the log has what is new"


def test_requests_that_come_at_once_wait_for_one_another(tmp_path):
    lines = [{"id": f"s.{n}", "session": "s", "prompt": [["gen", str(n), 20, 0]], "max_tokens": 5 * (n % 2)}
             for n in range(4)]  # fmt: skip
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    report = simulated(read_requests(path, None), tmp_path / "log")
    assert report.meter.ends == {"length": 4}
    kept = [r.event.num_kept for r in LogReader(tmp_path / "log") if isinstance(r.event, ev.Appended)]
    assert kept == [0, 20, 45, 65]


def test_max_tokens_0_needs_a_session(tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_text('{"id": "a", "prompt": [["gen", "a", 4, 0]], "max_tokens": 0}')
    with pytest.raises(InvalidRequest, match="in a session max_tokens 0"):
        read_requests(path, None)
