"""Tests rerun, minimize's playback and the report on logs with changed or missing records. Each tool gives a
result or a one-line error.
"""

import random

import pytest

from mmengine.errors import MMEngineError
from mmengine.events.log import LogReader
from mmengine.replay import replay_failure
from mmengine.replay.report import write_report
from mmengine.replay.rerun.rerun import rerun
from tests.events.logs import rewrite
from tests.replay.runs import busy_run
from tests.replay.test_replay_hostile import spoiled

LOOKS = {
    "rerun": lambda log: rerun(log, {}),
    "report": lambda log: write_report(log, log.with_suffix(".html")),
    "failure": lambda log: replay_failure(log, "any"),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize(
    ("in_flight", "count"),
    [
        (1, 36),
        (2, 36),
        pytest.param(1, 200, marks=pytest.mark.soak),
        pytest.param(2, 200, marks=pytest.mark.soak),
    ],
)
def test_a_spoiled_log(tmp_path, look, in_flight, count):
    busy_run(tmp_path / "log", num_requests=24, max_in_flight=in_flight)
    records = list(LogReader(tmp_path / "log"))
    rng = random.Random(f"{look} {in_flight}")
    outcomes = {"an answer": 0, "refused": 0}
    for number in range(count):
        changed = list(records)
        for _ in range(rng.choice([1, 1, 3])):
            at = rng.randrange(1, len(changed))
            record = changed[at]
            kind, chance = type(record), rng.random()
            if chance < 0.6:
                changed[at] = kind(0, record.step, record.mono_ns, spoiled(record.event, rng))
            elif chance < 0.8:
                time_ns = rng.choice([0, 1, 2**40, 2**62, 2**64 - 1])
                changed[at] = kind(0, record.step, time_ns, record.event)
            else:
                del changed[at]
        log = rewrite(changed, tmp_path / str(number))
        try:
            LOOKS[look](log)
            outcomes["an answer"] += 1
        except MMEngineError as error:
            assert "\n" not in str(error)
            outcomes["refused"] += 1
    assert min(outcomes.values()) > count // 18, outcomes
