"""Finds faults of a vLLM scheduler class, for `mmengine log minimize --with`."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from msgspec.structs import replace
from vllm.version import __version__

from mmengine.core.fold.evolve import evolve
from mmengine.core.state.state import State
from mmengine.errors import LogError
from mmengine.events import vocabulary as ev
from mmengine.events.codec import Record
from mmengine.events.log import LogWriter
from mmengine.replay import verify
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.findings import FOLD, place_of
from mmengine.replay.host_rules import rules_for
from mmengine.replay.hosted.derived_engine import DerivedEngine
from mmengine.replay.hosted.engines import HostEngine
from mmengine.replay.hosted.outcome import Outcome
from mmengine.replay.hosted.recorded_state import OF_VLLM
from mmengine.replay.hosted.verify import MAX_WAITING, PROGRESS, HostedVerifier
from mmengine.replay.minimize.deadline import Deadline
from mmengine.replay.minimize.failures import Failure
from mmengine.replay.minimize.probe import TestParts
from mmengine.replay.rerun.script import Script
from mmengine.replay.rules.decisions import broken_rules
from mmengine.replay.tape import INVARIANT, Diverged
from mmengine.replay.verify_report import Divergence, VerifyReport
from mmengine.replay.watcher import Watcher
from mmengine_vllm.deriving.own_scheduler import OWN, OwnScheduler
from mmengine_vllm.deriving.scheduler_test import Expected, module_of, refuse_other_outcome
from mmengine_vllm.deriving.served_script import ServedScript
from mmengine_vllm.deriving.settings import check_version

DIVERGENCE, STALLED, CRASH, ANY = "divergence", "stalled", "crash", "any"
# A script's step limit is 1.25 times the last failing script's number of steps, plus this number.
LATER = 16
KINDS = (*OF_VLLM, ANY, STALLED, CRASH, DIVERGENCE)


class VllmProbe:
    """Serves scripts (a log's requests, without the scheduling) on the scheduler class `name` ("vllm" or
    MODULE:CLASS), and finds faults in the class.

    A fault is a broken invariant, a stall, an exception, or a decision that differs from the reference. The
    reference is vLLM's own scheduler class or, if `name` is "vllm", the rules of this build. `kind`: the kind
    of fault to look for, from KINDS. For "any", the first fault found determines the kind.

    Raises LogError if another version of vLLM wrote the log.
    """

    def __init__(self, name: str, folder: Path, kind: str = ANY, deadline: Deadline | None = None):
        self.name, self.kind, self._deadline = name, kind, deadline or Deadline()
        if kind not in KINDS:
            raise LogError(f"--with {name} knows no failure {kind!r}: {', '.join(KINDS)}")
        self._started = CheckedLog(folder).started
        check_version(self._started, __version__)
        if not self._started.constants.knows_contents:
            raise LogError("the log begins while requests run, so its requests cannot be served again")
        self._reference = "" if name == OWN else OWN
        self._written: tuple[ServedScript, Failure] | None = None
        self._found: Divergence | None = None
        self._first: Failure | None = None  # failure of the first script, which has all requests
        self._most = 2**62
        self.logged = self.of_log(folder)
        if self.logged is not None and kind == ANY:
            self.kind = self.logged.kind

    # Implements Probe (replay/minimize/probe.py)

    def of_script(self, script: Script, max_steps: int) -> Failure | None:
        failure = self._failure(ServedScript(self._started, script, self.name), min(max_steps, self._most))
        if failure is not None:
            self._first = self._first or failure
            if failure.signature == self._first.signature:
                self._most = failure.step + failure.step // 4 + LATER
            if self.kind == ANY:
                self.kind = failure.kind
        return failure

    def check_first(self, failure: Failure) -> None:
        """Raise LogError if the served requests fail in another way than the log."""
        if self.logged is not None and failure.signature != self.logged.signature:
            raise LogError(
                f"the log fails with {self.logged}; served again on {self.name}, its requests fail with "
                f"{failure}"
            )

    def write(self, script: Script, folder: Path) -> None:
        """Serve the script, and write the log of the run up to the failure."""
        served, writer = ServedScript(self._started, script, self.name), LogWriter(folder)
        try:
            failure = self._failure(served, 2 * script.num_steps + 10_000, writer)
        finally:
            writer.close()
        if failure is None:
            raise LogError(f"the requests do not fail when {self.name} serves them again")
        self._written = served, failure

    def of_log(self, folder: Path) -> Failure | None:
        """Return the failure in a log's decisions, or None."""
        report = verify(folder, own=self._reference, invariants=self.kind in (ANY, *OF_VLLM))
        found = report.divergence
        if found is None:
            return None
        failure = _failure_of(found)
        if self.kind not in (ANY, failure.kind):
            return None
        return failure

    def test(self, failure: Failure) -> TestParts:
        """Return a test file that needs only vLLM and pytest.

        Raises LogError if the test passes on the scheduler class `name`, or fails on vLLM's own class. Also
        raises LogError if the failure cannot be checked without mmengine.
        """
        assert self._written is not None
        served, failure = self._written
        expected = self._expected(served, failure)
        module = module_of(served, expected)
        refuse_other_outcome(module, self.name, own=self._reference)
        name = expected.field if expected.kind == "decision" else expected.kind
        return TestParts(name, _title(name, self.name, served.started.host), module=module)

    # One run

    def _failure(
        self, served: ServedScript, max_steps: int, writer: LogWriter | None = None
    ) -> Failure | None:
        """Return a run's first failure. The records up to the failure go to `writer`."""
        self._found = None
        watch, verifier, report = self._watch(served), None, VerifyReport(host=served.started.host)
        if self.kind in (ANY, DIVERGENCE) and (engine := self._engine(served)) is not None:
            verifier = HostedVerifier(_Source(served), engine, report)
        try:
            for record in served.records(max_steps):
                if writer is None:
                    self._deadline.check()
                else:  # the search has ended, so this run need not stop at the deadline
                    writer.append(record.event, record.step, record.mono_ns)
                if verifier is not None and not isinstance(record.event, ev.Started):
                    verifier.take(record)
                if watch is not None and (broken := watch.broken(record.event)) is not None:
                    return Failure(*broken, record.step, served.present)
        except Diverged as diverged:
            self._found = diverged.divergence
            kind, what, step, _ = _failure_of(self._found)
            return Failure(kind, what, step, served.present)
        except LogError:
            raise
        except Exception as error:
            if self.kind not in (ANY, CRASH):
                return None
            return Failure(CRASH, place_of(error), self._step(served), served.present)
        if served.stall and self.kind in (ANY, STALLED):
            return Failure(STALLED, served.stall, self._step(served), served.present)
        return None

    def _watch(self, served: ServedScript) -> "_Watch | None":
        names = OF_VLLM if self.kind == ANY else tuple({self.kind} & {*OF_VLLM, FOLD})
        return _Watch(served, names) if names else None

    def _engine(self, served: ServedScript) -> HostEngine | None:
        """Return the reference, or None if this build has no rules for the log."""
        config = served.script.config
        if self._reference:
            return OwnScheduler(served.started, config, self._reference)
        rules = rules_for(served.started)
        if rules.caveat or not rules.compat:
            return None
        config = replace(config, compat=rules.compat, max_waiting=MAX_WAITING)
        return DerivedEngine(config, served.started.host)

    @staticmethod
    def _step(served: ServedScript) -> int:
        return served.engine.step

    def _expected(self, served: ServedScript, failure: Failure) -> Expected:
        """Return what the written test must check."""
        if failure.kind in (STALLED, CRASH, "budgets", "blocks", "references"):
            kind = "blocks" if failure.kind == "references" else failure.kind
            return Expected(kind)
        found, served = self._found, served
        if failure.kind != DIVERGENCE:
            found, served = self._difference(served.script)
        outcome = None if found is None or found.outcomes is None else found.outcomes[1]
        if found is None or not isinstance(outcome, Outcome):
            raise LogError(f"a test on vLLM alone cannot check this failure: {failure}")
        return Expected("decision", served.calls[found.sequence], found.field, outcome)

    def _difference(self, script: Script) -> tuple[Divergence | None, ServedScript]:
        """Run a script, and return (first difference from the reference, served script)."""
        kind, self.kind = self.kind, DIVERGENCE
        try:
            served = ServedScript(self._started, script, self.name)
            self._failure(served, 2 * script.num_steps + 10_000)
        finally:
            self.kind = kind
        return self._found, served


class _Watch:
    """Applies the records of a run to a state, and checks the invariants `names`."""

    def __init__(self, served: ServedScript, names: tuple[str, ...]):
        self._state = State(served.script.config)
        self._watcher = Watcher(self._state, names, has_outputs=False)

    def broken(self, event: ev.Event) -> tuple[str, str] | None:
        """Apply an event. Return the first broken invariant's name and text, or None."""
        watcher, state = self._watcher, self._state
        watcher.check_decision(event)
        watcher.follow(event)
        if watcher.broken is None:
            for rule in broken_rules(state, event):
                if not rule.can_fold:
                    return rule.rule, rule.text
            try:
                evolve(state, event)
            except Exception as error:
                return FOLD, f"the state cannot take the decision: {type(error).__name__}"
            watcher.check_state()
        return None if watcher.broken is None else (watcher.broken.name, watcher.broken.text)


class _Source:
    """Replaces CheckedLog in HostedVerifier for a run that is not on disk. Errors do not name records."""

    contradiction = staticmethod(CheckedLog.contradiction)

    def __init__(self, served: ServedScript):
        self.config = served.script.config

    def first_state(self) -> State:
        return State(self.config)

    def apply(self, state: State, event: ev.Event) -> None:
        evolve(state, event)

    @contextmanager
    def naming(self, record: Record | None = None) -> Iterator[None]:
        with nullcontext():
            yield


def _failure_of(found: Divergence) -> Failure:
    """Return a failure for a difference. The failure's text contains the first logged and the first derived
    value, and the signature depends on the text. Missing, additional and different decisions thus have
    different signatures.
    """
    if found.field.startswith(INVARIANT):
        name = found.field.removeprefix(INVARIANT)
        return Failure(STALLED if name == PROGRESS else name, str(found.derived), found.step)
    logged, derived = _first(found.logged), _first(found.derived)
    what = f"{found.field}: {logged} is decided in place of {derived}"
    return Failure(DIVERGENCE, what[:300], found.step)


def _first(value: object) -> str:
    if isinstance(value, (list, dict)):
        return repr(next(iter(value.items() if isinstance(value, dict) else value))) if value else "nothing"
    return repr(value)


def _title(check: str, name: str, host: str) -> str:
    cls = "vLLM's own scheduler class" if name == OWN else name
    other = "" if name == OWN else f"    SCHEDULER_CLASS={name} pytest test_minimized_{check}.py\n"
    return (
        f"A fault of {cls}, {host}: {check}. Needs vLLM and pytest, but no model and no GPU.\n\n"
        f"    pytest test_minimized_{check}.py\n{other}\n"
        "SCHEDULER_CLASS (MODULE:CLASS) names the scheduler class; the default is vLLM's own."
    )
