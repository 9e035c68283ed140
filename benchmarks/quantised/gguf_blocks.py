"""Measure CPU matmuls with each GGUF type, stored as blocks, as codes, or as dequantised values.

    python -m benchmarks gguf_blocks    # into benchmarks/results/gguf_blocks_cpu.md: ten minutes

A single process with a single thread measures all instruction sets of this CPU in turn. Each instruction set
uses its default dtype for GGUF files. Times are CPU times. There are too many layers to fit in the CPU's
caches.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import torch
import typer

from benchmarks.common.report import Table, machine_lines, markdown, show
from mmengine.checkpoint.gguf.types import BLOCKS, TYPES, StoredType
from mmengine.checkpoint.tensors import Coding
from mmengine.native.blocks import ChunkedBlocks, multiplies_blocks
from mmengine.native.cpu import usable_isas
from mmengine.native.library import open_isa
from mmengine.native.linear import (
    AnyWeight,
    ChunkedCodes,
    ChunkedWeight,
    Codes,
    Form,
    PackedLinear,
    RowForm,
    multiplies_int16,
)
from tests.gguf.writing import packed

RESULTS = Path(__file__).parents[1] / "results" / "gguf_blocks_cpu.md"
TITLE = "GGUF's types in the kernels"
N, K = 2048, 1536
LEAST_BYTES = 40e6  # Minimum size of all layers together, in the smallest storage form.
UNIT = 1e8  # Times are scaled to this number of weights.
ROWS = (1, 2, 4, 16, 512)
# For inputs with at least this many rows, two layers are enough. Reading the weights then takes a small share
# of the time.
FEW_LAYERS = 100
FORMS = {"int8": Form.INT8, "int4": Form.INT4}
Layers = dict[tuple[str, str], list[PackedLinear]]  # Keyed by (instruction set, storage form).


def main(
    kinds: Annotated[str, typer.Option(help="Types, separated by commas.")] = ",".join(sorted(BLOCKS)),
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    only: Annotated[str, typer.Option(help="Instruction sets, separated by commas.")] = "",
    out: Annotated[Path, typer.Option(help="Markdown file for the table.")] = RESULTS,
) -> None:
    """Measure on this machine."""
    torch.set_num_threads(1)
    isas = [isa for isa in usable_isas()[::-1] if not only or isa in only.split(",")]
    head = ("type", "instruction set", "dtype", "held as", *(f"{rows} rows" for rows in ROWS))
    table = Table("ms of CPU time for 100 million weights", head)
    for kind in kinds.split(","):
        layers = _layers(kind, isas)
        took = {rows: _measured(layers, rows, rounds) for rows in ROWS}
        for isa, form in layers:
            cells = [f"{took[rows][isa, form]:.2f}" for rows in ROWS]
            table.rows.append((kind, isa, _dtype_name(isa), form, *cells))
        print(*table.rows[-len(layers) :], sep="\n", flush=True)
    table.notes.append(f"Layers of {K:,} x {N:,}; medians of {rounds} rounds, in which all forms take turns.")
    show([table], lines := machine_lines(threads=1))
    out.write_text(markdown(TITLE, [table], lines), encoding="utf-8")


def _dtype(isa: str) -> torch.dtype:
    return torch.bfloat16 if isa in ("avx512_bf16", "amx") else torch.float32


def _dtype_name(isa: str) -> str:
    return str(_dtype(isa)).removeprefix("torch.")


def _layers(kind: str, isas: list[str]) -> Layers:
    """Return the same number of layers for each instruction set and storage form."""
    number = BLOCKS[kind].number
    of, blocks = TYPES[number], np.frombuffer(packed(kind, (N, K), 0), np.uint8).reshape(N, -1)
    made: dict[tuple[str, str], Callable[[], PackedLinear]] = {}
    for isa in isas:
        library, dtype = open_isa(isa), _dtype(isa)
        if isa == "amx" and not library.mm_allow_amx():
            raise RuntimeError("this process may not use AMX")

        def pack(weight: Callable[[], AnyWeight], library=library) -> Callable[[], PackedLinear]:
            return lambda: PackedLinear(library, weight())

        if multiplies_blocks(library, dtype):
            chunks = [(0, torch.tensor(blocks))]
            made[isa, "blocks"] = pack(
                lambda dtype=dtype, chunks=chunks: ChunkedBlocks(N, K, ((0, number),), chunks, dtype)
            )
        form, weight = _other_form(of, blocks, dtype)
        made[isa, form] = pack(weight)
        if of.coding == Coding("int8", 32) and multiplies_int16(library):
            made[isa, f"{form}, int16 rows"] = pack(lambda weight=weight: _with_int16_rows(weight()))
    first = {key: make() for key, make in made.items()}
    count = int(LEAST_BYTES / min(layer._packed.nbytes for layer in first.values()))
    return {key: [layer, *(made[key]() for _ in range(count))] for key, layer in first.items()}


def _other_form(
    of: StoredType, blocks: np.ndarray, dtype: torch.dtype
) -> tuple[str, Callable[[], AnyWeight]]:
    """Return the storage form that replaces blocks, and a function that makes a weight in this form."""
    rows = blocks.reshape(-1, of.bytes)
    if of.coding is None or of.codes is None:
        values = torch.from_numpy(np.array(of.decode(rows))).view(N, K).to(dtype)
        return "values", lambda: ChunkedWeight.of(values)
    parts = [None if each is None else torch.tensor(each.reshape(N, -1)) for each in of.codes(rows)]
    assert parts[0] is not None and parts[1] is not None
    codes, coding = Codes(parts[0], parts[1], parts[2]), of.coding
    return coding.form, lambda: ChunkedCodes(
        N, K, FORMS[coding.form], coding.group, [(0, codes)], coding.mins, dtype=dtype
    )


def _with_int16_rows(weight: AnyWeight) -> AnyWeight:
    assert isinstance(weight, ChunkedCodes)
    return replace(weight, row_form=RowForm.INT16)


def _measured(layers: Layers, rows: int, rounds: int) -> dict[tuple[str, str], float]:
    """Return the median time in ms for each key in `layers`."""
    x = torch.randn(rows, K, generator=torch.Generator().manual_seed(0))
    took: dict[tuple[str, str], list[float]] = {key: [] for key in layers}
    for _ in range(rounds):
        for key, seconds in _round(layers, x):
            took[key].append(seconds * 1e3)
    return {key: median(each) for key, each in took.items()}


def _round(layers: Layers, x: torch.Tensor) -> Iterator[tuple[tuple[str, str], float]]:
    for key, every in layers.items():
        some = every[:2] if len(x) >= FEW_LAYERS else every
        inputs, out = x.to(_dtype(key[0])), torch.empty((len(x), N), dtype=_dtype(key[0]))
        some[0](inputs, out=out)
        start = time.process_time()
        for layer in some:
            layer(inputs, out=out)
        yield key, (time.process_time() - start) * UNIT / (N * K * len(some))


if __name__ == "__main__":
    typer.run(main)
