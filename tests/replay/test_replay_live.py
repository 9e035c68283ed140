"""Tests that the messages for a live page add up to the report's columns, no matter when they are sent."""

import random

import numpy as np
import pytest

from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.report import live
from mmengine.replay.report.collect import collect
from mmengine.replay.report.live import LiveReport
from mmengine.replay.report.page import _columns
from tests.replay.runs import busy_run

CHANGING = ("end", "cached", "answer", "preemptions")


class Shown:
    """A live page, which merges messages as the page's script does."""

    def __init__(self):
        self.head, self.steps, self.lanes, self.ids, self.ends = None, {}, {}, [], []
        self.segments, self.chunks, self.reasons, self.failed, self.notes = {}, [], [], [], []

    def take(self, message):
        if message["type"] == "begin":
            self.__init__()
            self.head = message
            return
        for name, values in message["steps"].items():
            self.steps.setdefault(name, []).extend(values)
        arrived = message["lanes"]
        self.ids += arrived["ids"]
        self.ends += [""] * len(arrived["ids"])
        for name, values in arrived.items():
            self.lanes.setdefault(name, []).extend(values)
        for name in CHANGING:
            self.lanes.setdefault(name, []).extend([-1] * len(arrived["ids"]))
        for lane, *values, end in message["changed"]:
            for name, value in zip(CHANGING, values, strict=True):
                self.lanes[name][lane] = value
            self.ends[lane] = end
        for name, values in message["segments"].items():
            self.segments.setdefault(name, []).extend(values)
        for name in ("chunks", "reasons", "failed", "notes"):
            getattr(self, name).extend(message[name])


def told(folder, seed, each=0.2):
    """Send the messages for a log at random moments. Return the page after the last message, and the number
    of "begin" messages.
    """
    report, shown, chance, begun = None, Shown(), random.Random(seed), 0
    log = CheckedLog(folder)
    report = LiveReport(log, "log")
    for record in log:
        report.take(record)
        for message in report.news() if chance.random() < each else ():
            begun += message["type"] == "begin"
            shown.take(message)
    for message in report.news():
        shown.take(message)
    return shown, begun


@pytest.mark.parametrize("settings", [{}, {"max_in_flight": 2}])
def test_messages_add_up_to_the_report(tmp_path, settings):
    busy_run(tmp_path / "log", 5, **settings)
    shown, begun = told(tmp_path / "log", 3)
    collected = collect(tmp_path / "log")
    whole = _columns(collected)
    assert begun == 1 and shown.ids == collected.lanes.ids and shown.ends == collected.lanes.ends
    for name, values in shown.steps.items():
        if not name.endswith("_ns"):
            assert values == whole[f"step_{name}"].tolist(), name
    assert np.allclose(np.array(shown.steps["time_ns"]) / 1e6, whole["step_time_ms"])
    assert np.allclose(np.array(shown.steps["device_ns"]) / 1e6, whole["step_device_ms"])
    for name in ("prompt", "media", "embeds", "cached", "answer", "preemptions"):
        assert shown.lanes[name] == whole[f"lane_{name}"].tolist(), name
    order = np.argsort(shown.segments["lane"], kind="stable")
    for name in ("state", "reason", "needed"):
        assert np.array(shown.segments[name])[order].tolist() == whole[f"segment_{name}"].tolist(), name
    flat = np.array([each for chunk in shown.chunks for each in chunk]).reshape(-1, 3)
    assert flat[:, 2].tolist() == whole["chunk_tokens"].tolist()
    assert shown.reasons == collected.reasons and shown.notes == collected.notes
    assert [place for place, one in enumerate(whole["step_failed"]) if one] == sorted(shown.failed)


def test_a_long_log_restarts_the_page_with_present_requests(tmp_path, monkeypatch):
    monkeypatch.setattr(live, "MAX_STEPS", 25)
    busy_run(tmp_path / "log", 5)
    shown, begun = told(tmp_path / "log", 3, each=1)
    collected = collect(tmp_path / "log")
    assert begun > 2 and 0 < len(shown.steps["rows"]) <= 27
    count = len(shown.steps["rows"])
    for name in ("rows", "running", "waiting", "free_blocks", "tokens"):
        assert shown.steps[name] == list(collected.steps[name])[-count:], name
    by_id = dict(zip(collected.lanes.ids, collected.lanes.ends, strict=True))
    assert shown.ends == [by_id[name] for name in shown.ids]
