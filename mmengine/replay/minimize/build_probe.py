"""Finds the first decision in which another mmengine build differs from this build. The other build runs in a
separate process.

A wrong policy breaks no invariant, so only a comparison with another build reveals the mistake. This build
runs the requests and writes a log. The other build then verifies the log.
"""

import os
import selectors
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import msgspec

from mmengine.config import EngineConfig
from mmengine.core.decide.scheduler import DECISION_VERSION
from mmengine.errors import LogError
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader, LogWriter
from mmengine.events.sink import SinkWrapper
from mmengine.replay.minimize import build_process as other_build
from mmengine.replay.minimize.deadline import Deadline, OutOfTime
from mmengine.replay.minimize.failures import Failure, play, write_log
from mmengine.replay.minimize.probe import TestParts
from mmengine.replay.rerun.script import Script
from mmengine.replay.verify import verify

KIND = "parted"
# Number of steps between two state digests. No run has so many steps, so only decisions are compared.
NEVER_A_DIGEST = 2**20
FIRST_STEPS = 512
START_SECONDS, ANSWER_SECONDS = 60.0, 600.0

_BODY = """    found = verify(log.with_name("log_of_other")).divergence
    assert found is None, found"""


class BuildProbe:
    """A process that runs the other build.

    `where`: a Python interpreter, a virtual environment, or a checkout of mmengine. Raises LogError if
    `where` does not exist, or if its mmengine cannot be used. The probe must be closed.
    """

    def __init__(self, where: str, deadline: Deadline | None = None):
        self._where, self._deadline = where, deadline or Deadline()
        self._compares_states = False
        python, checkout = _python_of(where)
        command = [python, "-I", other_build.__file__, *checkout]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
            )
        except OSError as error:
            raise LogError(f"{python} cannot be run: {error.strerror}") from None
        self._is_met = False
        try:
            self._meet(checkout)
        except BaseException:
            self.close()
            raise

    def _meet(self, checkout: list[str]) -> None:
        hello = self._answer(START_SECONDS)
        self.place, self.version, self._rules = hello.place, hello.version, hello.rules
        if checkout and not Path(self.place).is_relative_to(checkout[0]):
            raise LogError(f"{self._where} imported mmengine from {self.place} instead of its own")

    def __enter__(self) -> "BuildProbe":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    # Probe

    def of_script(self, script: Script, max_steps: int) -> Failure | None:
        """Return the first decision that differs. If all decisions agree for the first script, this call and
        later calls also compare states.
        """
        is_first = not self._is_met
        self._introduce(script)
        found = self._first_difference(script, max_steps)
        if found is None and is_first:
            self._compares_states = True
            found = self._first_difference(script, max_steps)
        return found

    def _first_difference(self, script: Script, max_steps: int) -> Failure | None:
        most = FIRST_STEPS
        while True:  # Begin with few steps, because the builds may differ early.
            most = min(most, max_steps)
            with tempfile.TemporaryDirectory() as folder:
                self._serve_for_other(script, Path(folder), most)
                found = self._ask({"verify": folder})
                if found.step >= 0 or found.steps < most or most == max_steps:
                    failure = _failure(found)
                    return None if failure is None else failure._replace(present=_live_at(folder, found.step))
            most *= 4

    def check_first(self, failure: Failure) -> None:
        """Do nothing, because this probe finds only a single kind of failure."""

    def write(self, script: Script, folder: Path) -> None:
        """Write this build's log to `folder`, and the other build's log to the neighbouring folder
        `log_of_other`.
        """
        write_log(self._with_digests(script), "", folder, deadline=self._deadline)
        theirs = folder.with_name("log_of_other")
        self._serve_there(script, theirs)
        if verify(theirs).divergence is None:
            raise LogError(f"the decisions do not differ when {self._where} serves the requests")

    def of_log(self, folder: Path) -> Failure | None:
        with tempfile.TemporaryDirectory() as scratch:
            _copy(folder, LogWriter(Path(scratch)), self._rules)
            return self._parting(Path(scratch))

    def test(self, failure: Failure) -> TestParts:
        title = f"This build decides differently from mmengine {self.version}, which wrote log_of_other."
        return TestParts(KIND, title, "from mmengine.replay import verify\n", _BODY)

    def _serve_for_other(self, script: Script, folder: Path, max_steps: int) -> None:
        sink = _Translated(LogWriter(folder), self._rules)
        try:
            play(self._with_digests(script), "", sink, max_steps, self._deadline)
        finally:
            sink.close()

    def _serve_there(self, script: Script, folder: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            path, log = Path(scratch) / "script", Path(scratch) / "log"
            path.write_bytes(_as_bytes(self._with_digests(script)))
            self._ask({"serve": str(path), "into": str(log)})
            _copy(log, LogWriter(folder), DECISION_VERSION)

    def _with_digests(self, script: Script) -> Script:
        """Return the script with a digest after each step if states are compared, else without digests."""
        interval = 1 if self._compares_states else NEVER_A_DIGEST
        return replace(script, config=msgspec.structs.replace(script.config, checkpoint_interval=interval))

    def _introduce(self, script: Script) -> None:
        """Raise LogError if the other build cannot run with these settings or read this build's log."""
        if self._is_met:
            return
        empty = replace(script, observations=[], answers={}, failed_steps={})
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as theirs:
            self._serve_there(empty, Path(theirs))
            self._serve_for_other(empty, Path(folder), 1)
            if (found := self._parting(Path(folder))) is not None:
                raise LogError(f"mmengine {self.version} in {self._where} cannot be used: {found.what}")
        self._is_met = True

    def _parting(self, log: Path) -> Failure | None:
        return _failure(self._ask({"verify": str(log)}))

    def _ask(self, question: dict[str, str]) -> "_Answer":
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(question) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise LogError(f"the process for {self._where} has ended") from None
        return self._answer(ANSWER_SECONDS)

    def _answer(self, seconds: float) -> "_Answer":
        """Return the other build's next answer. Raises OutOfTime after `seconds` or at the deadline."""
        assert self._process.stdout is not None
        pipe, line = self._process.stdout, b""
        until = self._deadline.passed() + min(seconds, self._deadline.left())
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                left = until - self._deadline.passed()
                if left <= 0 or not selector.select(left):
                    self._deadline.check()
                    raise OutOfTime(f"mmengine in {self._where} did not answer within {seconds:g} s")
                more = os.read(pipe.fileno(), 2**16)
                if not more:
                    raise LogError(f"the process for {self._where} ended without an answer")
                line += more
        answer = msgspec.json.decode(line, type=_Answer)
        if answer.error:
            raise LogError(f"mmengine in {self._where} cannot be used (is it too old?): {answer.error}")
        return answer


class _Answer(msgspec.Struct):
    """An answer from the other build. `version`, `rules` and `place` identify the build. `step`: the step of
    the first decision that differs, or -1. `steps`: the number of steps in the log. `error`: an error text,
    or "".
    """

    version: str = ""
    rules: int = 0
    place: str = ""
    step: int = -1
    steps: int = 0
    what: str = ""
    event: str = ""
    field: str = ""
    sides: tuple[str, str] = ("", "")
    error: str = ""


def _failure(found: _Answer) -> Failure | None:
    if found.step < 0:
        return None
    what = found.what
    if found.event == ev.Checkpoint.__name__:
        what = "the decisions agree, but the states after them differ"
    elif found.event:
        here, there = found.sides
        what = f"{found.event}, field {found.field}: {here} here, {there} there"
    return Failure(KIND, what[:300], found.step)


def _live_at(folder: str, step: int) -> tuple[str, ...]:
    """Return the requests that waited or ran when `step` was decided."""
    live: dict[str, None] = {}
    for record in LogReader(Path(folder)):
        if record.step > step:
            break
        match record.event:
            case ev.Queued(request_id=name):
                live[name] = None
            case ev.Finished(request_id=name) if record.step < step:
                live.pop(name, None)
    return tuple(live)


class _Translated(SinkWrapper):
    """Writes a log that another build can read. Its STARTED event has the other build's version of the
    decision rules. Settings with default values are left out, because the other build may not know them.
    """

    def __init__(self, inner: LogWriter, rules: int):
        super().__init__(inner)
        self._rules = rules

    def append(self, event: ev.Event, step: int, mono_ns: int) -> None:
        super().append(_as_of(event, self._rules), step, mono_ns)


def _as_of(event: ev.Event, rules: int) -> ev.Event:
    if not isinstance(event, ev.Started):
        return event
    known = EngineConfig().as_dict()
    config = {name: value for name, value in event.config.items() if known.get(name, value) != value}
    return msgspec.structs.replace(event, decision_version=rules, config=config)


def _copy(source: Path, target: LogWriter, rules: int) -> None:
    try:
        for record in LogReader(source):
            target.append(_as_of(record.event, rules), record.step, record.mono_ns)
        target.commit()
    finally:
        target.close()


def _as_bytes(script: Script) -> bytes:
    """Encode a script as the input of `other_build.serve`."""
    observations = [
        (each.step, each.landed, type(each.event).__name__, msgspec.msgpack.encode(each.event))
        for each in script.observations
    ]
    answers = [
        (name, answer.tokens.tobytes(), answer.stop, answer.error, answer.runs.tobytes())
        for name, answer in script.answers.items()
    ]
    settings = script.config.as_dict()
    config = {name: value for name, value in settings.items() if value != EngineConfig().as_dict()[name]}
    return msgspec.msgpack.encode((config, observations, answers, list(script.failed_steps.items())))


def _python_of(where: str) -> tuple[str, list[str]]:
    """Return the Python interpreter, and a list with the other build's checkout. The list is empty if the
    build is installed.
    """
    path = Path(where)
    if (path / "mmengine" / "__init__.py").is_file():
        own = path / ".venv" / "bin" / "python"
        return str(own if own.exists() else sys.executable), [str(path.resolve())]
    if (path / "bin" / "python").exists():
        return str(path / "bin" / "python"), []
    python = shutil.which(where)
    if python is None:
        raise LogError(f"{where} is not a Python, a virtual environment or a checkout of mmengine")
    return python, []
