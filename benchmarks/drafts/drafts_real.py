"""Measure drafts on real text: speed and acceptance, compared with an engine without drafts.

SmolLM2-135M-Instruct (build/smollm2, see tests/gguf/fetched.py) answers the prompts in
tests/llama/prompts.txt ("texts") and fills in the forms in tests/llama/forms.py ("forms"). A cell of the
results is a task, a number of rows and a drafter. Runs with and without drafts alternate. The drafter `auto`
uses estimated goodput to decide how many drafts are verified. The other drafters verify all drafts.

Decoding is greedy, in float32, on one thread. Times are the process's CPU time. A result is the median over
the rounds of the speedup by drafts. The interval is the bootstrapped 95 % interval. With fewer than six
rounds, the interval is the range from the smallest to the largest speedup. The drafter `suffix` drafts only
from earlier answers in the same cell. When a cell's prompts repeat, a new cache salt hides the earlier
answers from `suffix`. "kept" is the acceptance rate: accepted drafts / verified drafts. "tokens a pass"
includes the sampled token after the drafts.

    --batch 1,4    rows (default: 1, 4, 16 and 64)
    --tasks LIST   some of texts, forms
    --drafters L   some of auto, ngram, suffix, grammar
    --rounds N     rounds per cell (default 4)
    --tokens N     tokens per answer (default 48)
    --json         print the targets as a last line of JSON
    --out FILE.md  file for the tables
"""

import argparse
import random
import sys
from collections.abc import Sequence
from itertools import chain, cycle, islice
from pathlib import Path

from benchmarks.common.measure import use_threads

use_threads(1)  # before torch is loaded

from benchmarks.common.repeat import interval  # noqa: E402
from benchmarks.common.report import Table, Target, finish  # noqa: E402
from benchmarks.drafts.spec_runs import Decoded, Pairs, answer  # noqa: E402
from mmengine.models.plugin import Prepared  # noqa: E402
from mmengine.request import SamplingParams  # noqa: E402
from mmengine.serve.prompt.options import Options  # noqa: E402
from mmengine.structured_output.request.spec import grammar_of  # noqa: E402
from tests.llama.forms import CASES  # noqa: E402
from tests.llama.smollm2 import chat, open_engine, written_prompts  # noqa: E402

TEXTS, FORMS = TASKS = ("texts", "forms")
NONE = "none"
DRAFTERS = {
    "auto": {"spec": "auto"},
    **{name: {"spec": name, "draft_policy": "all"} for name in ("ngram", "suffix", "grammar")},
}
DRAFT_IN = {TEXTS: ("auto", "ngram", "suffix"), FORMS: tuple(DRAFTERS)}
SIZES = {"token_budget": 8192, "num_blocks": 1025, "max_model_len": 512, "enable_prefix_caching": False}
NEVER_BELOW = 0.98
FEW = 6  # with fewer rounds, the interval is not bootstrapped
COLUMNS = ("", "decoding", "interval", "whole", "drafts", "kept", "tokens a pass", "equal")
Ask = tuple[str, dict | None]  # a prompt, and the schema for the answer


class Side:
    """An engine with the given `settings`."""

    def __init__(self, name: str, **settings: object):
        self.name, self.engine = name, open_engine(**SIZES, **settings)

    def run(self, groups: Sequence[Sequence[Ask]], tokens: int, salt: str) -> Decoded:
        """Answer the groups in turn. The drafter finds only earlier answers with the same `salt`."""
        found = Decoded()
        for group in groups:
            answer(self.engine, [self._prepared(each, tokens, salt) for each in group], found)
        return found

    def _prepared(self, asked: Ask, tokens: int, salt: str) -> tuple[Prepared, Options]:
        text, schema = asked
        form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
        options = Options(
            SamplingParams(max_tokens=tokens),
            cache_salt=salt,
            grammar=None if schema is None else grammar_of(form),
        )
        return self.engine.processor.prepare(chat(text), images=[], videos=[]), options


def asks_of(task: str) -> list[Ask]:
    """Return all prompts of a task, in shuffled order."""
    if task == FORMS:
        found: list[Ask] = [(text, schema) for text, schema, _ in CASES]
    else:
        found = [(text, None) for text in written_prompts()]
    random.Random(task).shuffle(found)
    return found


def measured(task: str, batch: int, options: argparse.Namespace, sides: dict[str, Side]) -> dict[str, Pairs]:
    """Run each drafter, and the engine without drafts, `rounds` times. Every second round runs the engines in
    reverse order. Return each drafter's results with and without drafts.
    """
    found = {name: Pairs() for name in DRAFT_IN[task] if name in sides}
    asked, plain = cycle(asks_of(task)), sides[NONE]
    size = batch * max(1, 4 // batch)
    num_fresh = max(1, len(asks_of(task)) // size)  # the prompts repeat after this many rounds
    for side in sides.values():  # warm up
        side.run([asks_of(task)[: min(batch, 4)]], 4, f"{task} {batch}, before")
    for number in range(options.rounds):
        salt = f"{task} {batch} {number // num_fresh}"
        group = list(islice(asked, size))
        groups = [group[at : at + batch] for at in range(0, size, batch)]
        for name in list(found)[:: -1 if number % 2 else 1]:
            print(f"{task}, {batch} rows, round {number}, {name}", end="\x1b[K\r", file=sys.stderr)
            turns = (sides[name], plain)[:: -1 if number % 2 else 1]
            ran = {each.name: each.run(groups, options.tokens, salt) for each in turns}
            found[name].plain.append(ran[NONE])
            found[name].drafted.append(ran[name])
    return found


def between(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return (median, low, high). With fewer than FEW ratios, low and high are the extremes."""
    mid, low, high = interval(ratios)
    return (mid, min(ratios), max(ratios)) if len(ratios) < FEW else (mid, low, high)


def table_of(task: str, batch: int, found: dict[str, Pairs]) -> Table:
    table = Table(f"{task}, {batch} rows: times as fast as without drafts", COLUMNS)
    for name, pairs in found.items():
        mid, low, high = between(pairs.ratios())
        drafts = sum(each.drafts for each in pairs.drafted)
        accepted = sum(each.accepted for each in pairs.drafted)
        equal, num_answers = pairs.equal()
        table.rows.append(
            (
                name,
                f"{mid:.3f}",
                f"{low:.3f} to {high:.3f}",
                f"{between(pairs.ratios('whole_ns'))[0]:.3f}",
                str(drafts),
                f"{accepted / drafts:.1%}" if drafts else "",
                f"{pairs.length:.2f}",
                f"{equal} of {num_answers}",
            )
        )
    return table


def run(options: argparse.Namespace) -> tuple[list[Table], list[Target]]:
    asked = dict.fromkeys(chain.from_iterable(DRAFT_IN[task] for task in options.tasks))
    names = [NONE, *(name for name in asked if name in options.drafters)]
    sides = {name: Side(name, **DRAFTERS.get(name, {"spec": NONE})) for name in names}
    tables, targets, equal, num_answers = [], [], 0, 0
    for task in options.tasks:
        for batch in options.batch:
            found = measured(task, batch, options, sides)
            tables.append(table_of(task, batch, found))
            if "auto" in found:
                high = between(found["auto"].ratios())[2]
                targets.append(Target(f"upper end, auto, {task}, {batch} rows", high, NEVER_BELOW))
            for pairs in found.values():
                same, count = pairs.equal()
                equal, num_answers = equal + same, num_answers + count
    targets.append(Target("answers with the same tokens as without drafts", equal / num_answers, 1.0))
    for side in sides.values():
        side.engine.close()
    return tables, targets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=lambda text: [int(size) for size in text.split(",")])
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=list(TASKS))
    parser.add_argument("--drafters", type=lambda text: text.split(","), default=list(DRAFTERS))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--json", action="store_true", help="print the targets as a last line of JSON")
    parser.add_argument("--out", type=Path, help="Markdown file for the tables")
    options = parser.parse_args()
    options.batch = options.batch or [1, 4, 16, 64]
    tables, targets = run(options)
    finish("Drafts on real text, SmolLM2-135M-Instruct", tables, targets, options)


if __name__ == "__main__":
    main()
