"""Replays a script (a log's requests), reports the first failure of a given kind, and writes the replay's
log.

A kind is an invariant's name, "any" for all invariants, "stalled" (no progress), "thrash" (a request is
preempted again and again without a new token), "crash" (an unexpected exception), "tokens" (a request read
wrong KV), or "divergence" (the replay's log does not verify).
"""

import re
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from mmengine.core.decide.request_checks import check_request
from mmengine.core.decide.stalls import THRASH
from mmengine.core.executor import StepPlan
from mmengine.core.state.request_state import request_of
from mmengine.errors import CorruptLog, InvalidRequest, LogError, MMEngineError
from mmengine.events import vocabulary as ev
from mmengine.events.codec import Record
from mmengine.events.log import LogWriter
from mmengine.events.sink import Sink
from mmengine.replay.findings import place_of
from mmengine.replay.minimize.deadline import Deadline
from mmengine.replay.rerun.playback import ClockedExecutor, Playback
from mmengine.replay.rerun.script import Script, read_script
from mmengine.replay.rerun.scripted_executor import ScriptedExecutor
from mmengine.replay.verify import verify
from mmengine.replay.watcher import NAMES, Watcher
from mmengine.simulation.simulated_executor import SimulatedExecutor, reference_tokens

IN_A_RUN = ("stalled", "thrash", "crash", "tokens", "divergence")
KINDS = (*NAMES, "any", *IN_A_RUN)
_VARIES = re.compile(r"0x[0-9a-f]+|'[^']*'|\b[0-9a-f]{8,}\b|\d+(?:\.\d+)?")


class Failure(NamedTuple):
    """A failure. `kind`: one of KINDS, but not "any". `step`: the open or next step, or -1 if a user's
    command reported the failure. `present`: the requests that were waiting or running at that step, if known.
    """

    kind: str
    what: str
    step: int
    present: tuple[str, ...] = ()

    @property
    def signature(self) -> tuple[str, str]:
        """The kind, and the text without numbers and names. Equal signatures count as the same failure."""
        return self.kind, _VARIES.sub("#", self.what)

    def __str__(self) -> str:
        return f"{self.kind}, at step {self.step}: {self.what}"


def replay_failure(folder: Path, kind: str, deadline: Deadline | None = None) -> Failure | None:
    """Run a log's requests again with this build, and return the failure, or None. `kind`: one of KINDS.
    Raises `verify`'s errors.
    """
    deadline = deadline or Deadline()
    script = read_script(Path(folder), lambda state, record: deadline.check())
    return find_failure(script, kind, max_steps=enough_steps(script), deadline=deadline)


def enough_steps(script: Script) -> int:
    """Return the maximum number of steps in a replay; later failures do not count.

    The limit ends a replay even if the log's answer lengths are wrong.
    """
    return 4 * script.num_steps + 10_000


def find_failure(
    script: Script, kind: str, *, max_steps: int = 2**62, deadline: Deadline | None = None
) -> Failure | None:
    """Replay a script. Return the first failure of this `kind`, or an earlier failure that ends the replay,
    or None. Raises OutOfTime.
    """
    deadline = deadline or Deadline()
    if kind == "divergence":
        with tempfile.TemporaryDirectory() as folder:
            return write_log(script, kind, Path(folder), max_steps, deadline)
    return play(script, kind, None, max_steps, deadline)


def write_log(
    script: Script, kind: str, folder: Path, max_steps: int = 2**62, deadline: Deadline | None = None
) -> Failure | None:
    """Replay a script up to its failure, write the run to a new log, and return the failure. `kind`: one of
    KINDS, or "" to report only failures that end a run. Raises OutOfTime.
    """
    deadline = deadline or Deadline()
    sink = LogWriter(folder)
    try:
        failure = play(script, kind, sink, max_steps, deadline)
    finally:
        sink.close()
    if kind == "divergence":
        return _divergence(folder, deadline) or failure
    return failure


def play(script: Script, kind: str, sink: Sink | None, max_steps: int, deadline: Deadline) -> Failure | None:
    """Replay a script, write the run's log to `sink`, and return the failure. `kind`: see `write_log`.
    Divergences are not detected.
    """
    if kind == "tokens":
        return _wrong_tokens(script, sink, max_steps, deadline)
    executor = ScriptedExecutor(script.config, script.answers, failed_steps=script.failed_steps)
    run = _Run(script, executor, sink, deadline, NAMES if kind == "any" else {kind} & NAMES.keys())
    return run.until_failure(run.find_broken, max_steps)


def _divergence(folder: Path, deadline: Deadline) -> Failure | None:
    """Return a failure if the scheduler's decisions, computed again, differ from the log in `folder`."""
    step = 0

    def follow(record: Record) -> None:
        nonlocal step
        step = record.step
        deadline.check()

    try:
        found = verify(folder, follow).divergence
    except CorruptLog as error:
        return Failure("divergence", str(error)[:300], step)
    if found is None:
        return None
    what = f"{found.event}, field {found.field}: logged {found.logged!r}, derived {found.derived!r}"
    return Failure("divergence", what[:300], found.step)


class _WatchedExecutor:
    """Wraps an executor, and passes each plan to `watcher`."""

    needs_plan = True

    def __init__(self, inner: ClockedExecutor):
        self._inner = inner
        self.watcher: Watcher | None = None
        self.collect, self.discard, self.close = inner.collect, inner.discard, inner.close

    @property
    def clock_ns(self) -> int:
        return self._inner.clock_ns

    def dispatch(self, plan: StepPlan) -> None:
        if self.watcher is not None:
            self.watcher.plan(plan)
        self._inner.dispatch(plan)


class _Run:
    """A replay of a script. Reports any failure that ends the replay, even if its kind was not requested."""

    def __init__(
        self,
        script: Script,
        executor: ClockedExecutor,
        sink: Sink | None,
        deadline: Deadline,
        names: Iterable[str] = (),
    ):
        self._thrashing, self._deadline = "", deadline
        self._watcher: Watcher | None = None
        self._found: Failure | None = None
        watched = _WatchedExecutor(executor)
        self.playback = Playback(script.config, script.observations, watched, sink=sink, see=self._see)
        if names:
            self._watcher = watched.watcher = Watcher(self.playback.core.state, names)
        self.outputs: dict[str, list[int]] = {}
        self.ended: list[tuple[str, str]] = []

    def _see(self, event: ev.Event) -> None:
        if isinstance(event, ev.Stalled) and event.kind == THRASH:
            self._thrashing = event.detail
        if self._watcher is not None and self._found is None:
            self._watcher.before(event)
            self._watcher.check_decision(event)
            self._note_broken()

    def _note_broken(self) -> None:
        if self._watcher is not None and self._watcher.broken is not None and self._found is None:
            self._found = self.failure(*self._watcher.broken)

    def find_broken(self) -> Failure | None:
        """Return the first broken invariant as a failure, or None."""
        if self._watcher is not None:
            self._watcher.check_state()
        self._note_broken()
        return self._found

    def failure(self, kind: str, what: str) -> Failure:
        state = self.playback.core.state
        return Failure(kind, what, state.step, tuple(state.requests))

    def until_failure(self, look: Callable[[], Failure | None], max_steps: int) -> Failure | None:
        core = self.playback.core
        try:
            while core.state.step <= max_steps:
                self._deadline.check()
                outputs = self.playback.step()
                if outputs is None:
                    return look()
                if self._watcher is not None:
                    self._watcher.outputs(outputs)
                for output in outputs:
                    self.outputs.setdefault(output.request_id, []).extend(output.token_ids)
                    if output.finish_reason in ev.ANSWERED:
                        self.ended.append((output.request_id, output.finish_reason))
                if (failure := look()) is not None:
                    return failure
                if self._thrashing:
                    return self.failure("thrash", self._thrashing)
        except LogError:
            raise
        except MMEngineError as error:
            return look() or self.failure("stalled", str(error))
        except Exception as error:
            return look() or self.failure("crash", place_of(error))
        return None


def _wrong_tokens(script: Script, sink: Sink | None, max_steps: int, deadline: Deadline) -> Failure | None:
    """Return a failure if a request's answer differs from the answer that the request gets alone. The
    executor computes each token from all KV slots that the request reads, so wrong KV changes the answer.
    """
    script = _by_length(script)
    executor = SimulatedExecutor(script.config, check_kv=True, fault=script.failed_steps.get)
    run = _Run(script, executor, sink, deadline)
    queued = {event.request_id: event for event in script.requests}

    def look() -> Failure | None:
        for name, reason in run.ended:
            expected = reference_tokens(request_of(queued[name]), script.config)
            got = run.outputs.pop(name, [])
            if (got, reason) != expected:
                place = next(
                    (n for n, pair in enumerate(zip(got, expected[0])) if len({*pair}) > 1), len(got)
                )
                what = f"request {name!r}: output token {place} differs from the one it gets when run alone"
                return Failure("tokens", what, run.playback.core.state.step)
        run.ended.clear()
        return None

    return run.until_failure(look, max_steps)


def _by_length(script: Script) -> Script:
    """Return a script whose answers end at max_tokens. If a logged answer ended with a stop or an error,
    max_tokens becomes the answer's logged length.
    """
    observations = []
    for each in script.observations:
        event = each.event
        if isinstance(event, ev.Queued):
            answer = script.answers[event.request_id]
            if (answer.stop or answer.error) and event.sampling.max_tokens:
                limits = {"max_tokens": max(1, len(answer.tokens)), "min_tokens": 0}
                sampling = msgspec.structs.replace(event.sampling, **limits)
                event = msgspec.structs.replace(event, sampling=sampling)
        observations.append(replace(each, event=event))
    return replace(script, observations=observations)


def is_playable(script: Script) -> bool:
    """Return whether every request would be accepted with the script's settings."""
    try:
        for event in script.requests:
            check_request(request_of(event), script.config)
    except InvalidRequest:
        return False
    return True
