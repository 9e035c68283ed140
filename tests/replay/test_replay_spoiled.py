"""Whatever a log says, each way to look at it gives an answer or one sentence."""

import random

import pytest

from mmengine.errors import LogError
from mmengine.events.log import LogReader
from mmengine.replay import open_log
from mmengine.replay.checked import CheckedLog
from mmengine.replay.diff import diff
from mmengine.replay.export import csv_lines, mooncake_lines
from mmengine.replay.life import life_lines
from mmengine.replay.perfetto import perfetto_lines
from mmengine.replay.reasons import reasons_of
from mmengine.replay.redact import redact
from mmengine.replay.show import ended_requests
from mmengine.replay.state_report import state_report
from mmengine.replay.step_report import step_report
from mmengine.replay.why import why
from tests.events.logs import rewrite
from tests.replay.runs import busy_run
from tests.replay.test_replay_hostile import spoiled

LOOKS = {
    "steps": lambda folder: [step.decide() for step in open_log(folder).steps()],
    "reasons": lambda folder: [reasons_of(step) for step in open_log(folder).steps()],
    "step": lambda folder: step_report(folder, 20),
    "state": lambda folder: state_report(folder, -1),
    "life": lambda folder: list(life_lines(CheckedLog(folder), "r3")),
    "why": lambda folder: why(folder, "r3"),
    "ends": lambda folder: list(ended_requests(CheckedLog(folder))),
    "diff": lambda folder: diff(folder, folder),
    "perfetto": lambda folder: list(perfetto_lines(folder)),
    "mooncake": lambda folder: list(mooncake_lines(folder)),
    "csv": lambda folder: list(csv_lines(folder, steps=True)),
    "redact": lambda folder: redact(folder, folder / "redacted", bytes(16)),
}


@pytest.mark.parametrize("settings", [{}, {"num_draft_tokens": 2}, {"max_in_flight": 2}])
def test_an_answer_or_a_sentence(tmp_path, settings):
    busy_run(tmp_path / "log", num_requests=16, mixed=True, **settings)
    records = list(LogReader(tmp_path / "log"))
    rng, answers, refusals = random.Random(1), 0, 0
    for number in range(60):
        changed = list(records)
        for _ in range(rng.choice([1, 1, 2])):
            at = rng.randrange(1, len(changed) - 1)
            record = changed[at]
            if rng.random() < 0.8:
                event = spoiled(record.event, rng)
                changed[at] = type(record)(record.sequence, record.step, record.mono_ns, event)
            else:
                changed[at], changed[at + 1] = changed[at + 1], changed[at]
        log = rewrite(changed, tmp_path / str(number))
        for name in rng.sample(list(LOOKS), 5):
            try:
                LOOKS[name](log)
                answers += 1
            except LogError as error:
                assert "\n" not in str(error)
                refusals += 1
    assert answers > 20 and refusals > 20
