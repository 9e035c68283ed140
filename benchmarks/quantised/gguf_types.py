"""Measure the error of each GGUF type in a real model's next token, and its decode speed, for each dtype.

    python -m benchmarks gguf_types            # the error, into benchmarks/results/gguf_types.md: 10 min
    python -m benchmarks gguf_types --speed    # the speed, into benchmarks/results/gguf_types_speed.md: 5 min

`--resume` continues an interrupted run.

SmolLM2-135M-Instruct (build/smollm2, see tests/gguf/fetched.py) has Q4_1 weights. tests/gguf/quantising.py
rounds the model's matrices to every other type that the engine reads. With each instruction set of this CPU,
the engine loads each file in float32 and in bfloat16, and reads 512 tokens from a page in docs/. Each
next-token distribution is compared with two references in float32 from dequantised weights. The reference
from the same file shows the error of the computation. The reference from the original Q4_1 file also shows
the type's rounding.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import gguf
import numpy as np
import torch
import typer

from benchmarks.common.report import Table, machine_lines, markdown, show
from benchmarks.quantised.quantised_error import (
    PAGE,
    difference,
    log_probabilities,
    read_token_ids,
    write_folder,
)
from mmengine import Engine, EngineConfig
from mmengine.native.cpu import CHOICE, NEEDS, usable_isas
from mmengine.serve.prompt.prompt import Prompt
from tests.gguf.fetched import BUILD, SMOLLM2, fetched
from tests.gguf.quantising import FLOATS, NARROW, quantise
from tests.gguf.writing import BLOCKS

RESULTS = Path(__file__).parents[1] / "results"
ROWS = BUILD / "gguf_types.json"
ORIGINAL = "Q4_1"
KINDS = (*FLOATS, *(kind for kind in BLOCKS if kind not in FLOATS))
DTYPES = ("float32", "bfloat16")
TOKENS = 512
STEPS, ROUNDS = 48, 3  # Decode steps per round, and rounds.
ERROR = "Error of GGUF types in the next token"
SPEED = "Decode speed of GGUF types"
NOTES = {
    ERROR: f"{TOKENS:,} tokens of {PAGE.name}. KLD in nats. 'Computation' compares with the same file's "
    "weights in float32, 'with the type' with the original file's.",
    SPEED: f"Tokens per second of CPU time at one row and one thread: the median of {ROUNDS} rounds of "
    f"{STEPS} steps after a prompt of 16 tokens. Both dtypes take turns.",
}
FILES = (
    "SmolLM2-135M-Instruct: the original Q4_1 file, and its matrices rounded to nearest (llama.cpp's own "
    "files lose less). The embedding stays Q8_0, as in the original, except in files of plain floats. Rows "
    "of 576 values are not whole blocks of 256, so 180 of 210 matrices take the type that llama.cpp's "
    f"quantiser takes there: {', '.join(f'{narrow} for {kind}' for kind, narrow in NARROW.items())}. "
    "A star marks the default dtype."
)


def main(
    speed: Annotated[bool, typer.Option(help="Measure the speed, and not the error.")] = False,
    kinds: Annotated[str, typer.Option(help="Types, separated by commas.")] = ",".join(KINDS),
    resume: Annotated[bool, typer.Option(help="Measure only types without rows from earlier runs.")] = False,
    rows: Annotated[Path, typer.Option(help="JSON file with the rows of all runs.")] = ROWS,
    out: Annotated[Path | None, typer.Option(help="Markdown file for the tables.")] = None,
) -> None:
    """Compare all types, on every instruction set of this CPU."""
    title = SPEED if speed else ERROR
    usable = usable_isas()[::-1]
    for isa in usable[:-1] if CHOICE not in os.environ else ():  # This process measures the fastest set.
        environment = os.environ | {CHOICE: isa}
        subprocess.run(
            [sys.executable, "-m", "benchmarks", "gguf_types", *sys.argv[1:]], env=environment, check=True
        )
    _measure(usable[-1], kinds.split(","), _speeds if speed else _errors, title, rows, resume)
    columns: tuple[str, ...] = ("computation", "same top token", "with the type", "same top token ")
    if speed:
        columns = ("tokens per CPU second",)
    tables = []
    for isa, found in _read(rows).get(title, {}).items():
        table = Table(isa, ("file", "dtype", "in memory as", *columns))
        table.rows = [(kind, *row) for kind in KINDS for row in found.get(kind, [])]
        table.notes.append(NOTES[title])
        tables.append(table)
    lines = [*machine_lines(threads=1), FILES]
    if missing := [each for each in NEEDS if each not in (table.title for table in tables)]:
        lines.append(f"Not measured here: {', '.join(missing)}.")
    show(tables, lines)
    path = out or RESULTS / f"gguf_types{'_speed' if speed else ''}.md"
    path.write_text(markdown(title, tables, lines), encoding="utf-8")


Rows = list[tuple[str, ...]]
Measure = Callable[[Path, str], Rows]


def _measure(
    isa: str, kinds: list[str], make: Callable[[], Measure], title: str, rows: Path, resume: bool
) -> None:
    """Measure each type with this process's instruction set, and write the rows after each type."""
    known = _read(rows).get(title, {}).get(isa, {}) if resume else {}
    if not (left := [kind for kind in kinds if kind not in known]):
        return
    measure = make()
    for kind in left:
        with tempfile.TemporaryDirectory() as made:
            found = measure(requantise(fetched(SMOLLM2), Path(made) / f"{kind}.gguf", kind), made)
        whole = _read(rows)
        whole.setdefault(title, {}).setdefault(isa, {})[kind] = found
        rows.write_text(json.dumps(whole))
        print(f"{isa} {kind}", file=sys.stderr)


def _read(rows: Path) -> dict[str, dict[str, dict[str, Rows]]]:
    """Return the rows of earlier runs, keyed by title, instruction set and type."""
    return json.loads(rows.read_text()) if rows.exists() else {}


def requantise(file: Path, out: Path, kind: str) -> Path:
    """Write the model to `out` with matrices of type `kind`, and return the path."""
    if kind == ORIGINAL:
        return file
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        shape = tuple(map(int, reversed(tensor.shape)))
        stays = len(shape) == 1 or (tensor.name == "token_embd.weight" and kind not in FLOATS)
        whole = shape[-1] % BLOCKS[kind][1] == 0
        held = tensor.tensor_type.name if stays else kind if whole else NARROW[kind]
        number, values, size = BLOCKS[held]
        if stays:
            data = tensor.data.tobytes()
        else:
            data = quantise(held, gguf.dequantize(tensor.data, tensor.tensor_type).reshape(shape))
        rows = (*shape[:-1], shape[-1] // values * size)
        blocks = np.frombuffer(data, np.uint8).reshape(rows)
        writer.add_tensor(tensor.name, blocks, raw_dtype=gguf.GGMLQuantizationType(number))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _errors() -> Measure:
    with tempfile.TemporaryDirectory() as made:
        plain = write_folder(fetched(SMOLLM2), Path(made) / "plain", torch.float32)
        token_ids = read_token_ids(plain)[:TOKENS]
        original, _ = log_probabilities(plain, token_ids, "float32")
    return partial(_errors_of, original, token_ids)


def _errors_of(original: torch.Tensor, token_ids: list[int], file: Path, made: str) -> Rows:
    wanted = original
    if file != fetched(SMOLLM2):
        wanted, _ = log_probabilities(
            write_folder(file, Path(made) / "plain", torch.float32), token_ids, "float32"
        )
    names = _star(file)
    rows: Rows = []
    for dtype in DTYPES:
        found, held = log_probabilities(file, token_ids, dtype)
        errors = *difference(wanted, found), *difference(original, found)
        rows.append((names[dtype], held or dtype, *errors))
    return rows


def _speeds() -> Measure:
    return _speeds_of


def _speeds_of(file: Path, made: str) -> Rows:
    config = EngineConfig(spec="none", max_model_len=256, num_threads=1, enable_prefix_caching=False)
    seconds: dict[str, list[float]] = {dtype: [] for dtype in DTYPES}
    with ExitStack() as stack:
        engines = {
            dtype: stack.enter_context(Engine(file, device="cpu", dtype=dtype, config=config))
            for dtype in DTYPES
        }
        for number in range(-1, ROUNDS):  # The first round only warms up.
            for dtype in DTYPES[:: -1 if number % 2 else 1]:
                took = _decode(engines[dtype])
                if number >= 0:
                    seconds[dtype].append(took)
        held = {dtype: engine.built.spec.weights_held or dtype for dtype, engine in engines.items()}
    names = _star(file)
    return [(names[dtype], held[dtype], f"{STEPS / median(seconds[dtype]):.1f}") for dtype in DTYPES]


def _decode(engine: Engine) -> float:
    """Return the CPU time for STEPS decode steps of one request, in seconds."""
    engine.submit(Prompt(token_ids=list(range(1000, 1016))), max_tokens=STEPS + 1, ignore_eos=True)
    tokens = 0
    while not tokens:
        tokens += sum(len(output.token_ids) for output in engine.step())
    gc.collect()
    start = time.process_time()
    while tokens < STEPS + 1:
        tokens += sum(len(output.token_ids) for output in engine.step())
    took = time.process_time() - start
    while engine.has_work:
        engine.step()
    return took


def _star(file: Path) -> dict[str, str]:
    """Return each dtype's name, with a star after the file's default dtype on this machine."""
    with Engine(file, device="cpu", config=EngineConfig(max_model_len=256)) as engine:
        return {dtype: f"{dtype} *" if dtype == engine.built.dtype else dtype for dtype in DTYPES}


if __name__ == "__main__":
    typer.run(main)
