"""Finds and minimizes a planted bug, with the buggy build that wrote the log and with a good build."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from mmengine.errors import CorruptLog, LogError
from mmengine.replay.minimize.build_probe import BuildProbe
from mmengine.replay.minimize.deadline import Deadline
from mmengine.replay.minimize.failures import Failure
from mmengine.replay.minimize.minimize import Minimizer
from mmengine.replay.minimize.probe import KindProbe, Probe
from mmengine.replay.minimize.reproduction import reproduce
from mmengine.replay.rerun.script import Script, read_script
from mmengine.replay.verify import verify
from tests.replay.planted.nights import Night

ROOT = Path(__file__).parents[3]
Plant = Callable[[pytest.MonkeyPatch], None]
SECONDS = 60


@dataclass(frozen=True)
class Bug:
    """A planted bug. `kind`: the resource that the bug corrupts. `plant`: patches this process. `night`: a
    workload that triggers the bug. `found_by`: the broken invariant, or the event and field at which a good
    build diverges.
    """

    name: str
    kind: str
    plant: Plant
    night: Night
    found_by: str = ""


@dataclass
class Found:
    """How a bug was found. `invariant`: the invariant that breaks with the buggy build, or "". `text`: a
    description of the broken invariant. `divergence`: the event and field at which the good build diverges,
    or "".
    """

    invariant: str = ""
    text: str = ""
    divergence: str = ""


def write(bug: Bug, folder: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        bug.plant(patch)
        error = bug.night.run(folder)
    return "" if error is None else f"{type(error).__name__}: {error}"


def find(bug: Bug, folder: Path) -> Found:
    found = Found()
    with pytest.MonkeyPatch.context() as patch:
        bug.plant(patch)
        found.invariant, found.text = _verified(folder, invariants=True)
    event, text = _verified(folder, invariants=False)
    found.divergence = f"{event}: {text}" if event else ""
    return found


def _verified(folder: Path, invariants: bool) -> tuple[str, str]:
    try:
        report = verify(folder, invariants=invariants)
    except CorruptLog as error:
        return "corrupt", str(error)
    found = report.divergence
    if found is None:
        return "", ""
    return (
        (found.field.removeprefix("invariant "), str(found.derived))
        if found.field.startswith("invariant ")
        else (f"{found.event}.{found.field}", f"logged {found.logged}, derived {found.derived}")
    )


class Small(NamedTuple):
    """The number of requests and the failure in a minimized log."""

    num_requests: int
    failure: Failure


def minimize(bug: Bug, log: Path, out: Path, seconds: float = SECONDS) -> Small:
    """Minimize the log with the buggy build, and write the result to `out`. The minimizer preserves the
    failure that the buggy build finds, or else the divergence from the good build.
    """
    with pytest.MonkeyPatch.context() as patch:
        bug.plant(patch)
        deadline = Deadline(seconds)
        script = read_script(log)
        probe = KindProbe("any", deadline)
        try:
            return _minimized(script, probe, out, deadline)
        except LogError as error:
            if "nothing failed" not in str(error):
                raise
        with BuildProbe(str(ROOT), deadline) as other:
            return _minimized(script, other, out, deadline)


def _minimized(script: Script, probe: Probe, out: Path, deadline: Deadline) -> Small:
    minimizer = Minimizer(script, probe.of_script, deadline=deadline)
    small = minimizer.minimize()
    reproduce(small, minimizer.failure, probe, out, len(script.requests))
    return Small(len(small.requests), minimizer.failure)
