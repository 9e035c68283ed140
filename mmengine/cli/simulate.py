"""`mmengine simulate`: the real scheduler on a workload from a file, without a model."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import typer

from mmengine.errors import ConfigError

if TYPE_CHECKING:  # heavy: loaded when a command runs
    from mmengine.simulation import Settings, Workload
    from mmengine.simulation.records import Recorder

HELP = (
    "Run the scheduler on a scenario, a file of requests or a public trace, with a model that is "
    "arithmetic.\n\nPrints latencies under a cost model, preemptions, hit rates and memory in use.\n\n"
    "[bold]Examples[/bold]\n\n  mmengine simulate scenario.json --compat vllm --decisions out.jsonl\n\n"
    "  mmengine simulate trace.csv --format azure --limit 1000 --plot run.png"
)
Format = Literal["auto", "scenario", "azure", "mooncake", "servegen"]


def simulate(
    workload: Annotated[
        Path, typer.Argument(help="A scenario (.json), requests or a trace.", show_default=False)
    ],
    config: Annotated[
        Path | None, typer.Option(help="Settings as one JSON object; a scenario brings its own.")
    ] = None,
    compat: Annotated[
        Literal["vllm"] | None, typer.Option(help="Decide as vLLM 0.33 does where our defaults differ.")
    ] = None,
    decisions: Annotated[Path | None, typer.Option(help="Write one record a step here (.jsonl).")] = None,
    log: Annotated[Path | None, typer.Option(help="Write the event log into this folder.")] = None,
    form: Annotated[Format, typer.Option("--format", help="What the workload file is.")] = "auto",
    limit: Annotated[int | None, typer.Option(min=1, help="Take only so many requests.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the run over time into this picture.")] = None,
) -> None:
    from mmengine.cli.pictures import check_picture  # lazy, like all below: help needs none of it
    from mmengine.cli.simulate_table import print_report
    from mmengine.events.log import LogWriter
    from mmengine.simulation import Driver, read_settings
    from mmengine.simulation.bounded_files import read_object
    from mmengine.simulation.plot import draw
    from mmengine.simulation.workload_files import load_workload

    if plot is not None:
        check_picture(plot, "--plot")
    work = load_workload(workload, form, limit)
    settings = read_settings(
        {**work.settings, **(read_object(config) if config is not None else {})}, work, compat or ""
    )
    actual: list[dict[str, Any]] = []
    with ExitStack() as stack:
        out = stack.enter_context(decisions.open("w")) if decisions is not None else None
        sink = None
        if log is not None:
            sink = LogWriter(log, wall_ns=lambda: 0)  # the same run gives the same bytes
            stack.callback(sink.close)
        progress = stack.enter_context(_progress(len(work.requests)))
        recorder = _recorder(work, settings, out, actual)
        report = Driver(work, settings, recorder=recorder, log=sink, progress=progress).run()
    print_report(work, settings, report, actual)
    if plot is not None:
        draw(report.meter.timeline, settings.config, work.name, plot)


def _recorder(
    work: "Workload", settings: "Settings", out: TextIO | None, actual: list[dict[str, Any]]
) -> "Recorder | None":
    """Records go to the file, and where the scenario says what it expects into `actual`; nobody makes
    them when nobody wants them. Only a scenario names the queues, other files get their config first."""
    from mmengine.simulation.records import Recorder, record_line  # lazy: numpy

    if out is None and work.expect is None:
        return None
    if settings.config.max_in_flight > 1:
        raise ConfigError(
            "records of decisions have one step after the other; with max_in_flight above 1 leave out "
            "--decisions, or use --log"
        )
    is_scenario = work.events is not None

    def write(record: dict[str, Any]) -> None:
        if out is not None:
            out.write(record_line(record))
        if work.expect is not None:
            actual.append(record)

    if out is not None and not is_scenario:
        out.write(record_line({"config": settings.config.as_dict()}))
    return Recorder(write, work.media_names, queues=is_scenario)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console  # lazy
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("simulating", total=total)
        yield lambda ended: progress.update(task, completed=ended)
