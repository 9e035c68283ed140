"""Checks an engine's health: whether it is ready for work, the log's disk is full, or a step hangs."""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from mmengine.core.decide.stalls import THRASH
from mmengine.core.engine import EngineCore
from mmengine.errors import ErrorCode, LogError, MMEngineError
from mmengine.models.progress import steps_reported_to
from mmengine.processing.workers.decoders import Decoders
from mmengine.serve.requests.operator_log import operator_log
from mmengine.serve.text.request_output import engine_failed
from mmengine.structured_output.rows.grammars import Grammars

# For this number of steps after a request was preempted repeatedly, an engine with requests is not ready.
THRASH_STEPS = 256
STALL_PAUSE_S = 0.05
STALL_LIMIT_S = 60.0  # seconds without progress while the disk is full
STUCK_S = 5.0  # seconds without a write to the log, after which callers should stop waiting
HANG_EXIT = 75  # exit code of a process whose step hung (EX_TEMPFAIL: "try again")


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether an engine is ready for work. A ready engine is true in a boolean context.

    `reasons`: why the engine is not ready, for operators. `public`: the reasons for clients; if empty,
    clients get `reasons`.
    """

    reasons: tuple[str, ...] = ()
    num_preparing: int = 0  # number of requests in preparation or queued for preparation
    oldest_preparing_s: float = 0.0  # age of the oldest of these requests, without the time to fetch media
    is_over: bool = False  # whether the engine has stopped for good
    public: tuple[str, ...] = ()
    is_frozen: bool = False  # whether a step has run for so long that only a new process helps
    stuck: str = ""  # why the log could not be written for STUCK_S seconds, or ""

    @property
    def public_reasons(self) -> tuple[str, ...]:
        return self.public or self.reasons

    @property
    def ready(self) -> bool:
        return not self.reasons

    def __bool__(self) -> bool:
        return self.ready


def stopped_engine(error: MMEngineError | None) -> Readiness:
    """Return the readiness for an engine that `error` has stopped, or that was closed (None)."""
    if error is None:
        return Readiness(("the engine stopped: it was closed",), is_over=True)
    public = f"the engine stopped: {error}"
    if error.code is ErrorCode.EXECUTOR_FAILED:
        public = "the engine stopped; the log says why"
    return Readiness((f"the engine stopped: {error}",), is_over=True, public=(public,))


class StepClock:
    """Measures how long the current step has run. Any thread may read `seconds`."""

    def __init__(self) -> None:
        self._since = 0.0  # start of the current step; 0 between steps

    def begin(self) -> None:
        self._since = time.monotonic()

    def end(self) -> None:
        self._since = 0.0

    @property
    def seconds(self) -> float:
        since = self._since
        return time.monotonic() - since if since else 0.0


def core_reasons(core: EngineCore) -> list[str]:
    """Return the reasons why a running core makes no progress. Thread-safe."""
    reasons = [core.stalled] if core.stalled else []
    if core.last_stall is not None:
        found, stall = core.last_stall
        recent = core.state.step - found <= THRASH_STEPS and bool(core.state.requests)
        if stall.kind == THRASH and recent:
            reasons.append(
                f"request {stall.request_id} was {stall.detail} (step {found}); raise num_blocks or lower "
                "max_num_seqs"
            )
    return reasons


class StallWatch:
    """Detects that a full disk stalls the engine. The engine calls `stepped` after each step."""

    def __init__(self, core: EngineCore):
        self._core = core
        self._since = 0.0  # time of the last output while the disk is full; 0 if the disk is not full
        self._unwritten_since = 0.0  # time of the first unwritten step; 0 if the last step was written

    def stepped(self, *, moved: bool) -> None:
        """Record a step. `moved` says whether the step returned outputs.

        If the disk is full and there were no outputs, sleep for STALL_PAUSE_S.
        """
        if self._core.is_committed:
            self._unwritten_since = 0.0
        elif not self._unwritten_since:
            self._unwritten_since = time.monotonic()
        if not self._core.stalled:
            self._since = 0.0
            return
        if not self._since:
            operator_log.warning("engine stalled", reason=self._core.stalled)
        if moved or not self._since:
            self._since = time.monotonic()
        if not moved:
            time.sleep(STALL_PAUSE_S)

    @property
    def stuck(self) -> str:
        """The reason why no step could be written for STUCK_S seconds, or "". Thread-safe."""
        since = self._unwritten_since
        return self._core.stalled if since and time.monotonic() - since > STUCK_S else ""

    def check(self, limit_s: float | None = None) -> None:
        """Raise LogError if a full disk has prevented outputs for `limit_s` seconds (default: 60)."""
        limit_s = STALL_LIMIT_S if limit_s is None else limit_s
        if self._since and time.monotonic() - self._since > limit_s:
            raise LogError(f"no progress for {limit_s:g} seconds: {self._core.stalled}")


class EngineHealth:
    """Determines an engine's readiness from its steps, core, grammar compilers and decoder processes.

    Any thread may call `readiness`.
    """

    def __init__(self, core: EngineCore, grammars: Grammars, decoders: Decoders | None):
        self._core, self._grammars, self._decoders = core, grammars, decoders
        self._stall_watch = StallWatch(core)
        self._failure: MMEngineError | None = None  # the last step's error

    def stepped(self, *, moved: bool) -> None:
        """Record a successful step. `moved`: whether the step returned outputs."""
        self._failure = None
        self._stall_watch.stepped(moved=moved)

    def failed(self, error: Exception) -> None:
        """Record that the last step raised `error`."""
        self._failure = engine_failed(error)

    def check_stall(self, limit_s: float | None) -> None:
        """Raise LogError if a full disk has stalled the engine for `limit_s`; see StallWatch.check."""
        self._stall_watch.check(limit_s)

    def readiness(self, *, is_closed: bool) -> Readiness:
        """Return whether the engine is ready for more work, and the reasons if it is not.

        The engine is not ready if the log cannot be written, a request is preempted again and again, the last
        step failed, a grammar's compilation hangs, no decoder process can be started, or the engine is
        closed.
        """
        if is_closed:
            reasons = ["the engine is closed"]
        else:
            decoders = self._decoders.reasons if self._decoders is not None else ()
            reasons = [*core_reasons(self._core), *self._grammars.reasons, *decoders]
        if self._failure is None:
            return Readiness(tuple(reasons), stuck=self._stall_watch.stuck)
        if self._failure.code is not ErrorCode.EXECUTOR_FAILED:  # a later step may succeed
            return Readiness((str(self._failure), *reasons))
        found = stopped_engine(self._failure)
        return Readiness((*found.reasons, *reasons), public=(*found.public_reasons, *reasons))


class Watchdog:
    """Calls `on_hang` once, on its own thread, if a `with` block makes no progress for `limit_s` seconds.

    Progress means that the block ends, or reports finished work through models/progress.py.
    """

    def __init__(self, limit_s: float, on_hang: Callable[[], None]):
        self._limit_s, self._on_hang = limit_s, on_hang
        self._moved = 0.0  # time of the last progress; 0 outside a block
        self._telling: AbstractContextManager[None] = nullcontext()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mmengine-watchdog", daemon=True)
        self._thread.start()

    def __enter__(self) -> None:
        self._telling = steps_reported_to(self._tell)
        self._telling.__enter__()
        self._moved = time.monotonic()

    def __exit__(self, *exc: object) -> None:
        self._moved = 0.0
        self._telling.__exit__(None, None, None)

    def _tell(self) -> None:
        self._moved = time.monotonic()

    def _run(self) -> None:
        while not self._closing.wait(min(1.0, self._limit_s / 10)):
            moved = self._moved
            if moved and time.monotonic() - moved > self._limit_s:
                self._on_hang()
                return

    def close(self) -> None:
        self._closing.set()
