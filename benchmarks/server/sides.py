"""Compare servers that differ in a single setting. The servers (the sides) take turns under equal load.

Each round runs the sides in random order and then in reverse, so that a slowing machine affects all sides
equally.
"""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # Imported late, after the number of threads is set.
    from benchmarks.server.processes import Running

STREAMS = 16
PAUSE_S = 0.03  # Seconds between two turns, in which the log writes its last records.


def turns(rounds: int, sides: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield (round number, side) pairs. Warm-up rounds have negative numbers."""
    chance = random.Random(19)
    for number in range(-1, rounds):
        order = chance.sample(sides, len(sides))
        yield from ((number, side) for side in (*order, *reversed(order)))


def error_of(values: Sequence[float]) -> float:
    """Return half the width of a confidence interval for the median (level about two thirds). The interval's
    ends are order statistics, so no distribution is assumed.
    """
    found, reach = sorted(values), len(values) ** 0.5 / 2
    least, most = max(0.0, len(found) / 2 - reach), min(len(found) - 1.0, len(found) / 2 + reach)
    return (found[ceil(most)] - found[int(least)]) / 2


class Compared(NamedTuple):
    """The measurements of two servers. `seconds`, `cpu_s`: side -> a value per round. `num_tokens`: tokens
    per side and round.
    """

    num_tokens: int
    seconds: Mapping[str, list[float]]
    cpu_s: Mapping[str, list[float]]

    def lost(self) -> list[float]:
        """Return, per round, the second side's relative loss in tokens per second."""
        return [1 - first / second for first, second in zip(*self.seconds.values(), strict=True)]

    def rates_row(self, name: str) -> tuple[str, ...]:
        """Return a table row: the tokens per second of both sides, and the second side's loss in percent with
        its error.
        """
        rates = (f"{self.num_tokens / median(each):.1f}" for each in self.seconds.values())
        return (name, *rates, *_percent(self.lost()))

    def costs_row(self, name: str) -> tuple[str, ...]:
        """Return a table row: the CPU microseconds per token of both sides, and the second side's increase in
        percent with its error.
        """
        costs = (f"{1e6 * median(each) / self.num_tokens:.0f}" for each in self.cpu_s.values())
        more = [second / first - 1 for first, second in zip(*self.cpu_s.values(), strict=True)]
        return (name, *costs, *_percent(more))


def _percent(shares: list[float]) -> tuple[str, str]:
    return f"{100 * median(shares):.1f} %", f"{100 * error_of(shares):.1f} %"


def compared(
    servers: "Mapping[str, Running]", rounds: int, tokens: int, start: int = 0, is_response: bool = False
) -> Compared:
    """Measure both servers in turns, each with STREAMS concurrent streams of `tokens` tokens.

    The prompts have consecutive numbers after `start`. Choose `start` so that all prompts are new to both
    servers.
    """
    from benchmarks.server.clients import Load, load

    seconds, cpu_s = ({side: [0.0] * rounds for side in servers} for _ in range(2))
    for number, side in turns(rounds, list(servers)):
        start += STREAMS
        more = (("ignore_eos", True),)
        asked = Load(STREAMS, STREAMS, tokens, True, more, start=start, is_response=is_response)
        cpu, begun = servers[side].cpu_s, time.perf_counter()
        load(servers[side].port, asked)
        took = time.perf_counter() - begun
        time.sleep(PAUSE_S)
        if number >= 0:
            seconds[side][number] += took
            cpu_s[side][number] += servers[side].cpu_s - cpu
    return Compared(2 * STREAMS * tokens, seconds, cpu_s)


def num_prompts(rounds: int) -> int:
    """Return the number of prompts that `compared` sends in this many rounds."""
    return STREAMS * 4 * (rounds + 1)
