"""`mmengine log minimize`: reduces a failing log to a small log that fails in the same way."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmengine.cli.logs.printing import Folder, Json, existing, print_json, printable
from mmengine.cli.progress_bar import progress_bar
from mmengine.errors import LogError, MMEngineError, code_of

if TYPE_CHECKING:  # Heavy; loaded when a command runs.
    from mmengine.replay.minimize.command_probe import Main
    from mmengine.replay.minimize.deadline import Deadline
    from mmengine.replay.minimize.failures import Failure
    from mmengine.replay.minimize.minimize import Minimizer, Progress
    from mmengine.replay.minimize.probe import Probe
    from mmengine.replay.minimize.recording import Recording
    from mmengine.replay.rerun.script import Script

HELP = (
    "Reduce a failing log: leave out requests, then shrink values, while it fails in the same way.\n\n"
    "Writes the smallest log and a pytest file that replays it. FAILING is a kind of failure (any; "
    "an invariant's name, such as budgets or hits; stalled, thrash, crash, tokens, divergence), or a command "
    "that fails on a log, with {} for the log's folder. With --against the log fails when another build of "
    "mmengine decides differently on the same requests.\n\n"
    "If this build does not have the bug, but the log's own decisions break a rule, requests are left out of "
    "the recorded log, without deciding again.\n\n"
    "A log that was recorded in vLLM is minimized with --with MODULE:CLASS in vLLM's environment: candidates "
    "are served on this scheduler class without a model, and compared with vLLM's own class. --with vllm "
    "looks for a fault of vLLM's own class. The written test needs vLLM and pytest only.\n\n"
    "[bold]Examples[/bold]\n\n  mmengine log minimize night.log --failing any -o small\n\n"
    "  mmengine log minimize night.log --failing 'python check.py {}' -o small\n\n"
    "  mmengine log minimize night.log --against ~/last-release/.venv -o small\n\n"
    "  mmengine log minimize vllm.log --with mine:Scheduler -o small"
)

MAX_PROCESSES = 8  # Maximum number of shorter scripts to try; each ends before a recovery.
_NOTHING = "this build served the log's requests again and nothing failed"


def minimize(
    context: typer.Context,
    folder: Folder,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="New folder for the log and the test.", show_default=False)
    ],
    failing: Annotated[str, typer.Option(help="Kind of failure, or a command.", show_default=False)] = "",
    against: Annotated[
        str,
        typer.Option(
            help="Another build: a Python, a virtual environment, or a checkout.", show_default=False
        ),
    ] = "",
    own: Annotated[
        str,
        typer.Option(
            "--with",
            help="vllm: serve on the installed vLLM's own scheduler; or MODULE:CLASS, a class of it.",
            show_default=False,
        ),
    ] = "",
    settings: Annotated[
        bool, typer.Option("--settings", help="Also shrink settings: the pool, budgets, rows.")
    ] = False,
    seconds: Annotated[
        int, typer.Option(min=1, help="Time limit in seconds; then the smallest log so far is written.")
    ] = 600,
    json_output: Json = False,
) -> None:
    from mmengine.replay.findings import Findings  # Lazy: help does not need these modules.
    from mmengine.replay.minimize.deadline import Deadline
    from mmengine.replay.minimize.probe import KindProbe
    from mmengine.replay.minimize.reproduction import refuse_used, reproduce
    from mmengine.replay.rerun.script import read_script

    deadline, findings = Deadline(seconds), Findings()
    existing(folder)
    with _probe(folder, failing, against, own, deadline, _main_of(context)) as probe, _progress() as progress:
        refuse_used(out)
        script = read_script(folder, lambda state, record: deadline.check(), findings)
        minimizer = _first_failing(failing, script, probe, deadline, progress)
        if minimizer is None and isinstance(probe, KindProbe):
            result = _recorded(folder, out, probe.name, script, deadline, progress)
        elif minimizer is None:
            how = f"with --with {own}" if own else "according to the command or the other build"
            raise LogError(f"{_NOTHING} {how}")
        else:
            first = minimizer.failure
            probe.check_first(first)
            small = minimizer.minimize(settings=settings)
            test = reproduce(small, minimizer.failure, probe, out, len(script.requests))
            counts = (len(script.requests), minimizer.tried)
            result = _Result(first, minimizer.failure, minimizer.best, *counts, minimizer.is_cut_short, test)
    _print(result, deadline, json_output)


def _first_failing(
    failing: str,
    script: "Script",
    probe: "Probe",
    deadline: "Deadline",
    progress: "Callable[[Progress], None]",
) -> "Minimizer | None":
    """Return the minimizer of the first script that fails, or None.

    The whole script contains each recovery after a crash, so its run does not end at the crash. To find a
    crash, this function also tries shorter scripts, which end before a recovery.
    """
    from mmengine.replay.minimize.minimize import Minimizer, NothingFailed
    from mmengine.replay.minimize.shrink import before_recoveries

    scripts = [script]
    if failing in ("crash", "any"):
        scripts += before_recoveries(script)[:MAX_PROCESSES]
    for each in scripts:
        with suppress(NothingFailed):
            return Minimizer(each, probe.of_script, deadline=deadline, progress=progress)
    return None


def _recorded(
    folder: Path,
    out: Path,
    kind: str,
    script: "Script",
    deadline: "Deadline",
    progress: "Callable[[Progress], None]",
) -> "_Result":
    """Minimize a failure that only the log's recorded decisions show. This build does not have the failure.
    Raises LogError if the recorded decisions break no rule of this kind.
    """
    from mmengine.replay.minimize.minimize import Progress
    from mmengine.replay.minimize.recording import RecordedProbe, read_recording
    from mmengine.replay.minimize.reproduction import reproduce
    from mmengine.replay.minimize.shrink import keep_requests
    from mmengine.replay.watcher import NAMES

    recording = read_recording(folder, kind if kind in NAMES else "any", deadline)
    if recording is None or kind not in (*NAMES, "any"):
        raise LogError(_no_failure(folder, kind, recording))
    first = recording.failure
    recording.minimize(
        lambda kept, tried: progress(Progress("leaving out requests", tried, kept, 0, first.step))
    )
    small = keep_requests(script, recording.kept)
    test = reproduce(small, recording.failure, RecordedProbe(recording), out, len(script.requests))
    counts = (len(script.requests), recording.tried)
    return _Result(first, recording.failure, small, *counts, recording.is_cut_short, test, is_recorded=True)


def _no_failure(folder: Path, kind: str, recording: "Recording | None") -> str:
    """Return the error text for a log without a failure of `kind`, in this build and in the log's recorded
    decisions.
    """
    from mmengine.replay import open_log

    started = open_log(folder).started
    text = f"{_NOTHING} with --failing {kind}"
    if recording is not None:
        rule = recording.failure.kind
        return f"{text}; the log's own decisions break a rule: minimize with --failing {rule}"
    wrote = f"mmengine {started.engine_version}, decision rules {started.decision_version}"
    return (
        f"{text}, and the log's own decisions break no rule: this build does not have the bug; run the build "
        f"that wrote the log ({wrote}), or name it with --against"
    )


@contextmanager
def _probe(
    folder: Path, failing: str, against: str, own: str, deadline: "Deadline", main: "Main"
) -> "Iterator[Probe]":
    """Yield the probe, which tests whether a candidate log fails."""
    from mmengine.replay.minimize.build_probe import BuildProbe
    from mmengine.replay.minimize.command_probe import CommandProbe
    from mmengine.replay.minimize.failures import KINDS
    from mmengine.replay.minimize.probe import KindProbe

    if own and not against:
        from mmengine.replay.hosted.engines import plugin_module

        yield plugin_module("minimizing", own).VllmProbe(own, folder, failing or "any", deadline)
        return
    if bool(failing) == bool(against) or own:
        raise typer.BadParameter("give exactly one", param_hint="--failing / --against / --with")
    if against:
        with BuildProbe(against, deadline) as other:
            yield other
    else:
        yield KindProbe(failing, deadline) if failing in KINDS else CommandProbe(failing, deadline, main)


def _main_of(context: typer.Context) -> "Main":
    """Return a function that runs the current program with other arguments and returns its exit code."""
    program = context.find_root().command

    def main(arguments: list[str]) -> int:
        try:
            program.main(arguments, prog_name="mmengine")
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        except MMEngineError as error:
            print(f"mmengine: {error}", file=sys.stderr)
            return code_of(error)
        return 0

    return main


@dataclass(frozen=True)
class _Result:
    """A minimized log. `first`: the failure of the whole log. `is_recorded`: whether the failure is in the
    log's recorded decisions.
    """

    first: "Failure"
    failure: "Failure"
    best: "Script"
    num_before: int
    num_tried: int
    is_cut_short: bool
    test: Path
    is_recorded: bool = False


def _print(result: _Result, deadline: "Deadline", json_output: bool) -> None:
    seconds = deadline.passed()
    after = len(result.best.requests)
    tokens = sum(len(event.prompt) // 4 for event in result.best.requests)
    if json_output:
        print_json(
            {
                "failure": result.failure.kind,
                "what": result.failure.what,
                "step": result.failure.step,
                "requests_before": result.num_before,
                "requests": after,
                "prompt_tokens": tokens,
                "candidates": result.num_tried,
                "seconds": round(seconds, 1),
                "cut_short": result.is_cut_short,
                "recorded": result.is_recorded,
                "log": str(result.test.with_name("log")),
                "test": str(result.test),
            }
        )
        return
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    lines = [
        f"the log fails: {printable(str(result.first), 1000)}",
        f"{result.num_before} requests became {after}, with {tokens} prompt tokens",
        f"the failure is now {printable(str(result.failure), 1000)}",
        f"{result.num_tried} candidates in {seconds:.1f} s",
        f"wrote {result.test.with_name('log')} and {result.test}",
    ]
    if result.is_recorded:
        lines.append(
            "this build does not break the rule, so requests were left out of the log's recorded decisions; "
            "the test passes here, and serves the requests again with any build"
        )
    for line in lines:
        console.print(line, markup=False)
    if result.is_cut_short:
        text = f"the limit of {deadline.seconds:g} seconds passed before the search ended; raise --seconds"
        console.print(text, markup=False)


@contextmanager
def _progress() -> Iterator[Callable[["Progress"], None]]:
    with progress_bar("reading the log", 1, count="") as bar:
        whole = 0

        def show(now: "Progress") -> None:
            nonlocal whole
            whole = whole or now.num_requests
            text = f"{now.phase}: {now.num_requests} requests, {now.num_tokens} tokens, {now.tried} tried"
            bar.update(whole - now.num_requests, whole, text)

        yield show
