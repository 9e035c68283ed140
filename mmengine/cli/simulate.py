"""`mmengine simulate`: runs the engine's scheduler on a workload from a file, without a model."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import typer

from mmengine.cli.progress_bar import progress_bar
from mmengine.errors import ConfigError

if TYPE_CHECKING:  # Heavy; loaded when a command runs.
    from mmengine.simulation import Settings, Workload
    from mmengine.simulation.records import Recorder

HELP = (
    "Run the scheduler on a scenario, a file of requests or a public trace, with an arithmetic model.\n\n"
    "Prints latencies under a cost model, preemptions, hit rates and memory in use.\n\n"
    "[bold]Examples[/bold]\n\n  mmengine simulate scenario.json --compat vllm --decisions out.jsonl\n\n"
    "  mmengine simulate trace.csv --format azure --limit 1000 --plot run.png"
)
Format = Literal["auto", "scenario", "azure", "mooncake", "servegen"]


def simulate(
    workload: Annotated[
        Path, typer.Argument(help="Scenario (.json), requests or a trace.", show_default=False)
    ],
    config: Annotated[
        Path | None, typer.Option(help="File with a JSON object of settings, added to a scenario's own.")
    ] = None,
    compat: Annotated[
        Literal["vllm", "vllm-0.32", "vllm-0.33"] | None,
        typer.Option(help="Use vLLM's decisions where our defaults differ (vllm: 0.33 without hangs)."),
    ] = None,
    decisions: Annotated[
        Path | None, typer.Option(help="Output file for a record per step (.jsonl).")
    ] = None,
    log: Annotated[Path | None, typer.Option(help="Folder for the event log.")] = None,
    form: Annotated[Format, typer.Option("--format", help="Format of the workload file.")] = "auto",
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of requests.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Output file for a picture of the run over time.")] = None,
) -> None:
    from mmengine.cli.pictures import check_picture  # Lazy, like the imports below, to make --help fast.
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
            # Without wall-clock times, equal runs write equal bytes.
            sink = LogWriter(log, wall_ns=lambda: 0)
            stack.callback(sink.close)
        bar = stack.enter_context(progress_bar("simulating", len(work.requests)))
        recorder = _recorder(work, settings, out, actual)
        report = Driver(work, settings, recorder=recorder, log=sink, progress=bar.update).run()
    print_report(work, settings, report, actual)
    if plot is not None:
        draw(report.meter.timeline, settings.config, work.name, plot)


def _recorder(
    work: "Workload", settings: "Settings", out: TextIO | None, actual: list[dict[str, Any]]
) -> "Recorder | None":
    """Return a recorder of decisions, or None if no records are needed.

    Records are written to `out`. If the scenario has expected records, actual records are also appended to
    `actual`. Only a scenario's records contain the queues. For other workloads, `out` begins with the config.
    """
    from mmengine.simulation.records import Recorder, record_line  # Lazy: numpy

    if out is None and work.expect is None:
        return None
    if settings.config.max_in_flight > 1:
        raise ConfigError("decision records need max_in_flight 1; leave --decisions out, or use --log")
    is_scenario = work.events is not None

    def write(record: dict[str, Any]) -> None:
        if out is not None:
            out.write(record_line(record))
        if work.expect is not None:
            actual.append(record)

    if out is not None and not is_scenario:
        out.write(record_line({"config": settings.config.as_dict()}))
    return Recorder(write, work.media_names, queues=is_scenario)
