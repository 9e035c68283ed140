"""Measure JSON Schema coverage and its cost, for mmengine, bare llguidance and bare xgrammar in one run.

    python benchmarks/structured_coverage.py                          the project's own schemas
    python benchmarks/structured_coverage.py --suite DIR --schemas DIR --vocabulary FILE.gguf --out FILE.md

    --suite DIR       a checkout of JSON-Schema-Test-Suite; every draft in it is tested
    --schemas DIR     schemas with instances, one file per schema, in MaskBench's format
    --vocabulary FILE also time compilation and masks; tekken_240911.json or a .gguf file
    --sides A,B       some of mmengine, llguidance, xgrammar (default: all that are installed);
                      mmengine/ordered=N (1, 4, 64) sets the bound on key order, which is off otherwise;
                      mmengine/xgrammar is mmengine with its other grammar backend
    --limit N         about N schemas from each source
    --seconds N       maximum time for one schema on one side (default 60)
    --verbose         print to stderr every schema whose verdict is not exact

A text is accepted if the masks allow each byte in turn, and then the end. mmengine's `bounds` are off.
json.dumps writes each instance with and without spaces. A valid instance that is not accepted is tried
again with its keys in the schema's order. A schema's verdict is

    exact     every valid instance is accepted, and no invalid instance is accepted in any of four spellings
    refused   the schema is refused; mmengine names the keyword and the pointer
    over      a valid instance is not accepted, and no invalid instance is accepted
    under     an invalid instance is accepted
    crashed   the process ended, raised another error than a refusal, or ran out of time

Exits with 1 when mmengine misses a target.
"""

import argparse
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from importlib import util
from itertools import islice
from pathlib import Path

import numpy as np

if not __package__:  # Run as a file: make the repository's root importable.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.common.report import Table, Target, finish
from benchmarks.structured.coverage_cases import HOME, Case, of_home, of_maskbench, of_suite
from benchmarks.structured.coverage_sides import SIDES
from benchmarks.structured.coverage_worker import TOO_LONG, VERDICTS, Found, Worker
from benchmarks.structured.vocabulary import load

LIMIT_S = 60.0  # default, for one schema
OURS, BARE = "mmengine", "llguidance"
MADE_UP = ("Handwritten", "Synthesized")  # MaskBench's groups without real-world schemas
DRAFT = "draft2020-12"
Results = dict[str, list[tuple[Case, Found]]]  # keyed by side


def run_all(cases: Sequence[Case], sides: Sequence[str], options: argparse.Namespace) -> Results:
    vocabulary = None if options.vocabulary is None else load(options.vocabulary)
    workers = {name: Worker(name, vocabulary, options.seconds) for name in sides}
    results: Results = {name: [] for name in sides}
    order, chance = list(sides), random.Random(0)
    for number, case in enumerate(cases):
        print(f"{number} of {len(cases)}: {case.group}", end="\x1b[K\r", file=sys.stderr, flush=True)
        chance.shuffle(order)  # a side is faster right after another side that loaded the same library
        for name in order:
            found = workers[name].ask(case)
            results[name].append((case, found))
            if options.verbose and found.verdict != "exact":
                print(f"{name} {found.verdict}: {case.group}: {case.name}: {found.why}", file=sys.stderr)
    for worker in workers.values():
        worker.close()
    return results


def verdict_table(title: str, results: Results) -> Table:
    table = Table(title, ("", "schemas", *VERDICTS, "exact, %"))
    for name, found in results.items():
        counts = Counter(each.verdict for _, each in found)
        table.rows.append((name, *_counted(counts)))
        late = sum(TOO_LONG in each.why for _, each in found)
        if late:
            table.notes.append(f"{late} of {name}'s crashes are timeouts")
    return table


def group_table(title: str, found: Iterable[tuple[Case, Found]]) -> Table:
    table = Table(f"{title}, by group: mmengine", ("", "schemas", *VERDICTS, "exact, %"))
    groups: dict[str, Counter] = defaultdict(Counter)
    for case, each in found:
        groups[case.group][each.verdict] += 1
    table.rows += [(name, *_counted(counts)) for name, counts in sorted(groups.items())]
    return table


def _counted(counts: Counter) -> tuple[str, ...]:
    share = 100 * counts["exact"] / counts.total()
    return (str(counts.total()), *(str(counts[verdict]) for verdict in VERDICTS), f"{share:.1f}")


def refusal_table(title: str, found: Iterable[tuple[Case, Found]]) -> Table:
    """Return a table with the number of refusals for each keyword, and the first reason."""
    table = Table(f"{title}, refused by mmengine", ("keyword", "schemas", "for example"))
    by_keyword: dict[str, list[str]] = defaultdict(list)
    for _, each in found:
        if each.verdict == "refused":
            by_keyword[each.keyword or "(the whole)"].append(each.why)
    for keyword, reasons in sorted(by_keyword.items(), key=lambda item: -len(item[1])):
        reason = reasons[0].removeprefix("schema refused: ").replace("|", "\\|")
        table.rows.append((keyword, str(len(reasons)), reason[:200]))
    return table


def clock_table(results: Results) -> Table:
    columns = ("", "schemas", "compile p50, ms", "p99", "max", "mask mean, µs", "p50", "p99", "max")
    table = Table("Times, where each side but xgrammar accepts the schema and the answer", columns)
    for name, (compiled, masks) in clocked(results).items():
        spent = [f"{value * 1e3:.2f}" for value in _shares(compiled, 50, 99, 100)]
        steps = [f"{value * 1e6:.1f}" for value in (masks.mean(), *_shares(masks, 50, 99, 100))]
        table.rows.append((name, str(len(compiled)), *spent, *steps))
    table.notes.append(
        "Compilation goes from the schema to the grammar and includes mmengine's gate. Masks, each with its "
        "step, belong to a compiled grammar's first answer. CPU time; engines run one after another."
    )
    return table


def clocked(results: Results) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return side -> (compilation times, mask times) in seconds. Only schemas and answers that both mmengine
    and bare llguidance accept are included. xgrammar's times also exclude everything that xgrammar refuses.
    """
    fair = [found for name, found in results.items() if name != "xgrammar" and "/" not in name]
    both = [all(each[number][1].masks_s for each in fair) for number in range(len(fair[0]))]
    out = {}
    for name, found in results.items():
        taken = [each for (_, each), fit in zip(found, both, strict=True) if fit and each.masks_s]
        if taken:
            masks = np.concatenate([each.masks_s for each in taken])
            out[name] = np.array([each.compile_s for each in taken]), masks
    return out


def _shares(values: np.ndarray, *shares: int) -> list[float]:
    return np.percentile(values, shares, method="inverted_cdf").tolist()


def coverage_targets(title: str, found: Sequence[tuple[Case, Found]], least: float) -> list[Target]:
    counts = Counter(each.verdict for _, each in found)
    share = 100 * counts["exact"] / len(found)
    return [
        Target(f"{title}: exact, %", share, least),
        Target(f"{title}: under", counts["under"], 0, most=True),
        Target(f"{title}: crashed", counts["crashed"], 0, most=True),
    ]


def clock_targets(results: Results) -> list[Target]:
    times = clocked(results)
    if not {OURS, BARE} <= times.keys():
        return []
    (our_compile, our_masks), (compile, masks) = times[OURS], times[BARE]
    pairs = (
        ("mask mean", our_masks.mean() / masks.mean(), 1.2),
        ("mask p99", _shares(our_masks, 99)[0] / _shares(masks, 99)[0], 1.2),
        ("compilation p50", _shares(our_compile, 50)[0] / _shares(compile, 50)[0], 2.0),
    )
    targets = [Target(f"{name}, ours / bare llguidance", ratio, bar, most=True) for name, ratio, bar in pairs]
    longest = max(found.compile_s or 0 for _, found in results[OURS])
    taken = [case for case, found in results[BARE] if found.verdict != "refused"]
    refused = {case.name for case, found in results[OURS] if found.verdict == "refused"}
    share = 100 * sum(case.name in refused for case in taken) / len(taken)
    return [
        *targets,
        Target("longest compilation, s", longest, 10, most=True),
        Target("refused by mmengine though llguidance accepts, %", share, 3, most=True),
    ]


def sources(options: argparse.Namespace) -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = {}
    if options.suite is not None:
        found["JSON-Schema-Test-Suite"] = list(of_suite(options.suite))
    if options.schemas is not None:
        found["real schemas"] = list(of_maskbench(options.schemas))
    if not found:
        found["our own schemas"] = list(of_home())
    for title, cases in found.items():
        if not cases:
            raise SystemExit(
                f"{title}: no .json files were found; {HOME.name} is used where no folder is named"
            )
        if options.limit:
            found[title] = list(islice(cases, 0, None, max(1, len(cases) // options.limit)))
    return found


def parts_of(results: Results, title: str) -> dict[str, tuple[Results, float]]:
    """Return the results as parts with separate targets: title -> (results, minimum percentage of exact
    schemas).
    """

    def part(chosen: set[str]) -> Results:
        return {side: [each for each in found if each[0].group in chosen] for side, found in results.items()}

    groups = {case.group for case, _ in results[next(iter(results))]}
    if title == "real schemas":
        real = {group for group in groups if group not in MADE_UP}
        return {
            title: (part(real), 90.0),
            **({"made-up schemas": (part(groups - real), 0.0)} if groups - real else {}),
        }
    if title == "our own schemas":
        return {title: (results, 100.0)}
    out = {}
    for draft in sorted({group.split(" ")[0] for group in groups}):
        mine = {group for group in groups if group.startswith(draft + " ")}
        required = {group for group in mine if " optional" not in group}
        out[draft] = (part(required), 100 * 270 / 364 if draft == DRAFT else 0.0)
        if mine - required:
            out[f"{draft}, optional files"] = (part(mine - required), 0.0)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suite", type=Path)
    parser.add_argument("--schemas", type=Path)
    parser.add_argument("--vocabulary", type=Path)
    installed = [name for name in SIDES if name == OURS or util.find_spec(name)]
    parser.add_argument("--sides", type=lambda text: text.split(","), default=installed)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--seconds", type=float, default=LIMIT_S)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--json", action="store_true", help="print the targets as a last line of JSON")
    parser.add_argument("--out", type=Path, help="file for the tables")
    options = parser.parse_args()
    tables: list[Table] = []
    targets: list[Target] = []
    every: Results = {name: [] for name in options.sides}
    for title, cases in sources(options).items():
        results = run_all(cases, options.sides, options)
        for name in every:
            every[name] += results[name]
        for part, (found, least) in parts_of(results, title).items():
            tables.append(verdict_table(part, found))
            if OURS in found:
                tables += [group_table(part, found[OURS]), refusal_table(part, found[OURS])]
                targets += coverage_targets(part, found[OURS], least)
    if options.vocabulary is not None:
        tables.append(clock_table(every))
        targets += clock_targets(every)
    finish("JSON Schema coverage", tables, targets, options)
    return 0 if all(each.reaches(each.bar) for each in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
