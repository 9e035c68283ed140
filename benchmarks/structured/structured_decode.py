"""Measure decoding with a schema on the included checkpoint: the grammar's cost and its drafts' benefit.

    python -m benchmarks structured_decode

The model describes synthetic pictures as JSON, the task that it was trained for. Decoding is greedy, in
float32 and on one thread. Three ways run in turn on the same pictures, and in reverse order in every second
round:

    free      without a grammar and without drafts
    grammar   with the schema, without drafts
    drafts    with the schema; tokens that the schema forces are drafts (spec grammar)

First, each way generates each answer once. Pictures whose answers differ between the ways are left out. In
the measured rounds max_tokens is the answer's length, so all ways generate the same tokens. The result is the
process's CPU time per token, after the first step in which every row gets a token.

    --batch 1,16   concurrent requests
    --rounds N     rounds for each batch size (default 24)
    --quick        4 rounds
    --json         print the targets as a last line of JSON
    --out FILE.md  file for the tables
"""

import argparse
import gc
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time_ns

import numpy as np

from benchmarks.common.measure import use_threads

use_threads(1)  # before torch is loaded

from benchmarks.common.repeat import interval  # noqa: E402
from benchmarks.common.report import Table, Target, finish  # noqa: E402
from mmengine.config import EngineConfig  # noqa: E402
from mmengine.models.plugin import Prepared  # noqa: E402
from mmengine.request import SamplingParams  # noqa: E402
from mmengine.serve.engine.engine import Engine  # noqa: E402
from mmengine.serve.prompt.options import Options  # noqa: E402
from mmengine.structured_output.request.spec import grammar_of  # noqa: E402
from mmengine_shapes.questions import image_questions, scene_schema  # noqa: E402
from mmengine_shapes.scenes import random_scene  # noqa: E402

FREE, GRAMMAR, DRAFTS = WAYS = ("free", "grammar", "drafts")
MOST = 256  # maximum number of tokens in an answer; a description of four objects is far shorter
SIDES = (64, 96, 128, 192)  # pixels


@dataclass(frozen=True, slots=True)
class Ask:
    prepared: Prepared
    right: str  # the picture's correct answer
    answer: tuple[int, ...] = ()  # the model's answer, without an end of sequence


@dataclass(frozen=True, slots=True)
class Decoded:
    """Totals for the steps after the first step in which every row gets a token. `passes`: the number of rows
    that get tokens, summed over these steps.
    """

    cpu_ns: int
    tokens: int
    passes: int
    answers: list[list[int]]


class Ways:
    """An engine without drafts, and an engine that verifies all drafts. Runs share no cache entries."""

    def __init__(self):
        shared = {"num_threads": 1, "enable_prefix_caching": False}
        self._plain = Engine(device="cpu", dtype="float32", config=EngineConfig(spec="none", **shared))
        drafting = EngineConfig(spec="grammar", draft_policy="all", **shared)
        self._drafting = Engine(device="cpu", dtype="float32", config=drafting)
        self.processor = self._plain.processor
        schema = {"type": "json_schema", "json_schema": {"schema": scene_schema()}}
        self._grammar = grammar_of(schema)
        self._num_runs = 0

    def run(self, way: str, asks: Sequence[Ask]) -> Decoded:
        engine = self._drafting if way == DRAFTS else self._plain
        self._num_runs += 1
        names = {}
        for place, ask in enumerate(asks):
            options = Options(
                SamplingParams(max_tokens=len(ask.answer) or MOST, seed=0),
                cache_salt=f"run {self._num_runs}",
                grammar=None if way == FREE else self._grammar,
            )
            names[engine.submit_prepared(ask.prepared, options, stream=False)] = place
        return _decode(engine, names)

    def close(self) -> None:
        self._plain.close()
        self._drafting.close()


def _decode(engine: Engine, names: dict[str, int]) -> Decoded:
    answers: list[list[int]] = [[] for _ in names]
    given, begin, tokens, passes = [], None, 0, 0
    while engine.has_work:
        given.append(engine.step())
        if begin is not None:
            passes += len(given[-1])
        elif len(given[-1]) == len(names):
            begin, first = process_time_ns(), len(given)
    spent = process_time_ns() - begin
    for number, outputs in enumerate(given):
        for output in outputs:
            tokens += len(output.token_ids) if number >= first else 0
            if output.completion is not None:
                answers[names[output.request_id]] = output.completion.token_ids
    return Decoded(spent, tokens, passes, answers)


def pictures(ways: Ways, count: int, seed: int) -> list[Ask]:
    """Return questions about random scenes that the model was not trained on."""
    rng = random.Random(seed)
    asks = []
    for _ in range(count):
        scene = random_scene(rng, side=rng.choice(SIDES))
        ((question, answer),) = image_questions(scene, rng)["json"]
        content = [{"type": "image"}, {"type": "text", "text": question}]
        prompt = [{"role": "user", "content": content}]
        asks.append(Ask(ways.processor.prepare(prompt, images=[scene.draw()], videos=[]), answer))
    return asks


def answered(ways: Ways, asks: Sequence[Ask]) -> tuple[list[Ask], int, int]:
    """Return the requests whose answers are equal in all ways, with `answer` set. Also return the number of
    other requests, and the number of correct answers without a grammar.
    """
    decode, ends = ways.processor.tokenizer.decode, set(ways.processor.eos_token_ids)
    kept, num_right = [], 0
    for start in range(0, len(asks), 16):
        some = asks[start : start + 16]
        by_way = [ways.run(way, some).answers for way in WAYS]
        for ask, *answers in zip(some, *by_way, strict=True):
            free, grammar, drafts = ([token for token in each if token not in ends] for each in answers)
            num_right += decode(free) == ask.right
            if free == grammar == drafts:
                kept.append(replace(ask, answer=tuple(free)))
    return kept, len(asks) - len(kept), num_right


def rounds_of(ways: Ways, asks: Sequence[Ask], batch: int, rounds: int) -> dict[str, list[Decoded]]:
    """In each round, run every way on the same pictures, with `batch` concurrent requests."""
    found: dict[str, list[Decoded]] = {way: [] for way in WAYS}
    each = max(1, 16 // batch)
    for number in range(rounds):
        start = number * batch * each
        some = [asks[(start + place) % len(asks)] for place in range(batch * each)]
        for way in WAYS[:: -1 if number % 2 else 1]:
            runs = [ways.run(way, some[at : at + batch]) for at in range(0, len(some), batch)]
            sums = (sum(getattr(run, name) for run in runs) for name in ("cpu_ns", "tokens", "passes"))
            found[way].append(Decoded(*sums, answers=[]))
    return found


def ratio(found: dict[str, list[Decoded]], way: str) -> tuple[float, float, float]:
    """Return the CPU time per token relative to "free": the median over the rounds, and its 95 % interval."""
    pairs = zip(found[way], found[FREE], strict=True)
    return interval([(a.cpu_ns / a.tokens) / (b.cpu_ns / b.tokens) for a, b in pairs])


def measure(options: argparse.Namespace) -> tuple[list[Table], list[Target]]:
    ways = Ways()
    rounds = 4 if options.quick else options.rounds
    asks, num_other, num_right = answered(ways, pictures(ways, options.pictures, seed=3))
    table = Table("Decoding", ("", "µs of CPU a token", "over free", "95 %", "tokens a pass"))
    table.notes.append(
        f"{options.pictures} pictures: {num_right} free answers are correct; {num_other} differ between "
        "the ways and are left out."
    )
    targets = []
    for batch in options.batch:
        rounds_of(ways, asks, batch, 1)  # warm up
        gc.collect()
        gc.freeze()
        found = rounds_of(ways, asks, batch, rounds)
        for way, each in found.items():
            mid, low, high = ratio(found, way)
            tokens = sum(one.tokens for one in each) / sum(one.passes for one in each)
            cost = float(np.median([one.cpu_ns / one.tokens for one in each])) / 1e3
            cells = (f"{cost:.0f}", f"{mid:.3f}", f"{low:.3f} to {high:.3f}", f"{tokens:.2f}")
            table.rows.append((f"{way}, batch {batch}", *cells))
        targets.append(Target(f"tokens a pass, batch {batch}", tokens, 1.3))
        most = 0.9 if batch == 1 else 1.0
        targets.append(Target(f"time with drafts / free, batch {batch}", mid, most, most=True))
    gc.unfreeze()
    ways.close()
    return [table], targets


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=_sizes, default=[1, 16], help="batch sizes, separated by commas")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--pictures", type=int, default=96)
    parser.add_argument("--quick", action="store_true", help="4 rounds")
    parser.add_argument("--json", action="store_true", help="print the targets as a last line of JSON")
    parser.add_argument("--out", type=Path, help="Markdown file for the tables")
    options = parser.parse_args()
    tables, targets = measure(options)
    finish("Decoding with a schema, embedded checkpoint", tables, targets, options)


if __name__ == "__main__":
    main()
