"""Measure how much `field_confidence` adds to the time of a decode step.

    python -m benchmarks field_confidence

16 rows decode with a schema, on half a billion random weights in bfloat16, with one thread. Runs with and
without `field_confidence` alternate, and every second round reverses their order. The result is the process's
CPU time per decode step; the first step does not count. Without `field_confidence`, a greedy row checks only
its most likely token. With `field_confidence`, each step computes a mask, so the difference includes the time
for masks.

The model's vocabulary is small. A second table therefore shows the sampler's time with larger vocabularies,
as a percentage of a decode step. Its masks allow most tokens, as inside a JSON string.

    --rounds N     rounds (default 10)
    --quick        3 rounds
    --json         print the targets as a last line of JSON
    --out FILE.md  file for the tables
"""

import argparse
from pathlib import Path
from statistics import median
from time import process_time_ns

import numpy as np

from benchmarks.common.measure import use_threads

use_threads(1)  # before torch is loaded

import torch  # noqa: E402

from benchmarks.common.half_billion_model import cached_folder  # noqa: E402
from benchmarks.common.repeat import interval  # noqa: E402
from benchmarks.common.report import Table, Target, finish  # noqa: E402
from mmengine.config import EngineConfig  # noqa: E402
from mmengine.runtime.rows import CONFIDENCE, GRAMMAR  # noqa: E402
from mmengine.runtime.sampling.confidence import confidences_of, weigh_allowed  # noqa: E402
from mmengine.serve.engine.engine import Engine  # noqa: E402
from mmengine.structured_output.rows.rows import Masks  # noqa: E402

ROWS, TOKENS = 16, 24
SHARE = 5.0  # maximum percentage of a decode step
SCHEMAS = {
    "strings": {"type": "string", "minLength": 400},
    "enums": {"type": "array", "items": {"enum": ["red", "green", "blue", "pink"]}, "minItems": 30},
}
VOCABULARIES = (65_536, 151_936)


def step_times(engine: Engine, schema: object, confidence: bool, salt: str) -> list[float]:
    """Return the CPU time in µs of each step in which all rows get a token, without the first such step."""
    form = {"type": "json_schema", "json_schema": {"schema": schema}, "field_confidence": confidence}
    for row in range(ROWS):
        engine.submit(
            f"Answer number {row}.", max_tokens=TOKENS, response_format=form, stream=False, cache_salt=salt
        )
    times = []
    while engine.has_work:
        begin = process_time_ns()
        outputs = engine.step()
        if len(outputs) == ROWS and not any(output.completion for output in outputs):
            times.append((process_time_ns() - begin) / 1e3)
    return times[1:]


def sampler_times(vocab: int, rounds: int) -> list[float]:
    """Return the CPU times in µs of the sampler's work for ROWS rows, with masks that allow 90 % of the
    tokens.
    """
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(0, 3, (ROWS, vocab)).astype(np.float32))
    allowed = rng.random((ROWS, -(-vocab // 32) * 32)) < 0.9
    masks = Masks(np.arange(ROWS), np.packbits(allowed, axis=1, bitorder="little").view(np.uint32))
    options, tokens = np.full(ROWS, GRAMMAR | CONFIDENCE), torch.zeros(ROWS, dtype=torch.int64)
    times = []
    for _ in range(5 * rounds):
        begin = process_time_ns()
        weights = weigh_allowed(logits, masks, options)
        assert weights is not None
        confidences_of(weights, logits, tokens)
        times.append((process_time_ns() - begin) / 1e3)
    return times[1:]


def measure(rounds: int) -> tuple[list[Table], list[Target]]:
    config = EngineConfig(spec="none", max_model_len=1024, max_num_seqs=ROWS, num_blocks=ROWS * 32)
    steps = Table("Decode step", ("answers", "µs without", "µs with", "% more", "95 %"))
    targets, plain = [], []
    with Engine(cached_folder(), device="cpu", dtype="bfloat16", config=config) as engine:
        for name, schema in SCHEMAS.items():
            ratios, found = [], {False: [], True: []}
            for number in range(rounds):
                for confidence in (False, True) if number % 2 else (True, False):
                    times = step_times(engine, schema, confidence, f"{name} {number}")
                    found[confidence].append(median(times))
                ratios.append(100 * (found[True][-1] / found[False][-1] - 1))
            share, low, high = interval(ratios)
            times = [f"{median(found[each]):,.0f}" for each in (False, True)]
            steps.rows.append((name, *times, f"{share:.2f}", f"{low:.2f} to {high:.2f}"))
            targets.append(Target(f"% of a step, {name}", share, SHARE, most=True))
            plain += found[False]
    alone = Table("The sampler's work alone", ("vocabulary", "µs", "% of a step"))
    for vocab in VOCABULARIES:
        spent = median(sampler_times(vocab, rounds))
        share = 100 * spent / median(plain)
        alone.rows.append((f"{vocab:,}", f"{spent:,.0f}", f"{share:.2f}"))
        targets.append(Target(f"% of a step, dense masks over {vocab:,} tokens", share, SHARE, most=True))
    alone.notes.append(
        "Masks allow nine tokens in ten. The share is relative to the median step without confidences above."
    )
    return [steps, alone], targets


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    tables, targets = measure(3 if options.quick else options.rounds)
    finish("Confidences of fields in a decode step", tables, targets, options)


if __name__ == "__main__":
    main()
