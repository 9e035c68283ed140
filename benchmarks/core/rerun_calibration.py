"""Measures how well `mmengine log rerun`, a simulation from a log, predicts real latencies.

    python -m benchmarks rerun_calibration [--seconds N] [--folder DIR] [--loads NAME ...]

The engine serves the included checkpoint on a CPU under five loads. Each load has its own log, and requests
arrive at random times. The log's odd slices form one half, its even slices the other. A simulation with the
step times of one half predicts the latencies in the other half, and the benchmark compares them with the
logged latencies (mmengine/replay/rerun/calibration.py).

On a busy machine, use `--clock cpu`. The log's clock then counts this process's CPU time.
"""

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path
from unittest import mock

from benchmarks.common.report import cpu_model
from mmengine import AsyncEngine, EngineConfig, SamplingParams
from mmengine.core.engine import EngineCore
from mmengine.replay.rerun.rerun import NoPrediction, Rerun, rerun

WORDS = ("red", "green", "blue", "square", "circle", "triangle", "left", "right", "above", "below", "large")
SIZES = {"max_num_seqs": 8, "token_budget": 128, "max_model_len": 512, "num_blocks": 129, "num_threads": 1}
# For each load: the request rate relative to the engine's maximum, the number of requests that arrive
# together, the share of requests with an image, and engine settings.
LOADS = {
    "burst": (0.5, 6, 0.0, {}),
    "steady": (0.5, 1, 0.0, {}),
    "overload": (1.6, 1, 0.0, {}),
    "drafts": (0.5, 1, 0.0, {"spec": "ngram"}),
    "images": (0.4, 1, 1.0, {}),
}
# A longer overload would exceed the limit on open requests.
MAX_SECONDS = {"overload": 20.0}
MAX_TOKENS = (8, 48)
MIN_SLEEP_S = 0.0005  # Shortest sleep between two readings of CpuClock.


def messages(rng: random.Random, has_image: bool) -> list[dict]:
    text = " ".join(rng.choice(WORDS) for _ in range(rng.randint(4, 60)))
    content: list[dict] = [{"type": "text", "text": f"Where is the {text}?"}]
    if has_image:
        content.insert(0, {"type": "image", "image": picture(rng)})
    return [{"role": "user", "content": content}]


def picture(rng: random.Random):
    from PIL import Image

    side = rng.choice((64, 96, 128))
    return Image.new("RGB", (side, side), tuple(rng.randrange(256) for _ in range(3)))


class CpuClock:
    """A clock in ns that counts this process's CPU time. While no request is open, `wait_until` moves the
    clock forward without sleeping.
    """

    def __init__(self) -> None:
        self._idle_ns = 0

    def __call__(self) -> int:
        return time.process_time_ns() + self._idle_ns

    async def wait_until(self, due_ns: int, tasks: list[asyncio.Task]) -> None:
        while (left := due_ns - self()) > 0:
            if all(task.done() for task in tasks):
                self._idle_ns += left
            else:
                await asyncio.sleep(max(left / 1e9, MIN_SLEEP_S))


class WallClock:
    """The clock that the engine uses by default, in ns."""

    def __call__(self) -> int:
        return time.monotonic_ns()

    async def wait_until(self, due_ns: int, tasks: list[asyncio.Task]) -> None:
        await asyncio.sleep(max(0.0, due_ns - self()) / 1e9)


CLOCKS = {"wall": WallClock, "cpu": CpuClock}


async def answer(engine: AsyncEngine, rng: random.Random, has_image: bool) -> None:
    sampling = SamplingParams(max_tokens=rng.randint(*MAX_TOKENS), ignore_eos=True)
    async for _ in engine.stream(messages(rng, has_image), sampling):
        pass


async def serve(log: Path, load: str, seconds: float, capacity: float, clock: CpuClock | WallClock) -> float:
    """Serve a load's requests, write the log, and return the answers per second.

    `capacity`: the engine's maximum answers per second. With capacity 0, the function measures this maximum:
    40 requests arrive together, and no log is written. `clock`: the clock for arrivals and for the log.
    """
    share, group, images, settings = LOADS[load]
    rng = random.Random(load)
    config = EngineConfig(**{**SIZES, **settings})
    options = {"log": log} if capacity else {}
    defaults = EngineCore.__init__.__kwdefaults__
    with mock.patch.dict(defaults, clock=clock):
        engine = AsyncEngine(config=config, device="cpu", **options)
    async with engine:
        await answer(engine, rng, images > 0)  # warms up
        begin, tasks, due = clock(), [], 0.0
        while due < seconds:
            await clock.wait_until(begin + round(due * 1e9), tasks)
            for _ in range(group if capacity else 1):
                tasks.append(asyncio.create_task(answer(engine, rng, rng.random() < images)))
            due += rng.expovariate(capacity * share / group) if capacity else 0.0
            if not capacity and len(tasks) >= 40:
                break
        await asyncio.gather(*tasks)
        return len(tasks) * 1e9 / (clock() - begin)


def rows(load: str, result: Rerun) -> list[str]:
    return [
        f"| {load} | {row.half} | {row.name.replace('_', ' ')} | {row.logged:.1f} | {row.simulated:.1f} "
        f"| {100 * row.error:+.1f} % | {100 * row.bound:.1f} % | {100 * row.difference:.1f} % "
        f"| {'yes' if row.is_good else 'no'} |"
        for row in result.calibration.rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--folder", type=Path, help="folder for the logs, or with logs of an earlier run")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="the clock of new logs (default wall)"
    )
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS), help="default: all")
    options = parser.parse_args()
    clock = CLOCKS[options.clock]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        summary, table = [], []
        for load in options.loads:
            log = folder / load
            if not log.exists():
                seconds = min(options.seconds, MAX_SECONDS.get(load, options.seconds))
                capacity = asyncio.run(serve(log, load, seconds, 0.0, clock))
                asyncio.run(serve(log, load, seconds, capacity, clock))
            exact = rerun(log, {})
            try:
                result = rerun(log, {}, exact=False)
            except NoPrediction as error:
                summary.append(f"| {load} | | {'yes' if exact.is_exact else 'no'} | no: {error} |")
                continue
            good = sum(row.is_good for row in result.calibration.rows)
            steps = f"{result.logged.numbers['steps']:,.0f}"
            said = "yes" if not result.refusal else f"no: {result.refusal}"
            within = f"{good} of {len(result.calibration.rows)}"
            summary.append(f"| {load} | {steps} | {'yes' if exact.is_exact else 'no'} | {within} | {said} |")
            table += rows(load, result)
        print(f"{cpu_model()}, one thread\n")
        print("| load | steps | decisions reproduced | latencies within the bound | answered |")
        print("|---|---:|---|---|---|", *summary, sep="\n")
        print("\n| load | half | ms | logged | predicted | error | bound | halves differ | within |")
        print("|---|---|---|---:|---:|---:|---:|---:|---|", *table, sep="\n")


if __name__ == "__main__":
    main()
