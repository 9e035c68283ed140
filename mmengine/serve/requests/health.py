"""Whether an engine may be given work, and why not."""

import time
from dataclasses import dataclass

from mmengine.core.decide.stalls import THRASH
from mmengine.core.engine import EngineCore
from mmengine.errors import ErrorCode, MMEngineError

THRASH_STEPS = 256  # a thrash counts against an engine with work for so many steps


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
