"""Measure how well a field's confidence predicts whether the field is right.

    python -m benchmarks field_calibration

Two models answer greedily, with a schema. The included checkpoint describes sharp and blurred scenes from its
test split. SmolLM2-135M-Instruct (build/smollm2) reads forms. Scenes and forms are synthetic, so the right
values are known. A field is right if the model's value equals the known value at the same JSON pointer.

For each kind of field the tables show the number of fields, the share of right fields and the mean confidence
`p`. Two scores follow. Expected calibration error: the fields are sorted into ten bins by `p`. A bin's error
is the distance between its share of right fields and its mean `p`. The score is the mean error, weighted by
bin size. AUROC: the probability that a right field has a higher `p` than a wrong field.

    --count N      number of sharp pictures, of blurred pictures and of forms (default 400)
    --quick        40 of each
    --out FILE.md  file for the tables; the diagrams are written beside it as FILE.svg
"""

import argparse
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.measure import use_threads

use_threads(1)  # before torch is loaded

from benchmarks.common.report import Table, machine_lines, markdown, show  # noqa: E402
from benchmarks.structured.calibration_forms import FORM_KINDS, Task, forms, scenes  # noqa: E402
from mmengine.config import EngineConfig  # noqa: E402
from mmengine.serve.engine.engine import Engine  # noqa: E402
from mmengine.serve.extraction.columns import leaves  # noqa: E402
from mmengine.serve.prompt.options import Options, make_sampling  # noqa: E402
from mmengine.serve.prompt.prompt import Prompt  # noqa: E402
from mmengine.structured_output.request.spec import grammar_of  # noqa: E402

BINS = 10
BLUR = 3.0  # pixels, for pictures with a side of 96 pixels
SMOLLM2 = Path(__file__).parents[2] / "build" / "smollm2"
WIDTH, MARGIN = 200, 34  # of a diagram, in pixels


@dataclass(frozen=True, slots=True)
class Field:
    kind: str
    p: float
    is_right: bool


def answered(engine: Engine, tasks: Iterable[Task], max_tokens: int) -> Iterator[Field]:
    """Yield the fields of the answers to `tasks`."""
    tasks = list(tasks)
    jobs = []
    for task in tasks:
        form = {"type": "json_schema", "json_schema": {"schema": task.schema}, "field_confidence": True}
        options = Options(make_sampling({"max_tokens": max_tokens}), grammar=grammar_of(form))
        jobs.append((Prompt(messages=task.messages, images=task.images), options))
    for index, completion in engine.run_batch(jobs):
        choice = completion.choices[0]
        if choice.finish_reason != "stop":
            continue
        truth = tasks[index].truth
        expected = dict(leaves(json.loads(truth) if isinstance(truth, str) else truth))
        said = dict(leaves(json.loads(choice.content)))
        for pointer, field in choice.field_confidence.items():
            is_right = pointer in expected and said[pointer] == expected[pointer]
            kind = FORM_KINDS.get(pointer) or pointer.rpartition("/")[2]
            yield Field(kind, field.p, is_right)


def bins_of(fields: Iterable[Field]) -> list[list[Field]]:
    bins: list[list[Field]] = [[] for _ in range(BINS)]
    for field in fields:
        bins[min(int(field.p * BINS), BINS - 1)].append(field)
    return bins


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else math.nan


def calibration_error(fields: list[Field]) -> float:
    distances = (
        len(some) * abs(mean(field.is_right for field in some) - mean(field.p for field in some))
        for some in bins_of(fields)
        if some
    )
    return sum(distances) / len(fields)


def auroc(fields: list[Field]) -> float:
    """Return the probability that a right field has a higher `p` than a wrong field, or NaN if no field is
    right or none is wrong.
    """
    ranked = sorted(fields, key=lambda field: field.p)
    rank_sum, at = 0.0, 0
    while at < len(ranked):
        end = at
        while end < len(ranked) and ranked[end].p == ranked[at].p:
            end += 1
        rank_sum += sum(field.is_right for field in ranked[at:end]) * (at + end + 1) / 2
        at = end
    right = sum(field.is_right for field in fields)
    wrong = len(fields) - right
    return (rank_sum - right * (right + 1) / 2) / (right * wrong) if right and wrong else math.nan


def tables_of(groups: dict[str, list[Field]]) -> list[Table]:
    tables = []
    for name, fields in groups.items():
        columns = ("field", "fields", "right", "mean p", "calibration error", "AUROC")
        table = Table(name, columns)
        kinds = dict.fromkeys(field.kind for field in fields)
        for kind in (*kinds, "all"):
            some = [field for field in fields if kind in (field.kind, "all")]
            right, p = mean(field.is_right for field in some), mean(field.p for field in some)
            scores = f"{calibration_error(some):.3f}", f"{auroc(some):.3f}"
            table.rows.append((kind, str(len(some)), f"{right:.3f}", f"{p:.3f}", *scores))
        tables.append(table)
        diagram = Table(f"{name}: reliability", ("p", "fields", "mean p", "right"))
        for number, some in enumerate(bins_of(fields)):
            if some:
                means = mean(field.p for field in some), mean(field.is_right for field in some)
                span = f"{number / BINS:.1f} to {(number + 1) / BINS:.1f}"
                diagram.rows.append((span, str(len(some)), *(f"{each:.3f}" for each in means)))
        tables.append(diagram)
    return tables


def svg_of(groups: dict[str, list[Field]]) -> str:
    """Return an SVG with a reliability diagram for each group. A disc's area grows with its bin's size."""
    step = WIDTH + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {step * len(groups)} {step + 14}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for place, (name, fields) in enumerate(groups.items()):
        left, top = place * step + MARGIN, MARGIN
        parts.append(f'<text x="{left}" y="{top - 12}">{name}</text>')
        parts.append(
            f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{WIDTH}" fill="none" stroke="#888"/>'
            f'<path d="M{left} {top + WIDTH}L{left + WIDTH} {top}" stroke="#bbb" stroke-dasharray="4"/>'
        )
        for tick in (0, 0.5, 1):
            x, y = left + tick * WIDTH, top + WIDTH - tick * WIDTH
            parts.append(f'<text x="{x}" y="{top + WIDTH + 14}" text-anchor="middle">{tick:g}</text>')
            parts.append(f'<text x="{left - 4}" y="{y + 4}" text-anchor="end">{tick:g}</text>')
        parts.append(
            f'<text x="{left + WIDTH / 2}" y="{top + WIDTH + 28}" text-anchor="middle">mean p</text>'
        )
        for some in bins_of(fields):
            if some:
                x = left + WIDTH * mean(field.p for field in some)
                y = top + WIDTH * (1 - mean(field.is_right for field in some))
                radius = 2 + 10 * math.sqrt(len(some) / len(fields))
                parts.append(
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="#36c" fill-opacity="0.6"/>'
                )
    return "\n".join([*parts, "</svg>\n"])


def measure(count: int) -> dict[str, list[Field]]:
    groups = {}
    with Engine(device="cpu", dtype="float32", config=EngineConfig(num_threads=1)) as engine:
        groups["scenes"] = list(answered(engine, scenes(count, seed=51), 160))
        groups[f"blurred scenes ({BLUR:g} px)"] = list(answered(engine, scenes(count, 52, BLUR), 160))
    files = sorted(SMOLLM2.glob("*.gguf"))
    if files:
        config = EngineConfig(max_model_len=512, num_blocks=600, max_num_seqs=16, num_threads=1)
        with Engine(files[0], device="cpu", dtype="float32", config=config) as engine:
            groups["forms (SmolLM2)"] = list(answered(engine, forms(count, seed=53), 120))
    else:
        print("SmolLM2 is not available: forms are left out")
    return groups


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    groups = measure(40 if options.quick else options.count)
    tables, facts = tables_of(groups), machine_lines(threads=1)
    show(tables, facts)
    if options.out:
        picture = options.out.with_suffix(".svg")
        facts.append(f"![Share of right fields over mean p; areas show the number of fields]({picture.name})")
        options.out.write_text(markdown("Calibration of the confidences of fields", tables, facts))
        picture.write_text(svg_of(groups))


if __name__ == "__main__":
    main()
