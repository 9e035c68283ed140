"""Sections of the throughput benchmark with the included checkpoint: mixed requests, and decoding alone."""

from collections.abc import Callable
from statistics import fmean

from benchmarks.common.engine_runner import EngineRunner
from benchmarks.common.measure import Rounds, Sample
from benchmarks.common.reference import (
    Reference,
    TokenClock,
    describe_mismatches,
    make_inputs,
    padded_batches,
)
from benchmarks.common.report import Part, Table, Target
from benchmarks.common.workload import Ask, count_shared, long_answers

BATCH = 16
ONE_BY_ONE, PADDED = "transformers one by one", f"transformers in padded batches of {BATCH}"
OURS, LOGGED = "mmengine all at once", "mmengine, event log on disk"
COLUMNS = ("", "wall s", "CPU s", "tokens/s", "wall ratio", "CPU ratio", "equal tokens")
Tick = Callable[[], None]


class MixedRun:
    """Measures mixed requests in mmengine, and in transformers one by one and in padded batches."""

    title = "mixed requests"

    def __init__(
        self, ours: EngineRunner, logged: EngineRunner, reference: Reference, asks: list[Ask], rounds: int
    ) -> None:
        self._asks, self._rounds, self._reference = asks, rounds, reference
        self._inputs = [make_inputs([ask.prepared]) for ask in asks]
        self._batches = padded_batches(asks, BATCH)
        self._variants = {
            OURS: lambda: ours.answer(asks),
            LOGGED: lambda: logged.answer(asks),
            ONE_BY_ONE: self._one_by_one,
            PADDED: self._padded,
        }
        self.num_ticks = rounds * len(self._variants)

    def _one_by_one(self) -> list[list[int]]:
        pairs = zip(self._inputs, self._asks, strict=True)
        return [self._reference.generate(inputs, ask.num_new)[0] for inputs, ask in pairs]

    def _padded(self) -> list[list[int]]:
        answers: list[list[int]] = [[] for _ in self._asks]
        for places, inputs, num_new in self._batches:
            for place, tokens in zip(places, self._reference.generate(inputs, num_new), strict=True):
                answers[place] = tokens[: self._asks[place].num_new]
        return answers

    def run(self, tick: Tick) -> Part:
        rounds = Rounds().run(self._variants, self._rounds, tick)
        wanted, total = rounds.results[ONE_BY_ONE], sum(ask.num_new for ask in self._asks)
        kinds = [ask.kind for ask in self._asks]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
        table = Table(f"{len(self._asks)} mixed requests ({counts}), {total} new tokens", COLUMNS)
        for name in self._variants:
            equal = sum(got == want for got, want in zip(rounds.results[name], wanted, strict=True))
            table.rows.append(
                (
                    name,
                    f"{rounds.wall(name):.2f}",
                    f"{rounds.cpu(name):.2f}",
                    f"{total / rounds.wall(name):.0f}",
                    f"{rounds.wall(ONE_BY_ONE) / rounds.wall(name):.2f}",
                    f"{rounds.cpu(ONE_BY_ONE) / rounds.cpu(name):.2f}",
                    f"{equal} of {len(wanted)}",
                )
            )
        shared, places = count_shared(self._asks)
        table.notes.append(
            f"{shared} of {places} image places show a picture that other requests show too. "
            f"Medians of {self._rounds} round(s), in which all variants take turns; on a busy machine use "
            "the CPU ratio. Both sides get prepared ids and pixels; the clock includes the vision pass on "
            "both sides, and mmengine's texts and event log. Padded batches are sorted by answer length, "
            "which wastes the fewest tokens. Caches are cold in every run. The end of sequence is suppressed "
            "on both sides, so answers run past their natural end. transformers uses its defaults, SDPA and "
            "a growing cache."
        )
        table.notes += describe_mismatches(self._reference, kinds, self._inputs, rounds.results[OURS], wanted)
        count, ours = len(self._asks), rounds.wall(OURS)
        return Part(
            [table],
            [
                Target(f"mixed_{count}_vs_one_by_one", rounds.wall(ONE_BY_ONE) / ours, 4, 6),
                Target(f"mixed_{count}_vs_padded_{BATCH}", rounds.wall(PADDED) / ours, 2, 3),
            ],
        )


class DecodeRuns:
    """Measures decoding alone, with one row and with a batch."""

    title = "decode"

    def __init__(self, ours: EngineRunner, reference: Reference, num_new: int, rounds: int) -> None:
        self._ours, self._reference = ours, reference
        self._num_new, self._rounds = num_new, rounds
        self._asks = {size: long_answers(ours.engine.processor, size, num_new) for size in (1, BATCH)}
        self._inputs = {
            size: make_inputs([ask.prepared for ask in asks]) for size, asks in self._asks.items()
        }
        self._steps: dict[tuple[str, int], list[Sample]] = {}  # (engine, rows) -> each run's mean step time
        self.num_ticks = 4 * rounds

    def run(self, tick: Tick) -> Part:
        for size in self._asks:
            self._steps |= {("mmengine", size): [], ("transformers", size): []}
            variants = {
                "mmengine": lambda size=size: self._our_steps(size),
                "transformers": lambda size=size: self._their_steps(size),
            }
            Rounds().run(variants, self._rounds, tick)
        table = Table(
            "Decode only",
            ("rows", "mmengine ms/step", "transformers ms/step", "mmengine tokens/s", "transformers tokens/s",
             "wall ratio", "CPU ratio"),
            notes=[
                "Steps after all rows have their first token and before any row ends. transformers: the time "
                "between the first and the last token of one left-padded `generate`. A run's figure is its "
                "mean step; each side's best run counts, since the machine disturbed it least."
            ],
        )  # fmt: skip
        table.rows = [self._row(str(size), size, size) for size in self._asks]
        table.rows.append(self._row(f"{BATCH}, transformers 1", BATCH, 1))
        return Part(
            [table],
            [
                Target("decode_batch_1", self._ratio(1, 1), 1.3),
                Target(f"decode_{BATCH}_rows_vs_one_by_one", self._ratio(BATCH, 1), 3),
                Target(f"decode_{BATCH}_rows_vs_padded_{BATCH}", self._ratio(BATCH, BATCH), 3),
            ],
        )

    def _our_steps(self, size: int) -> None:
        running = self._ours.begin(self._asks[size])
        running.start()
        self._steps["mmengine", size].append(_mean(running.steps(self._num_new)))
        running.finish()

    def _their_steps(self, size: int) -> None:
        clock = TokenClock()
        self._reference.generate(self._inputs[size], self._num_new, clock)
        self._steps["transformers", size].append(_mean(clock.samples))

    def _best(self, side: str, size: int) -> Sample:
        steps = self._steps[side, size]
        return Sample(min(step.wall for step in steps), min(step.cpu for step in steps))

    def _ratio(self, mine: int, theirs: int) -> float:
        """Return mmengine's tokens per second with `mine` rows / transformers' with `theirs` rows."""
        ours, other = self._best("mmengine", mine), self._best("transformers", theirs)
        return (mine / ours.wall) / (theirs / other.wall)

    def _row(self, name: str, mine: int, theirs: int) -> tuple[str, ...]:
        ours, other = self._best("mmengine", mine), self._best("transformers", theirs)
        cpu_ratio = (mine / ours.cpu) / (theirs / other.cpu)
        return (
            name,
            f"{ours.wall * 1e3:.2f}",
            f"{other.wall * 1e3:.2f}",
            f"{mine / ours.wall:.0f}",
            f"{theirs / other.wall:.0f}",
            f"{self._ratio(mine, theirs):.2f}",
            f"{cpu_ratio:.2f}",
        )


def _mean(samples: list[Sample]) -> Sample:
    return Sample(fmean(each.wall for each in samples), fmean(each.cpu for each in samples))
