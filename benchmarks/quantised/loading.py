"""Measure the memory and the time to load a folder, for the benchmark `quantised`. The last line of the
output is JSON with bytes and seconds.

    python -m benchmarks quantised.loading FOLDER --quantize int8
"""

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.common.measure import use_threads
from benchmarks.cpu.day_one_side import Peaks, status


def main(
    folder: Annotated[Path, typer.Argument(help="Checkpoint folder.")],
    quantize: Annotated[str, typer.Option(help="Format to quantise to: none, int8 or fp8.")] = "none",
) -> None:
    """Load the folder in bfloat16."""
    use_threads(2)
    import torch

    from mmengine import EngineConfig
    from mmengine.models.registry import plugin_for
    from mmengine.native.library import load

    load()
    torch.ones(8) @ torch.ones(8)  # start torch's threads
    plugin, quantized = plugin_for(folder), EngineConfig(quantize=quantize).quantize
    import mmengine.models.network  # noqa: F401 (imported here, so that the measurement excludes this import)

    before, peaks, begun = status("RssAnon"), Peaks(), time.perf_counter()
    network = plugin.load_model(folder, device="cpu", dtype="bfloat16", quantize=quantized)
    took = time.perf_counter() - begun
    peaks.end()
    print(json.dumps({"weights": peaks.private - before, "s": took, "held": network.spec.weights_held}))


if __name__ == "__main__":
    typer.run(main)
