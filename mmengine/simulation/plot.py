"""Draws a simulation's load over time as curves in an image file."""

from pathlib import Path

import numpy as np

from mmengine.config import EngineConfig
from mmengine.simulation.meter import Timeline

MAX_POINTS = 4000  # maximum number of points in a curve


def draw(timeline: Timeline, config: EngineConfig, title: str, path: Path) -> None:
    """Draw running and waiting requests, memory use, and use of the token budget, over simulated time.

    A run with more than 4,000 steps is divided into at most 4,000 spans. A curve shows the maximum in each
    span.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # only a plot needs it
    from matplotlib.figure import Figure

    seconds = np.array(timeline.time_ns, np.float64) / 1e9
    span = max(1, -(-len(seconds) // MAX_POINTS))
    starts = np.arange(0, len(seconds), span)

    def points(values: "np.typing.ArrayLike", whole: int = 0) -> np.ndarray:
        most = np.maximum.reduceat(np.array(values, np.float64), starts)
        return 100 * most / whole if whole else most

    curves = (
        ("requests", (("running", points(timeline.running)), ("waiting", points(timeline.waiting)))),
        (
            "% of memory",
            (
                ("KV blocks", points(timeline.kv_blocks, config.num_blocks - 1)),
                ("encoder cache", points(timeline.encoder, config.encoder_cache_size)),
            ),
        ),
        ("% of token budget", (("scheduled", points(timeline.tokens, config.token_budget)),)),
    )
    figure = Figure(figsize=(10, 8), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (label, lines) in zip(figure.subplots(len(curves), 1, sharex=True), curves, strict=True):
        for name, values in lines:
            axes.plot(seconds[starts], values, label=name, linewidth=0.9)
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper right")
        axes.grid(alpha=0.3)
    axes.set_xlabel("simulated seconds")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
