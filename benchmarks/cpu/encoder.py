"""Measure the encoder cache: vision passes and time to first token for repeated questions about an image."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks.common.engine_runner import EngineRunner
from benchmarks.common.measure import Rounds, clocked
from benchmarks.common.reference import Reference, make_inputs
from benchmarks.common.report import Part, Table, Target
from benchmarks.common.workload import one_image
from benchmarks.cpu.sections import ONE_BY_ONE, OURS
from mmengine.models.network import Network
from mmengine_shapes.scenes import random_scene

QUESTIONS = 16
FILES = (("PNG", 256), ("JPEG", 256), ("PNG", 1024), ("JPEG", 1024))  # file format, pixels a side
ASKED = ("How many shapes are there?", "What colour is the background?")
SECOND_TO_FIRST = 1 / 3
Tick = Callable[[], None]


class OneImageRun:
    """Measures many questions on one image: vision passes, time to first token, total time."""

    title = "questions on one image"

    def __init__(self, ours: EngineRunner, reference: Reference, longest: int, rounds: int) -> None:
        self._ours, self._reference, self._rounds = ours, reference, rounds
        self._asks = one_image(ours.engine.processor, QUESTIONS, longest)
        self._inputs = [make_inputs([ask.prepared]) for ask in self._asks]
        self._first: dict[str, list[list[float]]] = {OURS: [], ONE_BY_ONE: []}
        self.num_ticks = 4 * rounds

    def run(self, tick: Tick) -> Part:
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
            f"{len(self._asks)} questions on one image, 256 pixels a side",
            ("", "images encoded", "first question, first token ms", "second question, first token ms",
             "second to first", "all answers s", "wall ratio"),
        )  # fmt: skip
        encoded = {OURS: seen[0], ONE_BY_ONE: self._reference.count_images(self._reference_all)}
        for name, images in encoded.items():
            first, second = (median(times[n] for times in self._first[name]) for n in (0, 1))
            ratio = f"{whole.wall(ONE_BY_ONE) / whole.wall(name):.2f}"
            times = (f"{first * 1e3:.1f}", f"{second * 1e3:.1f}", f"{second / first:.2f}")
            table.rows.append((name, str(images), *times, f"{whole.wall(name):.2f}", ratio))
        table.notes.append(
            "The first two questions come one after another. The time to their first token starts when the "
            "prepared ids and pixels are submitted."
        )
        first, second = (median(times[n] for times in self._first[OURS]) for n in (0, 1))
        return Part(
            [table],
            [
                Target(f"vision_passes_{QUESTIONS}_questions", seen[0], 1, most=True),
                Target("second_question_to_first", second / first, SECOND_TO_FIRST, most=True),
            ],
        )

    def _reference_first(self) -> list[float]:
        return [clocked(lambda i=i: self._reference.generate(i, 1))[0].wall for i in self._inputs[:2]]

    def _reference_all(self) -> list[list[int]]:
        pairs = zip(self._inputs, self._asks, strict=True)
        return [self._reference.generate(inputs, ask.num_new)[0] for inputs, ask in pairs]


class ImageFileRun:
    """Measures two questions on an image file, from reading the file to the first token."""

    title = "questions on an image file"

    def __init__(self, ours: EngineRunner, folder: Path, rounds: int) -> None:
        self._ours, self._folder, self._rounds = ours, folder, rounds
        self._rng = random.Random(9)
        self.num_ticks = len(FILES) * rounds

    def run(self, tick: Tick) -> Part:
        table = Table(
            "Two questions on one image file, from the file to the first token",
            ("file", "bytes", "first question ms", "second question ms", "second to first"),
            notes=[
                f"Medians of {self._rounds} new files each. The time starts at `submit` with the file's name "
                "and includes reading, decoding, resizing and hashing."
            ],
        )
        targets = []
        for kind, side in FILES:
            sizes, times = [], []
            for number in range(self._rounds):
                path = self._folder / f"{number}-{side}.{kind.lower()}"
                random_scene(self._rng, side=side, count=4).draw().save(path, kind)
                sizes.append(path.stat().st_size)
                times.append(self._ours.first_tokens_of_files(path, ASKED))
                tick()
            first, second = (median(pair[n] for pair in times) for n in (0, 1))
            cells = (
                f"{median(sizes):.0f}",
                f"{first * 1e3:.1f}",
                f"{second * 1e3:.1f}",
                f"{second / first:.2f}",
            )
            table.rows.append((f"{kind}, {side} pixels a side", *cells))
            name = f"second_question_to_first_{kind.lower()}_{side}"
            targets.append(Target(name, second / first, SECOND_TO_FIRST, most=True))
        return Part([table], targets)


@contextmanager
def count_images() -> Iterator[list[int]]:
    """Yield a list whose only number counts the images that the vision tower encodes."""
    seen, encode = [0], Network.encode

    def counted(self, patches, grids):
        seen[0] += len(grids)
        return encode(self, patches, grids)

    Network.encode = counted
    try:
        yield seen
    finally:
        Network.encode = encode
