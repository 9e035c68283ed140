"""Verifies a log: runs the engine's loop again on the observations in the log, and compares every derived
event with the log.

The log replaces the executor, source and sink, so no model, device or clock is needed.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from traceback import walk_tb

from mmengine.core.decide.scheduler import DECISION_VERSION
from mmengine.core.engine import EngineCore
from mmengine.core.fold.evolve import evolve
from mmengine.core.host_driven import HostDrivenCore
from mmengine.core.outputs import Output
from mmengine.core.state.digest import checkpoint
from mmengine.core.state.state import State
from mmengine.errors import LogError, MMEngineError
from mmengine.events import vocabulary as ev
from mmengine.events.codec import Record
from mmengine.events.lock import is_locked
from mmengine.events.log_end import log_end
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.hosted.recorded_state import first_broken
from mmengine.replay.hosted.verify import verify_hosted
from mmengine.replay.tape import Blamed, Crashed, Diverged, LogEnded, LogTape
from mmengine.replay.verify_report import Divergence, VerifyReport
from mmengine.replay.watcher import Watcher


def verify(
    folder: Path,
    progress: Callable[[Record], None] | None = None,
    after: int | None = None,
    *,
    invariants: bool = False,
    own: str = "",
) -> VerifyReport:
    """Read a log, and derive its decisions again.

    `progress` is called with each record. `after`: begin at the newest snapshot before this record.
    `invariants`: also check the invariants of replay/watcher.py after each record. A broken invariant is a
    divergence whose field is INVARIANT followed by the invariant's name. `own`: "vllm" or MODULE:CLASS, for a
    log that was recorded in vLLM. The decisions are then derived by the scheduler of the installed vLLM, or
    by this scheduler class.

    Raises LogError if there is no log, and CorruptLog for a damaged file or another format.
    """
    had_writer = is_locked(folder)
    log = CheckedLog(folder, after=after)
    if log.started.host:
        report = verify_hosted(log, progress, own=own)
        broken = first_broken(CheckedLog(folder)) if invariants else None
        if broken is not None and (
            report.divergence is None or broken.sequence <= report.divergence.sequence
        ):
            report.divergence = broken
    elif own:
        raise LogError("mmengine decided in this log; --with is for logs that were recorded in vLLM")
    else:
        report = _verify_own(log, progress, invariants)
    report.torn = log.torn
    report.end = log_end(folder, had_writer)
    return report


def _verify_own(log: CheckedLog, progress: Callable[[Record], None] | None, invariants: bool) -> VerifyReport:
    """Return the report on a log that this engine's loop wrote. The report's `end` is not set."""
    report = VerifyReport(
        begins_after=log.begins_after,
        logged_version=log.started.decision_version,
        logged_engine=log.started.engine_version,
        version=DECISION_VERSION,
    )
    report.rederived = log.started.decision_version == DECISION_VERSION
    tape = LogTape(iter(log), report, progress)
    state = derive(tape, log, invariants) if report.rederived else _fold(tape, log, invariants)
    if not isinstance(state, Divergence):
        try:
            if tape.watcher is not None:
                tape.watcher.check_state()
            tape.check_invariants()
        except Diverged as diverged:
            state = diverged.divergence
    if isinstance(state, Divergence):
        report.divergence = state
    else:
        report.unfinished = list(state.requests)
    return report


def derive(tape: LogTape, log: CheckedLog, invariants: bool) -> State | Divergence:
    """Run the engine's loop with the log as its executor, source and sink. Return the last state, or the
    first divergence.
    """
    core: EngineCore | None = None
    try:
        core_class = HostDrivenCore if log.started.is_host_driven else EngineCore
        core = core_class(
            log.config,
            tape,
            sink=tape,
            source=tape,
            clock=lambda: 0,
            started=log.started,
            state=log.first_state() if log.begins_after >= 0 else None,
        )
        if invariants:
            tape.watcher = Watcher(core.state, begins=log.begins_after < 0)
        while tape.next is not None:
            here = tape.next.sequence
            try:
                outputs = _advance(core, tape.next.event)
                if tape.watcher is not None:
                    tape.watcher.outputs(outputs)
            except Crashed:
                continue  # The next record is RECOVERED.
            except Blamed as blamed:
                core.recover(blamed.recovered, blamed.cause)
            except MMEngineError:
                if tape.next is None or not isinstance(tape.next.event, ev.Recovered):
                    raise
            if tape.next is not None and tape.next.sequence == here:
                found = tape.divergence("event", type(tape.next.event).__name__, "nothing")
                return tape.located(found, core.state)
    except Diverged as diverged:
        return diverged.divergence if core is None else tape.located(diverged.divergence, core.state)
    except LogEnded:
        pass
    except LogError:
        raise
    except MMEngineError as error:
        if tape.next is not None:  # Without a next record, the live engine stopped with the same error.
            found = tape.divergence("event", type(tape.next.event).__name__, str(error))
            return found if core is None else tape.located(found, core.state)
    except Exception as error:
        if tape.next is None and tape.last is not None and not _is_of_observation(error, tape.last):
            return tape.crashed(error)
        culprit = tape.last or log.record
        if culprit is None:
            raise
        raise log.contradiction(culprit, error) from error
    assert core is not None  # The first record is STARTED, which creates the core.
    return core.state


def _is_of_observation(error: Exception, last: Record) -> bool:
    """Return whether `evolve` raised `error` while the log ends with an observation."""
    in_fold = any(frame.f_code is evolve.__code__ for frame, _ in walk_tb(error.__traceback__))
    return in_fold and isinstance(last.event, ev.OBSERVATIONS)


def _advance(core: EngineCore, coming: ev.Event) -> Iterable[Output]:
    """Let the engine produce the event `coming`, and return the outputs."""
    match coming:
        case ev.Checkpoint():
            core.checkpoint()
        case ev.Recovered():
            core.recover(coming)
        case ev.Delivered():  # An engine that is being closed writes DELIVERED, and no step follows.
            core.record_delivered(coming)
        case ev.Executed() | ev.Failed() if isinstance(core, HostDrivenCore) and core.num_in_flight:
            return core.finish_step()
        case _ if isinstance(core, HostDrivenCore):
            return core.begin_step()
        case _:
            return core.step()
    return ()


def _fold(tape: LogTape, log: CheckedLog, invariants: bool) -> State | Divergence:
    """Apply all records without deriving decisions, and compare the digests. Ends at the first finding."""
    state = log.first_state()
    if invariants:
        tape.watcher = Watcher(state, has_outputs=False, begins=log.begins_after < 0)
    while (record := tape.next) is not None:
        try:
            with log.naming(record):
                event = checkpoint(state) if isinstance(record.event, ev.Checkpoint) else record.event
                tape.append(event, state.step_of(event), 0)
                log.apply(state, event)
        except Diverged as diverged:
            return tape.located(diverged.divergence, state)
        if log.findings:
            return tape.broken(log.findings.listed[0])
    return state
