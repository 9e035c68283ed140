"""Runs hostile requests beside normal streams. Measures the requests' outcomes and the streams' pauses."""

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mmengine.errors import MMEngineError
from mmengine.serve.async_engine.async_engine import AsyncEngine
from tests.serve.hostile_media import warm_up
from tests.serve.hostile_requests import hostile_request

HONEST = 8
AT_ONCE = 16  # concurrent hostile requests
QUESTIONS = ("What is a triangle?", "Count from one to ten.", "Name the colours.", "Tell me about circles.")


@dataclass
class Felt:
    """Measurements. `gaps`: seconds between a normal stream's outputs. `most_bytes`: peak memory, including
    the decoder processes' memory.
    """

    gaps: list[float] = field(default_factory=list)
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    bugs: list[str] = field(default_factory=list)
    first_bytes: int = 0
    most_bytes: int = 0
    longest: tuple[float, str] = (0.0, "")  # the slowest hostile request: (seconds, "seed kind")
    seconds: float = 0.0

    def summary(self) -> str:
        milliseconds = np.array(self.gaps) * 1e3
        p50, p99, p999 = np.percentile(milliseconds, (50, 99, 99.9))
        ends: Counter[str] = Counter()
        for (_, end), count in self.outcomes.items():
            ends[end] += count
        return (
            f"{sum(ends.values())} hostile requests in {self.seconds:.0f} s ({dict(ends)}), the longest "
            f"{self.longest[0]:.1f} s ({self.longest[1]}); {len(milliseconds)} gaps of honest tokens: p50 "
            f"{p50:.1f} ms, p99 {p99:.1f} ms, p99.9 {p999:.1f} ms, max {milliseconds.max():.1f} ms; memory "
            f"{self.first_bytes / 2**20:.0f} MiB at first, {self.most_bytes / 2**20:.0f} MiB at most"
        )


async def _honest(engine: AsyncEngine, number: int, felt: Felt) -> None:
    while True:
        question = QUESTIONS[number % len(QUESTIONS)]
        async with engine.stream(question, max_tokens=1000, ignore_eos=True, temperature=0.8) as stream:
            last = 0.0
            async for _ in stream:
                now = time.monotonic()
                if last:
                    felt.gaps.append(now - last)
                last = now


async def _hostile(engine: AsyncEngine, rng: random.Random, seeds: list[int], felt: Felt) -> None:
    while seeds:
        seed = seeds.pop()
        kind, messages = hostile_request(random.Random(seed))
        begun = time.monotonic()
        options = {"deadline_s": rng.choice((0.001, 0.05))} if rng.random() < 0.02 else {}
        try:
            if rng.random() < 0.03:  # a client that leaves
                async with engine.stream(messages, max_tokens=4, **options):
                    await asyncio.sleep(rng.random() * 0.1)
                end = "left"
            else:
                end = (await engine.generate(messages, max_tokens=4, **options)).finish_reason
        except MMEngineError as error:
            end = type(error).__name__
            if "the engine stopped" in str(error) or "its decoder failed" in str(error):
                felt.bugs.append(f"{seed} {kind}: {error}")
        except Exception as error:  # mmengine must raise only MMEngineError
            end = "bug"
            felt.bugs.append(f"{seed} {kind}: {type(error).__name__}: {error}")
        felt.outcomes[kind, end] += 1
        felt.longest = max(felt.longest, (time.monotonic() - begun, f"{seed} {kind}"))


def memory() -> int:
    """Return the bytes that this process and its children use."""
    own = Path("/proc/self")
    children = (own / "task").glob("*/children")
    pids = ["self", *(pid for one in children for pid in one.read_text().split())]
    return sum(_resident(pid) for pid in pids)


def _resident(pid: str) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except (OSError, IndexError):
        return 0  # the process has ended


async def _watch(felt: Felt) -> None:
    felt.first_bytes = memory()
    while True:
        felt.most_bytes = max(felt.most_bytes, memory())
        await asyncio.sleep(0.2)


async def attack(engine: AsyncEngine, seeds: list[int]) -> Felt:
    """Run the hostile requests for these seeds beside normal streams."""
    felt = Felt()
    warm_up()
    waiting = seeds[::-1]
    honest = [asyncio.create_task(_honest(engine, number, felt)) for number in range(HONEST)]
    while len(felt.gaps) < 10 * HONEST:  # until the normal streams run
        await asyncio.sleep(0.02)
    felt.gaps.clear()
    watch = asyncio.create_task(_watch(felt))
    begun = time.monotonic()
    await asyncio.gather(*(_hostile(engine, random.Random(k), waiting, felt) for k in range(AT_ONCE)))
    felt.seconds = time.monotonic() - begun
    for task in (*honest, watch):
        task.cancel()
    ended = await asyncio.gather(*honest, watch, return_exceptions=True)
    felt.bugs += [repr(one) for one in ended if not isinstance(one, asyncio.CancelledError)]
    return felt
