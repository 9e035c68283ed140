"""Time linear layers with bfloat16 and quantised weights, and compare with torch and a plain memory read.

    python -m benchmarks linears                 one thread
    python -m benchmarks linears --threads 2
    MMENGINE_NATIVE_ISA=avx2 python -m benchmarks linears

The 24 layers (2,048 x 4,096) exceed every CPU cache. torch computes in bfloat16. Each figure is the minimum
over several rounds. In the output, "rows too" means that the inputs are also quantised to int8. "share of a
read" is the time in which torch sums as many bytes as the layers have, divided by the layers' time.
"""

import argparse
import time
from collections.abc import Callable

import torch

from mmengine.native.cpu import usable_isas
from mmengine.native.library import load
from mmengine.native.linear import ChunkedCodes, Codes, Form, PackedLinear, RowForm

IN, OUT, LAYERS = 2048, 4096, 24
ROWS = (1, 2, 4, 8, 12, 16, 32, 64, 512)
BLOCK = 128


def least(work: Callable[[], object], rounds: int) -> float:
    """Run `work` `rounds` times, and return the shortest time in seconds."""
    found = []
    for _ in range(rounds):
        begun = time.perf_counter()
        work()
        found.append(time.perf_counter() - begun)
    return min(found)


def in_fp8(weight: torch.Tensor) -> ChunkedCodes:
    blocks = weight.float().view(OUT // BLOCK, BLOCK, IN // BLOCK, BLOCK)
    scales = blocks.abs().amax((1, 3), keepdim=True) / 448
    codes = (blocks / scales).to(torch.float8_e4m3fn).view(torch.uint8).view(OUT, IN)
    shared = scales[:, 0, :, 0].repeat_interleave(BLOCK, 0)
    return ChunkedCodes(OUT, IN, Form.FP8, BLOCK, [(0, Codes(codes, shared))])


def in_whole_numbers(
    weight: torch.Tensor, form: Form, group: int, *, mins: bool = False, row_form: RowForm = RowForm.FLOAT
) -> ChunkedCodes:
    most = 127 if form is Form.INT8 else 7
    groups = weight.float().view(OUT, IN // group, group)
    scales = (groups.abs().amax(2) / most).half().float()
    codes = (groups / scales[..., None]).round().clamp(-most, most).to(torch.int8).view(OUT, IN)
    shared = Codes(codes, scales, scales * 0.5 if mins else None)
    return ChunkedCodes(OUT, IN, form, group, [(0, shared)], mins, row_form)


FORMS: dict[str, tuple[Callable[[torch.Tensor], ChunkedCodes], float]] = {  # function, bytes per weight
    "FP8 128 x 128": (in_fp8, 1 + 4 / BLOCK),
    "int8 g 32": (lambda weight: in_whole_numbers(weight, Form.INT8, 32), 1 + 2 / 32),
    "int4 g 128": (lambda weight: in_whole_numbers(weight, Form.INT4, 128), 0.5 + 2 / 128),
    "int4 g 128, mins": (lambda weight: in_whole_numbers(weight, Form.INT4, 128, mins=True), 0.5 + 6 / 128),
    "int8 g 32, rows too": (
        lambda weight: in_whole_numbers(weight, Form.INT8, 32, row_form=RowForm.INT8),
        1 + 2 / 32,
    ),
    "int4 g 128, rows too": (
        lambda weight: in_whole_numbers(weight, Form.INT4, 128, row_form=RowForm.INT8),
        0.5 + 2 / 128,
    ),
    "int4 g 32": (lambda weight: in_whole_numbers(weight, Form.INT4, 32), 0.5 + 2 / 32),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    library = load()
    if library is None:
        raise SystemExit("the native kernels are not available: `mmengine env` shows the reason")
    weights = [torch.randn(OUT, IN).bfloat16() * 0.02 for _ in range(LAYERS)]
    packed = [PackedLinear(library, weight) for weight in weights]
    held = {
        name: [PackedLinear(library, made(weight)) for weight in weights] for name, (made, _) in FORMS.items()
    }
    as_many_bytes = torch.randn(LAYERS * OUT * IN // 2)
    read = least(as_many_bytes.sum, 9)
    print(f"kernels {usable_isas()[0]}, threads {torch.get_num_threads()}, one read {read * 1e3:.1f} ms\n")
    print("ms (share of a read of the format's bytes; speed relative to bfloat16)\n")
    print(f"| rows | torch | bf16 | {' | '.join(FORMS)} |")
    print("|---:" * (3 + len(FORMS)) + "|")
    for rows in ROWS:
        x, rounds = torch.randn(rows, IN).bfloat16(), 9 if rows < 100 else 3
        theirs = least(lambda x=x: [x @ weight.T for weight in weights], rounds)
        ours = least(lambda x=x: [layer(x) for layer in packed], rounds)
        cells = [f"{theirs * 1e3:.1f}", f"{ours * 1e3:.1f} ({read / ours:.2f})"]
        for name, (_, size) in FORMS.items():
            took = least(lambda x=x, layers=held[name]: [layer(x) for layer in layers], rounds)
            cells.append(f"{took * 1e3:.1f} ({read * size / 2 / took:.2f}; {ours / took:.2f})")
        print(f"| {rows} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
