"""The interface of probes, and the probe for a kind of failure. While a log is minimized, a probe decides
whether a smaller log still fails.
"""

from pathlib import Path
from typing import NamedTuple, Protocol

from mmengine.errors import LogError
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
from mmengine.replay.watcher import NAMES


class TestParts(NamedTuple):
    """The text of the pytest file for a minimized log. `name`: the test's name. `title`: the docstring.
    `body`: the function's body, in which `log` is the log's folder. `module`: if not empty, replaces imports
    and body.
    """

    name: str
    title: str
    imports: str = ""
    body: str = ""
    module: str = ""


class Probe(Protocol):
    """Finds failures. Every method may raise OutOfTime after the probe's deadline."""

    def of_script(self, script: Script, max_steps: int) -> Failure | None:
        """Serve the script's requests, and return the failure within the first `max_steps` steps, or None."""

    def check_first(self, failure: Failure) -> None:
        """Raise LogError if `failure` is not the requested failure."""

    def write(self, script: Script, folder: Path) -> None:
        """Write the log, and all other files that the test reads, to a new folder."""

    def of_log(self, folder: Path) -> Failure | None:
        """Return the failure in a log that `write` wrote, or None."""

    def test(self, failure: Failure) -> TestParts: ...


_BODY = """    failure = replay_failure(log, "{kind}")
    assert failure is None, failure"""


class KindProbe:
    """A probe for failures of a kind in KINDS. For the kind "any", later runs check only the invariant that
    the first run broke.
    """

    def __init__(self, name: str, deadline: Deadline | None = None):
        self.name, self._deadline = name, deadline or Deadline()

    def of_script(self, script: Script, max_steps: int) -> Failure | None:
        failure = find_failure(script, self.name, max_steps=max_steps, deadline=self._deadline)
        if failure is not None and self.name == "any" and failure.kind in NAMES:
            self.name = failure.kind
        return failure

    def write(self, script: Script, folder: Path) -> None:
        write_log(script, self.name, folder, deadline=self._deadline)

    def of_log(self, folder: Path) -> Failure | None:
        return replay_failure(folder, self.name, self._deadline)

    def test(self, failure: Failure) -> TestParts:
        title = f"Serving these requests fails: {failure.kind}."
        if failure.kind not in IN_A_RUN:
            title = NAMES[failure.kind]
        imports = "from mmengine.replay import replay_failure\n"
        return TestParts(failure.kind, title, imports, _BODY.format(kind=failure.kind))

    def check_first(self, failure: Failure) -> None:
        """Raise LogError if the failure's kind is not the requested kind."""
        if self.name not in ("any", failure.kind):
            assert failure.kind in KINDS
            raise LogError(
                f"another failure comes before {self.name}: {failure}; minimize it with "
                f"--failing {failure.kind}"
            )
