"""Tests that no `mmengine log` command fails with a traceback: on golden logs, on logs of known bugs, and on
logs with changed records.
"""

import random
from pathlib import Path

import msgspec
import pytest

from mmengine.core.decide.scheduler import DECISION_VERSION
from mmengine.events.codec import Record
from mmengine.events.log import LogReader
from tests.events.logs import rewrite
from tests.replay.broken_builds import BUGS, write_broken
from tests.replay.log_verbs import LONG, failures
from tests.replay.planted.bugs import BUGS as PLANTED
from tests.replay.planted.finding import write
from tests.replay.plausible import with_false_decisions
from tests.replay.runs import busy_run
from tests.replay.test_replay_hostile import spoiled

GOLDEN = Path(__file__).parents[1] / "golden"
LOGS = sorted(path.name for path in GOLDEN.iterdir() if any(path.glob("*.mmlog*")))


@pytest.mark.parametrize("name", LOGS)
def test_golden_logs(tmp_path, name):
    assert failures(GOLDEN / name, GOLDEN / "mixed", tmp_path / "out", skip=LONG) == []


@pytest.mark.parametrize("name", BUGS)
def test_logs_of_broken_builds(tmp_path, name):
    log = write_broken(tmp_path / "log", name)
    assert failures(log, GOLDEN / "sessions", tmp_path / "out") == []


@pytest.mark.soak
@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.name)
def test_logs_of_planted_bugs(tmp_path, bug):
    write(bug, tmp_path / "log")
    assert failures(tmp_path / "log", GOLDEN / "mixed", tmp_path / "out") == []


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, settings in {"busy": {}, "overlap": {"max_in_flight": 2}, "mixed": {"mixed": True}}.items():
        busy_run(folder / name, num_requests=16, **settings)
    golden = ("sessions", "store", "recurrent_states", "adapters", "compat")
    folders = [*sorted(folder.iterdir()), *(GOLDEN / name for name in golden)]
    return [list(LogReader(path)) for path in folders]


def mutated(records: list[Record], rng: random.Random) -> list[Record]:
    """Return a log's records with random changes. Some logs get wrong decisions with plausible values. In all
    other logs, up to four records are spoiled, dropped, repeated or swapped. Half of these other logs also
    get an unknown decision version.
    """
    records = list(records)
    if rng.random() < 0.4:
        return with_false_decisions(records, rng)
    if rng.random() < 0.5:
        first = records[0]
        event = msgspec.structs.replace(first.event, decision_version=DECISION_VERSION + 98)
        records[0] = Record(0, 0, first.mono_ns, event)
    for _ in range(rng.choice([1, 1, 2, 4])):
        at, what = rng.randrange(1, len(records)), rng.random()
        record = records[at]
        if what < 0.7:
            records[at] = Record(0, record.step, record.mono_ns, spoiled(record.event, rng))
        elif what < 0.8:
            del records[at]
        elif what < 0.9:
            records.insert(at, records[rng.randrange(1, len(records))])
        else:
            other = rng.randrange(1, len(records))
            records[at], records[other] = records[other], records[at]
    return records


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(200))
def test_mutated_logs(tmp_path, runs, seed):
    rng = random.Random(seed)
    log = rewrite(mutated(rng.choice(runs), rng), tmp_path / "log")
    assert failures(log, GOLDEN / "mixed", tmp_path / "out") == []
