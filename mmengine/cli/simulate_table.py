"""Prints the results of `mmengine simulate` as a table."""

from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mmengine.simulation import Settings, SimulationReport, Workload, first_difference
from mmengine.simulation.meter import Meter, Spread


def print_report(
    work: Workload, settings: Settings, report: SimulationReport, actual: list[dict[str, Any]]
) -> None:
    """Print the table, the refused and unfinished requests, and the first difference from the scenario's
    expected records.
    """
    console = Console(highlight=False, soft_wrap=True)
    console.print(_summary(work, settings, report))
    if report.num_refused:
        console.print(f"{report.num_refused} requests refused; the first: {report.refusal}", markup=False)
    if report.unfinished:
        names = ", ".join(report.unfinished[:8]) + (", …" if len(report.unfinished) > 8 else "")
        console.print(f"{len(report.unfinished)} requests unfinished at max_steps: {names}", markup=False)
    if work.expect is not None:
        difference = first_difference(work.expect, actual, open_ends=work.without_grammar)
        text = (
            f"differ from the scenario's expectation: {difference}"
            if difference
            else "as the scenario expects"
        )
        console.print(f"decisions: {text}", markup=False)


def _summary(work: Workload, settings: Settings, report: SimulationReport) -> Table:
    meter, config = report.meter, settings.config
    seconds = report.duration_ns / 1e9
    table = Table(title=escape(work.name), title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    ends = ", ".join(f"{count} {reason}" for reason, count in sorted(meter.ends.items()))
    table.add_row("requests", f"{len(work.requests)}: {ends or 'none ended'}")
    table.add_row("steps", f"{report.num_steps} in {seconds:.3f} simulated seconds")
    rate = meter.num_output_tokens / seconds if seconds else 0.0
    table.add_row(
        "tokens",
        f"{meter.num_output_tokens} generated ({rate:.0f}/s), {meter.num_scheduled_tokens} computed",
    )
    table.add_row("first token ms", _milliseconds(meter.ttft()))
    table.add_row("between tokens ms", _milliseconds(meter.inter_token()))
    table.add_row("end to end ms", _milliseconds(meter.end_to_end()))
    table.add_row("preemptions", str(meter.num_preemptions))
    table.add_row("prefix cache", _prefix_hits(meter))
    table.add_row("encoder cache", _encoder_hits(report))
    if names := work.adapters:
        worst = f"{meter.longest_ttft() / 1e6:.2f}"
        table.add_row(
            "adapters", f"{len(names)} over {config.max_loras} places; worst first token ms {worst}"
        )
    line = meter.timeline
    table.add_row("KV in use", _use(line.kv_blocks, config.num_blocks - 1, "blocks"))
    table.add_row("encoder in use", _use(line.encoder, config.encoder_cache_size, "embeddings"))
    table.add_row("token budget", _use(line.tokens, config.token_budget, "tokens"))
    return table


def _milliseconds(spread: Spread) -> str:
    return ", ".join(f"{name} {getattr(spread, name) / 1e6:.2f}" for name in ("p50", "p90", "p99"))


def _prefix_hits(meter: Meter) -> str:
    ran = meter.num_cached >= 0
    hits, prompt = int(meter.num_cached[ran].sum()), int(meter.num_prompt[ran].sum())
    return f"{_percent(hits, prompt)} of {prompt} prompt tokens hit"


def _encoder_hits(report: SimulationReport) -> str:
    hits, encoded = report.stats.num_encoder_hits, report.meter.num_encoded
    return f"{_percent(hits, hits + encoded)} of {hits + encoded} items hit"


def _use(values: Any, whole: int, unit: str) -> str:
    used = np.array(values, np.int64)
    if not len(used):
        return "none"
    return (
        f"mean {_percent(int(used.mean()), whole)}, most {_percent(int(used.max()), whole)} of {whole} {unit}"
    )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "0 %"
