"""What drafts give on real text: `python -m benchmarks drafts_real`.

SmolLM2-135M-Instruct (build/smollm2, see tests/gguf/fetched.py) answers the written prompts of
tests/llama/prompts.txt ("texts") and fills in the forms of tests/llama/forms.py ("forms"); beside each side,
in turns, runs an engine without drafts. `auto` is as by default: goodput says how many are verified. Of
ngram, suffix and grammar all are.

Greedy, float32, one thread, CPU time of the process. A figure is the median of the rounds' ratios; its
interval is the least and the largest where there are fewer than six rounds, else 95 % by bootstrap. What was
asked in another cell, or before the same comes again, is not known to the drafter of past answers. "kept" is
the share of the drafts that were verified, "tokens a pass" counts the one that is no draft.

    --batch 1,4    rows (1, 4, 16 and 64 by default)
    --tasks LIST   of texts, forms
    --drafters L   of auto, ngram, suffix, grammar
    --rounds N     of a cell, 4 by default
    --tokens N     of an answer, 48 by default
    --json         one last line with the targets
    --out FILE.md  write the tables there
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
FEW = 6  # rounds, of which the median's interval is not estimated
COLUMNS = ("", "decoding", "interval", "whole", "drafts", "kept", "tokens a pass", "equal")
Ask = tuple[str, dict | None]  # what is asked, and the schema of its answer


class Side:
    """An engine with drafts as `settings` say."""

    def __init__(self, name: str, **settings: object):
        self.name, self.engine = name, open_engine(**SIZES, **settings)

    def run(self, groups: Sequence[Sequence[Ask]], tokens: int, salt: str) -> Decoded:
        """Answer the groups, one after the other; what it answered with another `salt` is not known to it."""
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
    """All of a task, in an order of their own."""
    if task == FORMS:
        found: list[Ask] = [(text, schema) for text, schema, _ in CASES]
    else:
        found = [(text, None) for text in written_prompts()]
    random.Random(task).shuffle(found)
    return found


def measured(task: str, batch: int, options: argparse.Namespace, sides: dict[str, Side]) -> dict[str, Pairs]:
    """By drafter: each beside none, `rounds` times; every second round backwards."""
    found = {name: Pairs() for name in DRAFT_IN[task] if name in sides}
    asked, plain = cycle(asks_of(task)), sides[NONE]
    size = batch * max(1, 4 // batch)
    num_fresh = max(1, len(asks_of(task)) // size)  # rounds behind which the same is asked again
    for side in sides.values():  # to be warm
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
    """The median and an interval around it."""
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
    parser.add_argument("--json", action="store_true", help="one last line with the targets")
    parser.add_argument("--out", type=Path, help="write the tables there")
    options = parser.parse_args()
    options.batch = options.batch or [1, 4, 16, 64]
    tables, targets = run(options)
    finish("Drafts on real text, SmolLM2-135M-Instruct", tables, targets, options)


if __name__ == "__main__":
    main()
