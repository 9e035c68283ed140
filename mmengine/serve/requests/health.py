"""An engine's health: whether it may be given work, whether its log's disk is full, whether a step hangs."""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from mmengine.core.decide.stalls import THRASH
from mmengine.core.engine import EngineCore
from mmengine.errors import ErrorCode, LogError, MMEngineError
from mmengine.models.progress import steps_reported_to
from mmengine.serve.requests.operator_log import operator_log

THRASH_STEPS = 256  # a thrash counts against an engine with work for so many steps
STALL_PAUSE_S = 0.05
STALL_LIMIT_S = 60.0  # without a step that moves anything, while the disk is full
HANG_EXIT = 75  # "try again": exit code of a process whose step hung, after it said so in its log


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether an engine may be given work; true in a condition if it may. `reasons`: sentences for operators
    that say why not. `public`: the same for strangers, where they are others."""

    reasons: tuple[str, ...] = ()
    num_preparing: int = 0  # requests whose prompts are prepared, or wait for that
    oldest_preparing_s: float = 0.0  # since the submit of the first of them
    is_over: bool = False  # whether this engine will never be ready again
    public: tuple[str, ...] = ()

    @property
    def public_reasons(self) -> tuple[str, ...]:
        return self.public or self.reasons

    @property
    def ready(self) -> bool:
        return not self.reasons

    def __bool__(self) -> bool:
        return self.ready


def stopped_engine(error: MMEngineError | None) -> Readiness:
    """Return the readiness of an engine that `error` stopped, or that was closed."""
    if error is None:
        return Readiness(("the engine stopped: it was closed",), is_over=True)
    public = f"the engine stopped: {error}"
    if error.code is ErrorCode.EXECUTOR_FAILED:
        public = "the engine stopped; its log says why"
    return Readiness((f"the engine stopped: {error}",), is_over=True, public=(public,))


class StepClock:
    """How long the step under way has taken. Another thread than the engine's may ask."""

    def __init__(self) -> None:
        self._since = 0.0  # 0: none runs

    def begin(self) -> None:
        self._since = time.monotonic()

    def end(self) -> None:
        self._since = 0.0

    @property
    def seconds(self) -> float:
        since = self._since
        return time.monotonic() - since if since else 0.0


def core_reasons(core: EngineCore) -> list[str]:
    """What keeps a core that runs from getting on with its work. Reads a few attributes; another thread
    may ask."""
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
    """Sees a core after each step."""

    def __init__(self, core: EngineCore):
        self._core = core
        self._since = 0.0  # when the engine moved last while the disk was full; 0: the disk is not full

    def stepped(self, *, moved: bool) -> None:
        """A step gave outputs, or none; without any it pauses, so that room may come."""
        if not self._core.stalled:
            self._since = 0.0
            return
        if not self._since:
            operator_log.warning("engine stalled", reason=self._core.stalled)
        if moved or not self._since:
            self._since = time.monotonic()
        if not moved:
            time.sleep(STALL_PAUSE_S)

    def check(self, limit_s: float | None = None) -> None:
        """Raise LogError when the disk was full and nothing moved for `limit_s` (a minute)."""
        limit_s = STALL_LIMIT_S if limit_s is None else limit_s
        if self._since and time.monotonic() - self._since > limit_s:
            raise LogError(f"given up after {limit_s:g} seconds: {self._core.stalled}")


class Watchdog:
    """Calls `on_hang`, once and on its own thread, when a `with` block gets no further for `limit_s`: neither
    ends nor tells of anything done (models/progress.py). A long step that gets on may be as long as it
    is."""

    def __init__(self, limit_s: float, on_hang: Callable[[], None]):
        self._limit_s, self._on_hang = limit_s, on_hang
        self._moved = 0.0  # when what is watched began, or told of something done; 0: nothing is watched
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
