"""Summarizes a load test's results: rates, latencies, and the share of calls within the latency limits."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mmengine.server.bench.streamed_call import Call

PERCENTILES = (50, 90, 99)


class Limits(NamedTuple):
    """Latency limits in milliseconds: the time to first token, and the mean time per later token. 0 means no
    limit. A call is good if it meets both limits.
    """

    ttft_ms: float = 0.0
    tpot_ms: float = 0.0

    def are_met(self, call: Call) -> bool:
        slow_first = self.ttft_ms and 1e3 * call.ttft_s > self.ttft_ms
        return not slow_first and not (self.tpot_ms and 1e3 * call.tpot_s > self.tpot_ms)


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """A load test's summarized results.

    The fields whose names end in `_ms` map "mean", "p50", "p90" and "p99" to milliseconds. Rates are per
    second. `goodput`: the number of calls per second that are within the limits. `good_share`: the share of
    calls within the limits. Without limits, `goodput` and `good_share` are None.
    """

    num_calls: int
    num_failed: int
    errors: dict[str, int]
    seconds: float
    prompt_tokens: int
    output_tokens: int
    calls_rate: float
    output_rate: float
    goodput: float | None
    good_share: float | None
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    itl_ms: dict[str, float]
    e2e_ms: dict[str, float]


def summary_of(calls: Sequence[Call], seconds: float, limits: Limits) -> Summary:
    whole = [call for call in calls if not call.error]
    good = sum(map(limits.are_met, whole)) if any(limits) else None
    output = sum(call.num_tokens for call in whole)
    return Summary(
        num_calls=len(calls),
        num_failed=len(calls) - len(whole),
        errors=dict(Counter(call.error for call in calls if call.error).most_common(8)),
        seconds=seconds,
        prompt_tokens=sum(call.num_prompt for call in whole),
        output_tokens=output,
        calls_rate=len(whole) / seconds,
        output_rate=output / seconds,
        goodput=None if good is None else good / seconds,
        good_share=None if good is None else good / max(len(calls), 1),
        ttft_ms=_spread([call.ttft_s for call in whole]),
        tpot_ms=_spread([call.tpot_s for call in whole if call.num_tokens > 1]),
        itl_ms=_spread(gaps(whole)),
        e2e_ms=_spread([call.over - call.sent for call in whole]),
    )


def gaps(calls: Sequence[Call]) -> list[float]:
    """Return the seconds between consecutive events within each answer, in a single list for all answers."""
    return [after - before for call in calls for before, after in zip(call.at, call.at[1:], strict=False)]


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    found = 1e3 * np.array(seconds)
    ranks = np.percentile(found, PERCENTILES)
    return {
        "mean": float(found.mean()),
        **{f"p{p}": float(v) for p, v in zip(PERCENTILES, ranks, strict=True)},
    }


def rows_of(summary: Summary) -> list[tuple[str, str]]:
    """Return the rows of a table that shows the summary, as pairs of name and text."""
    failed = f", {summary.num_failed} failed" if summary.num_failed else ""
    rows = [
        ("calls", f"{summary.num_calls}{failed}, in {summary.seconds:.1f} s"),
        *(("", f"{count} times: {error}") for error, count in summary.errors.items()),
        ("calls per second", f"{summary.calls_rate:.2f}"),
        ("output tokens per second", f"{summary.output_rate:.1f}"),
        ("tokens", f"{summary.prompt_tokens} input, {summary.output_tokens} output"),
    ]
    if summary.goodput is not None and summary.good_share is not None:
        rows.append(
            ("goodput: calls per second", f"{summary.goodput:.2f} ({100 * summary.good_share:.0f} %)")
        )
    times = {
        "time to first token": summary.ttft_ms,
        "time per output token": summary.tpot_ms,
        "between events": summary.itl_ms,
        "whole call": summary.e2e_ms,
    }
    for name, spread in times.items():
        values = ", ".join(f"{rank} {value:.1f}" for rank, value in spread.items())
        rows.append((f"{name}, ms", values or "none"))
    return rows


def markdown(title: str, summary: Summary) -> str:
    lines = [f"# {title}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {text} |" for name, text in rows_of(summary)]
    return "\n".join(lines) + "\n"


def draw(title: str, calls: Sequence[Call], limits: Limits, path: Path) -> None:
    """Draw four charts and write them to `path`. Two charts show the distributions of the time to first token
    and of the gaps between events. The other two show each call's time to first token and time per output
    token, against the call's start time.
    """
    from matplotlib.figure import Figure  # Imported here because no other function needs matplotlib.

    whole = [call for call in calls if not call.error]
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    figure.suptitle(title)
    (first, between), (over_first, over_tokens) = figure.subplots(2, 2)
    shares = (
        (first, [call.ttft_s for call in whole], limits.ttft_ms, "time to first token"),
        (between, gaps(whole), 0.0, "between events"),
    )
    for axes, seconds, limit, name in shares:
        found = np.sort(1e3 * np.array(seconds))
        axes.step(found, np.arange(1, len(found) + 1) / max(len(found), 1), where="post")
        axes.set(xlabel=f"{name}, ms", ylabel="share", ylim=(0, 1.02))
        axes.set_xlim(left=0)
        if limit:
            axes.axvline(limit, color="tab:red", linestyle="--", label=f"limit {limit:g} ms")
            axes.legend()
    begun = min((call.sent for call in calls), default=0.0)
    over = (
        (over_first, [call.ttft_s for call in whole], limits.ttft_ms, "time to first token, ms"),
        (over_tokens, [call.tpot_s for call in whole], limits.tpot_ms, "time per output token, ms"),
    )
    for axes, seconds, limit, name in over:
        axes.plot([call.sent - begun for call in whole], 1e3 * np.array(seconds), ".")
        axes.set(xlabel="sent after, s", ylabel=name)
        axes.set_ylim(bottom=0)
        if limit:
            axes.axhline(limit, color="tab:red", linestyle="--")
    figure.savefig(path, dpi=120)
