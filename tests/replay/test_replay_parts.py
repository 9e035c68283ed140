"""Tests the log tools with an image that is encoded over several steps."""

import pytest

from mmengine.cli.logs.show_tables import step_tables
from mmengine.events.log import LogWriter
from mmengine.replay import step_lines, verify
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.convert.redact import redact
from mmengine.replay.queries.request_events import request_events
from mmengine.replay.queries.step_report import step_report
from mmengine.replay.queries.why import why
from mmengine.replay.rerun.measurement import Watch
from mmengine.replay.timeline import fold
from mmengine.simulation.device import share_of
from tests.core.small_engine import Bench, request
from tests.core.test_encoder_parts import PIECE, large


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts") / "log"
    bench = Bench(**PIECE, sink=LogWriter(folder))
    bench.new_events = list
    bench.submit(request("text", 4, max_tokens=12), request("a", 12, media=[large(1, 2)]))
    bench.run()
    bench.core.close()
    return folder


def test_why_reports_the_wait_and_the_parts(log):
    texts = [claim.text for claim in why(log, "a")]
    (waited,) = [text for text in texts if "Not scheduled" in text]
    assert "encoded in parts (32 units of encoder work, 5 per step)" in waited
    assert any("(image, 4 embeddings) was encoded in parts: 32 units" in text for text in texts)


def test_a_step_shows_its_part_and_the_waiting_request(log):
    report = step_report(log, 2)
    assert report.part == ("a", 0, 10, 15, 32)
    assert report.budgets["encoder work"].total == 5
    assert [(reason.request_id, reason.kind) for reason in report.waits] == [("a", "encoder pieces")]
    lines = [line for line in step_tables(report, 9) if isinstance(line, str)]
    assert "encodes a part of a's item 0: 10 to 15 of its work of 32" in lines


def test_life_and_steps_count_the_image_once(log):
    parts = [
        line.changed["until"] for line in request_events(CheckedLog(log), "a") if line.event == "Encoded"
    ]
    assert parts == [5, 10, 15, 20, 25, 30, 32]
    assert [line.step for line in step_lines(log) if line.num_encoded] == [6]


def test_the_redacted_log_verifies(log, tmp_path):
    redact(log, tmp_path / "red", b"k" * 16)
    assert verify(tmp_path / "red").ok


def test_embeddings_count_once_over_all_parts(log):
    assert 9 + sum(share_of(9, *part, 32) for part in ((0, 10), (10, 20), (20, 32))) == 9
    checked = CheckedLog(log)
    watch = Watch(checked.config, 2)
    for state, record in fold(checked):
        watch.see(state, record)
    assert sum(step.work.amounts[-1] for step in watch.measured.steps) <= 4
