"""Linear layers in bfloat16 kernels beside one read of their weights, and beside torch's own.

    python benchmarks/linears.py                 one thread
    python benchmarks/linears.py --threads 2
    MMENGINE_NATIVE_ISA=avx2 python benchmarks/linears.py

24 layers of 2,048 x 4,096, so that no cache holds them. The least of several rounds. "share of a read": the
time of a torch sum over as many bytes, over that of the layers.
"""

import argparse
import time
from collections.abc import Callable

import torch

from mmengine.native.cpu import usable_isas
from mmengine.native.library import load
from mmengine.native.linear import PackedLinear

IN, OUT, LAYERS = 2048, 4096, 24
ROWS = (1, 4, 12, 16, 64, 512)


def least(work: Callable[[], object], rounds: int) -> float:
    """Seconds."""
    found = []
    for _ in range(rounds):
        begun = time.perf_counter()
        work()
        found.append(time.perf_counter() - begun)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    library = load()
    if library is None:
        raise SystemExit("there are no kernels here: mmengine env says why")
    weights = [torch.randn(OUT, IN).bfloat16() * 0.02 for _ in range(LAYERS)]
    packed = [PackedLinear(library, weight) for weight in weights]
    as_many_bytes = torch.randn(LAYERS * OUT * IN // 2)
    read = least(as_many_bytes.sum, 9)
    print(f"kernels {usable_isas()[0]}, threads {torch.get_num_threads()}, one read {read * 1e3:.1f} ms\n")
    print("| rows | kernels, ms | share of a read | GFLOP/s | torch, ms | torch over kernels |")
    print("|---:|---:|---:|---:|---:|---:|")
    for rows in ROWS:
        x, rounds = torch.randn(rows, IN).bfloat16(), 9 if rows < 100 else 3
        ours = least(lambda x=x: [layer(x) for layer in packed], rounds)
        theirs = least(lambda x=x: [x @ weight.T for weight in weights], rounds)
        flops = 2 * rows * LAYERS * OUT * IN / ours / 1e9
        print(
            f"| {rows} | {ours * 1e3:.1f} | {read / ours:.2f} | {flops:.0f} | {theirs * 1e3:.1f} | "
            f"{theirs / ours:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
