"""What is measured: mixed requests, decoding alone, many questions on one image, the engine's share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

from measure import Rounds, clocked
from ours import DecodeRun, Ours
from reference import Reference, TokenClock, make_inputs, padded_batches
from report import Table
from workload import Ask, long_answers, one_image

from mmengine_qwen3_vl.model import Qwen3VL

BATCH = 16
ONE_BY_ONE, PADDED = "transformers one by one", f"transformers in padded batches of {BATCH}"
OURS, LOGGED = "mmengine all at once", "mmengine, event log on disk"
COLUMNS = ("", "wall s", "CPU s", "tokens/s", "wall ratio", "CPU ratio", "equal tokens")
Tick = Callable[[], None]


class MixedRun:
    """Mixed requests: all at once, one by one, and in padded batches."""

    title = "mixed requests"

    def __init__(self, ours: Ours, logged: Ours, reference: Reference, asks: list[Ask], rounds: int) -> None:
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

    def run(self, tick: Tick) -> tuple[Table, float]:
        """The table, and how many times faster than one by one."""
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
        table.notes.append(
            f"Medians of {self._rounds} round(s), in which all variants run in turn; on a busy machine trust "
            "the CPU's ratio. Ids and pixels are ready before the clock starts on both sides; the vision "
            "pass is inside on both, and so are mmengine's texts and event log. Padded batches are sorted by "
            "tokens to make, so that few are made in vain. Caches are cold in every run. The end of sequence "
            "is suppressed on both sides, so answers run on past their natural end. transformers has its "
            "defaults, SDPA and a growing cache."
        )
        table.notes.extend(self._partings(rounds.results[OURS], wanted))
        return table, rounds.wall(ONE_BY_ONE) / rounds.wall(OURS)

    def _partings(self, got: list[list[int]], wanted: list[list[int]]) -> list[str]:
        notes = []
        for number, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
            if mine != theirs:
                place = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
                gap = self._reference.gap(self._inputs[number], len(theirs), place)
                notes.append(
                    f"Request {number} ({self._asks[number].kind}) parts from transformers at token {place} "
                    f"of {len(theirs)}, where transformers' two best logits are {gap:.1e} apart."
                )
        return notes


class DecodeRuns:
    """Decoding alone, at one batch size; gives the engine's share of a step as well."""

    title = "decode"

    def __init__(self, ours: Ours, reference: Reference, size: int, num_new: int, rounds: int) -> None:
        asks = long_answers(ours.engine.processor, size, num_new)
        inputs = make_inputs([ask.prepared for ask in asks])
        self._size, self._rounds = size, rounds
        self._runs: list[DecodeRun] = []
        self._clocks: list[TokenClock] = []
        self._variants = {
            OURS: lambda: self._runs.append(ours.decode(asks)),
            "transformers": lambda: self._clocks.append(_clocked_generate(reference, inputs, num_new)),
        }
        self.num_ticks = rounds * len(self._variants)

    def run(self, tick: Tick) -> tuple[tuple[str, ...], DecodeRun]:
        """A row of the table, and the steps of our best run."""
        Rounds().run(self._variants, self._rounds, tick)
        ours, best = min((sum(run.front) / len(run.front), place) for place, run in enumerate(self._runs))
        theirs = min(_per_step(clock.wall) for clock in self._clocks)
        ours_cpu = min(run.cpu / len(run.front) for run in self._runs)
        theirs_cpu = min(_per_step(clock.cpu) for clock in self._clocks)
        row = (
            str(self._size),
            f"{ours * 1e3:.2f}",
            f"{theirs * 1e3:.2f}",
            f"{self._size / ours:.0f}",
            f"{self._size / theirs:.0f}",
            f"{theirs / ours:.2f}",
            f"{theirs_cpu / ours_cpu:.2f}",
        )
        return row, self._runs[best]


def decode_table() -> Table:
    return Table(
        "Decode only",
        ("rows", "mmengine ms/step", "transformers ms/step", "mmengine tokens/s", "transformers tokens/s",
         "wall ratio", "CPU ratio"),
        notes=[
            "Steps after all rows have their first token and before any ends. transformers: the time between "
            "the first and the last token of one left-padded `generate`. A run's figure is its mean step; of "
            "each side the best of all runs counts, the one that the machine disturbed least."
        ],
    )  # fmt: skip


def share_table(runs: list[DecodeRun]) -> Table:
    """Where a decode step's time goes: medians over the steps of one run."""
    table = Table(
        "Engine share of a decode step",
        ("rows", "executor µs", "core µs", "front µs", "core share of the step"),
        notes=["core: EngineCore.step less the executor's time; front: Engine.step less EngineCore.step."],
    )
    for run in runs:
        core = median(whole - part for whole, part in zip(run.core, run.executor, strict=True))
        front = median(whole - part for whole, part in zip(run.front, run.core, strict=True))
        share = core / median(run.front)
        micro = [f"{seconds * 1e6:.0f}" for seconds in (median(run.executor), core, front)]
        table.rows.append((str(run.num_rows), *micro, f"{share:.1%}"))
    return table


class OneImageRun:
    """Many questions on one image: vision passes, time to first token, time of all."""

    title = "questions on one image"

    def __init__(self, ours: Ours, reference: Reference, count: int, longest: int, rounds: int) -> None:
        self._ours, self._reference, self._rounds = ours, reference, rounds
        self._asks = one_image(ours.engine.processor, count, longest)
        self._inputs = [make_inputs([ask.prepared]) for ask in self._asks]
        self._first: dict[str, list[list[float]]] = {OURS: [], ONE_BY_ONE: []}
        self.num_ticks = 4 * rounds

    def run(self, tick: Tick) -> tuple[Table, int]:
        """The table, and how many images the vision tower saw for all questions."""
        with count_images() as seen:
            self._ours.answer(self._asks)
        Rounds().run(
            {
                OURS: lambda: self._first[OURS].append(self._ours.first_tokens(self._asks[:2])),
                ONE_BY_ONE: lambda: self._first[ONE_BY_ONE].append(self._reference_first()),
            },
            self._rounds,
            tick,
        )
        whole = Rounds().run(
            {OURS: lambda: self._ours.answer(self._asks), ONE_BY_ONE: self._reference_all}, self._rounds, tick
        )
        table = Table(
            f"{len(self._asks)} questions on one image",
            ("", "images encoded", "first question, first token ms", "second question, first token ms",
             "all answers s", "wall ratio"),
        )  # fmt: skip
        encoded = {OURS: seen[0], ONE_BY_ONE: self._reference.count_images(self._reference_all)}
        for name, images in encoded.items():
            firsts = [f"{median(times[n] for times in self._first[name]) * 1e3:.1f}" for n in (0, 1)]
            ratio = f"{whole.wall(ONE_BY_ONE) / whole.wall(name):.2f}"
            table.rows.append((name, str(images), *firsts, f"{whole.wall(name):.2f}", ratio))
        table.notes.append(
            "The two first questions come one after the other; their first token counts from the submit."
        )
        return table, seen[0]

    def _reference_first(self) -> list[float]:
        return [clocked(lambda i=i: self._reference.generate(i, 1))[0].wall for i in self._inputs[:2]]

    def _reference_all(self) -> list[list[int]]:
        pairs = zip(self._inputs, self._asks, strict=True)
        return [self._reference.generate(inputs, ask.num_new)[0] for inputs, ask in pairs]


def _clocked_generate(reference: Reference, inputs: dict, num_new: int) -> TokenClock:
    clock = TokenClock()
    reference.generate(inputs, num_new, clock)
    return clock


def _per_step(times: list[float]) -> float:
    return (times[-1] - times[0]) / (len(times) - 1)


@contextmanager
def count_images() -> Iterator[list[int]]:
    """Counts, in a list of one number, what really reaches the vision tower."""
    seen, encode = [0], Qwen3VL.encode

    def counted(self, patches, grids):
        seen[0] += len(grids)
        return encode(self, patches, grids)

    Qwen3VL.encode = counted
    try:
        yield seen
    finally:
        Qwen3VL.encode = encode
