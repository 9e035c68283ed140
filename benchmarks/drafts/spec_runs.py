"""Run requests on engines with and without drafts, and measure the CPU time of decoding."""

import gc
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import process_time_ns

import numpy as np
from msgspec import structs

from mmengine.config import EngineConfig
from mmengine.models.plugin import Prepared, Processor
from mmengine.request import SamplingParams
from mmengine.serve.engine.engine import Engine
from mmengine.serve.prompt.options import Options
from mmengine.structured_output.request.spec import grammar_of
from mmengine_shapes.questions import image_questions, scene_schema
from mmengine_shapes.scenes import random_scene
from mmengine_shapes.training.texts import text_pair

NONE = "none"
SCHEMA, JSON, DESCRIBE, SHORT, TEXT = TASKS = ("schema", "json", "describe", "short", "text")
MOST = 256  # maximum tokens in an answer, far more than any task needs
SIDES = (64, 96, 128, 192)  # pixels
QUESTIONS = ("count", "background", "colour_of", "size_of", "where", "what_at", "count_colour", "exists")
TEXTS = ("story", "facts", "count_up", "larger", "capital", "person_json")
# The token budget holds all prompts of a group, so that all rows start to decode in the same step. The KV
# pools are small because several engines share the memory.
SIZES = {"token_budget": 8192, "num_blocks": 1024, "max_model_len": 512, "num_threads": 1}


def ask(processor: Processor, rng: random.Random, task: str) -> Prepared:
    """Return a prompt for `task` about a new random scene, or a new text."""
    if task == TEXT:
        question, _ = text_pair(rng, rng.choice(TEXTS))
        return processor.prepare([{"role": "user", "content": question}], images=[], videos=[])
    scene = random_scene(rng, side=rng.choice(SIDES))
    pairs = image_questions(scene, rng)
    kinds = {SCHEMA: ("json",), JSON: ("json",), DESCRIBE: ("describe",), SHORT: QUESTIONS}[task]
    question, _ = rng.choice([pair for kind in kinds for pair in pairs[kind]])
    content = [{"type": "image"}, {"type": "text", "text": question}]
    return processor.prepare([{"role": "user", "content": content}], images=[scene.draw()], videos=[])


@dataclass(slots=True)
class Decoded:
    """Totals over groups of requests. `cpu_ns`, `tokens` and `passes` cover only the decode steps. `passes`:
    the number of rows in each step, summed over the steps. `whole_ns`: the CPU time from the first submit to
    the last token.
    """

    cpu_ns: int = 0
    tokens: int = 0
    passes: int = 0
    whole_ns: int = 0
    cached: int = 0  # prompt tokens found in the prefix cache
    drafts: int = 0  # verified draft tokens
    accepted: int = 0
    answers: list[list[int]] = field(default_factory=list)


def answer(engine: Engine, group: Sequence[tuple[Prepared, Options]], found: Decoded) -> None:
    """Answer a group of requests, and add the results to `found`. Raises RuntimeError if the prompts do not
    fit into a single step.
    """
    given, first = [], None
    gc.collect()
    gc.disable()
    begin = process_time_ns()
    names = [engine.submit_prepared(prepared, options, stream=False) for prepared, options in group]
    while engine.has_work:
        given.append(engine.step())
        if first is None and len(given[-1]) == len(group):
            first, start = len(given), process_time_ns()
    end = process_time_ns()
    gc.enable()
    if first is None:
        raise RuntimeError("the prompts of a group must fit one step of token_budget")
    found.cpu_ns += end - start
    found.whole_ns += end - begin
    answers = {}
    for number, outputs in enumerate(given):
        if number >= first:
            found.passes += len(outputs)
            found.tokens += sum(len(output.token_ids) for output in outputs)
        for output in outputs:
            if output.completion is not None:
                answers[output.request_id] = output.completion
    done = [answers[name] for name in names]
    found.answers += [each.token_ids for each in done]
    found.cached += sum(each.num_cached_tokens for each in done)
    found.drafts += sum(each.num_drafts for each in done)
    found.accepted += sum(each.num_accepted for each in done)


class Side:
    """An engine with the given `settings`. With `asks` false, the drafters are loaded but never draft."""

    def __init__(self, name: str, asks: bool = True, **settings):
        self.name, self._num_runs = name, 0
        settings = {"enable_prefix_caching": False, **SIZES, **settings}
        self.engine = Engine(device="cpu", dtype="float32", config=EngineConfig(**settings))
        if not asks:
            executor = self.engine.built.executor
            dispatch, nobody = executor.dispatch, np.zeros((0, 0), np.int32)
            executor.dispatch = lambda plan: dispatch(structs.replace(plan, draft_room=nobody))
        schema = {"type": "json_schema", "json_schema": {"schema": scene_schema()}}
        self._grammar = grammar_of(schema)

    def run(self, task: str, groups: Sequence[Sequence[Prepared]], *, shares: bool = True) -> Decoded:
        """Answer `groups` one after another. With `shares` false, the run uses no results that earlier runs
        cached.
        """
        found = Decoded()
        self._num_runs += 1
        options = Options(
            SamplingParams(max_tokens=MOST),
            cache_salt="" if shares else f"run {self._num_runs}",
            grammar=self._grammar if task == SCHEMA else None,
        )
        for group in groups:
            answer(self.engine, [(each, options) for each in group], found)
        return found

    def close(self) -> None:
        self.engine.close()


@dataclass(slots=True)
class Pairs:
    """The results for a task and batch size. Each list has one entry per round: `drafted` with the engine's
    drafts, `plain` without drafts.
    """

    plain: list[Decoded] = field(default_factory=list)
    drafted: list[Decoded] = field(default_factory=list)

    def ratios(self, what: str = "cpu_ns") -> list[float]:
        """Return each round's speedup over the run without drafts."""
        pairs = zip(self.plain, self.drafted, strict=True)
        return [getattr(plain, what) / getattr(drafted, what) for plain, drafted in pairs]

    @property
    def length(self) -> float:
        """Return the mean acceptance length, including the sampled token after the drafts."""
        return sum(each.tokens for each in self.drafted) / sum(each.passes for each in self.drafted)

    def equal(self) -> tuple[int, int]:
        """Return how many answers equal the answer without drafts, and the number of answers."""
        pairs = [
            pair
            for plain, drafted in zip(self.plain, self.drafted, strict=True)
            for pair in zip(plain.answers, drafted.answers, strict=True)
        ]
        return sum(a == b for a, b in pairs), len(pairs)


def paired(
    plain: Side,
    sides: Sequence[Side],
    task: str,
    batch: int,
    rounds: int,
    rng: random.Random,
    tick: Callable[[], None],
) -> dict[str, Pairs]:
    """Return each side's results from `rounds` rounds, by name. In a round, each side answers the same
    requests once. The sides run in pairs, and `plain` answers the requests once per pair.
    """
    found = {side.name: Pairs() for side in sides}
    for number in range(-1, rounds):  # one more round to warm up
        count = max(1, 4 // batch)
        asks = [[ask(plain.engine.processor, rng, task) for _ in range(batch)] for _ in range(count)]
        order = sides[:: -1 if number % 2 else 1]
        for place in range(0, len(order), 2):
            two = order[place : place + 2]
            ran = [two[0].run(task, asks), plain.run(task, asks, shares=False)]
            ran += [side.run(task, asks) for side in two[1:]]
            for side, drafted in zip(two, ran[::2], strict=True):
                if number >= 0:
                    found[side.name].plain.append(ran[1])
                    found[side.name].drafted.append(drafted)
        tick()
    return found
