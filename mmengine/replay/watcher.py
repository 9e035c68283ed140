"""Checks the invariants of the state, of the run's history and of each step's plan, while an engine runs."""

from collections.abc import Callable, Iterable

from mmengine.core.executor import StepPlan
from mmengine.core.outputs import Output
from mmengine.core.state.state import State
from mmengine.events import vocabulary as ev
from mmengine.replay import history, plan_invariants
from mmengine.replay.invariants import INVARIANTS, BrokenInvariant, find_broken
from mmengine.replay.rules.decisions import broken_rules

# Maps the name of each invariant to a sentence that says what is checked.
NAMES: dict[str, str] = {
    **{name: " ".join((check.__doc__ or "").split()) for name, check in INVARIANTS.items()},
    **history.DESCRIPTIONS,
    plan_invariants.PLAN: plan_invariants.DESCRIPTION,
}


class Watcher:
    """Checks the invariants during a run. `names`: the invariants to check. `has_outputs`: whether the caller
    calls `outputs` after each engine call. `begins`: whether the run begins with the log's first record.

    `broken`: the first broken invariant, or None. Nothing more is checked after it.
    """

    def __init__(
        self, state: State, names: Iterable[str] = NAMES, *, has_outputs: bool = True, begins: bool = True
    ):
        self._state, wanted = state, set(names)
        self._names = wanted
        self._of_state = [name for name in INVARIANTS if name in wanted]
        self.checks_plans = plan_invariants.PLAN in wanted
        self._history: history.History | None = None
        if of_history := wanted & history.DESCRIPTIONS.keys():
            self._history = history.History(state, of_history, has_outputs=has_outputs, begins=begins)
        self.broken: BrokenInvariant | None = None

    def before(self, event: ev.Event) -> None:
        """Check the state after the last event. Then record `event`, which is about to be applied."""
        self.check_state()
        self.follow(event)

    def follow(self, event: ev.Event) -> None:
        """Record `event`, which is about to be applied. The caller must call `check_state` before this
        method.
        """
        self._follow(lambda followed: followed.before(event))

    def check_decision(self, event: ev.Event) -> None:
        """Check whether `event`, which is about to be applied, breaks a rule."""
        if self.broken is None:
            found = (broken for broken in broken_rules(self._state, event) if broken.rule in self._names)
            if (first := next(found, None)) is not None:
                self.broken = BrokenInvariant(first.rule, first.text)

    def check_state(self) -> None:
        """Check the state after the last event."""
        for name in self._of_state:
            if self.broken is None:
                self.broken = find_broken(self._state, name)
        self._follow(lambda followed: followed.check())

    def outputs(self, outputs: Iterable[Output]) -> None:
        """Check the outputs from a call of the engine."""
        self._follow(lambda followed: followed.outputs(outputs))

    def plan(self, plan: StepPlan) -> None:
        """Check a plan that is being dispatched, and the state after the last event."""
        self.check_state()
        if self.checks_plans and self.broken is None:
            text = next(plan_invariants.broken_plan(self._state, plan), None)
            if text is not None:
                self.broken = BrokenInvariant(plan_invariants.PLAN, text)

    def _follow(self, follow: Callable[[history.History], None]) -> None:
        if self._history is None or self.broken is not None:
            return
        follow(self._history)
        if self._history.broken is not None:
            self.broken = BrokenInvariant(*self._history.broken)
