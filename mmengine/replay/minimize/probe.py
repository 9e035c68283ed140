"""What minimizing asks of a log: does it fail, and how. A kind of failure, a command, or another build."""

from pathlib import Path
from typing import NamedTuple, Protocol

from mmengine.errors import LogError
from mmengine.replay.invariants import INVARIANTS
from mmengine.replay.minimize.deadline import Deadline
from mmengine.replay.minimize.failures import (
    IN_A_RUN,
    KINDS,
    Failure,
    find_failure,
    replay_failure,
    write_log,
)
from mmengine.replay.rerun.script import Script


class TestParts(NamedTuple):
    """Of the pytest file: the test's name, what it says, its imports, and the body of a function in which
    `log` is the folder."""

    name: str
    title: str
    imports: str
    body: str


class Probe(Protocol):
    """Everything here raises OutOfTime when its deadline passes."""

    def of_script(self, script: Script, max_steps: int) -> Failure | None:
        """How the script fails within so many steps."""

    def write(self, script: Script, folder: Path) -> None:
        """Leave in a new folder the log, and what else the test reads."""

    def of_log(self, folder: Path) -> Failure | None:
        """How the log that `write` left there fails."""

    def test(self, failure: Failure) -> TestParts: ...


_BODY = """    failure = replay_failure(log, "{kind}")
    assert failure is None, failure"""


class Kind:
    """One of KINDS, or another that ends the run before: `told_apart` says so. Of "any" only the invariant
    that was broken first is looked at from then on."""

    def __init__(self, name: str, deadline: Deadline | None = None):
        self.name, self._deadline = name, deadline or Deadline()

    def of_script(self, script: Script, max_steps: int) -> Failure | None:
        failure = find_failure(script, self.name, max_steps=max_steps, deadline=self._deadline)
        if failure is not None and self.name == "any" and failure.kind in INVARIANTS:
            self.name = failure.kind
        return failure

    def write(self, script: Script, folder: Path) -> None:
        write_log(script, self.name, folder, deadline=self._deadline)

    def of_log(self, folder: Path) -> Failure | None:
        return replay_failure(folder, self.name, self._deadline)

    def test(self, failure: Failure) -> TestParts:
        title = f"Serving these requests fails: {failure.kind}."
        if failure.kind not in IN_A_RUN:
            title = (INVARIANTS[failure.kind].__doc__ or "").strip()
        imports = "from mmengine.replay import replay_failure\n"
        return TestParts(failure.kind, title, imports, _BODY.format(kind=failure.kind))

    def told_apart(self, failure: Failure) -> None:
        """Raises LogError when something else failed than what was asked for."""
        if self.name not in ("any", failure.kind):
            assert failure.kind in KINDS
            raise LogError(
                f"another failure comes first, so nobody can say whether {self.name} would fail: {failure}; "
                f"minimize that one with --failing {failure.kind}"
            )
