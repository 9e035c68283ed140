"""Linear layers of bfloat16 and FP8 weights beside one read of these, and beside torch's own in bfloat16.

    python benchmarks/linears.py                 one thread
    python benchmarks/linears.py --threads 2
    MMENGINE_NATIVE_ISA=avx2 python benchmarks/linears.py

24 layers of 2,048 x 4,096, so that no cache holds them; FP8 in blocks of 128 x 128. The least
of several rounds. "share of a read": the time of a torch sum over as many bytes, over that of the layers.
"""

import argparse
import time
from collections.abc import Callable

import torch

from mmengine.native.cpu import usable_isas
from mmengine.native.library import load
from mmengine.native.linear import Fp8Pieces, PackedLinear

IN, OUT, LAYERS = 2048, 4096, 24
ROWS = (1, 4, 12, 16, 64, 512)
BLOCK = 128


def least(work: Callable[[], object], rounds: int) -> float:
    """Seconds."""
    found = []
    for _ in range(rounds):
        begun = time.perf_counter()
        work()
        found.append(time.perf_counter() - begun)
    return min(found)


def in_fp8(weight: torch.Tensor) -> Fp8Pieces:
    blocks = weight.float().view(OUT // BLOCK, BLOCK, IN // BLOCK, BLOCK)
    scales = blocks.abs().amax((1, 3), keepdim=True) / 448
    codes = (blocks / scales).to(torch.float8_e4m3fn).view(torch.uint8).view(OUT, IN)
    return Fp8Pieces(OUT, IN, BLOCK, [(0, codes, scales[:, 0, :, 0].repeat_interleave(BLOCK, 0))])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    library = load()
    if library is None:
        raise SystemExit("there are no kernels here: mmengine env says why")
    weights = [torch.randn(OUT, IN).bfloat16() * 0.02 for _ in range(LAYERS)]
    packed = [PackedLinear(library, weight) for weight in weights]
    packed_fp8 = [PackedLinear(library, in_fp8(weight)) for weight in weights]
    as_many_bytes = torch.randn(LAYERS * OUT * IN // 2)
    read = least(as_many_bytes.sum, 9)
    read_fp8 = read * (1 + 4 / BLOCK) / 2
    print(f"kernels {usable_isas()[0]}, threads {torch.get_num_threads()}, one read {read * 1e3:.1f} ms\n")
    print("| rows | bf16, ms | share of a read | FP8, ms | share of a read | bf16 over FP8 | torch, ms |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for rows in ROWS:
        x, rounds = torch.randn(rows, IN).bfloat16(), 9 if rows < 100 else 3
        ours = least(lambda x=x: [layer(x) for layer in packed], rounds)
        fp8 = least(lambda x=x: [layer(x) for layer in packed_fp8], rounds)
        theirs = least(lambda x=x: [x @ weight.T for weight in weights], rounds)
        print(
            f"| {rows} | {ours * 1e3:.1f} | {read / ours:.2f} | {fp8 * 1e3:.1f} | {read_fp8 / fp8:.2f} | "
            f"{ours / fp8:.2f} | {theirs * 1e3:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
