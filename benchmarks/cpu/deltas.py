"""Time the gated delta net's mixer on a CPU, and compare the time with a lower bound and with torch.

    python -m benchmarks deltas # writes benchmarks/results/delta_cpu.md, takes half a minute

The sizes come from Qwen3.5-9B: 16 heads for q and k, 32 heads for v, states of 128 x 128 values, bfloat16.
The mixer comprises all operations between the projections: the convolution, the delta rule, the norm and the
gate. The benchmark measures decode steps (a token for each row) and prompts.

The lower bound for a decode step is the time to read and write each row's state (2 MiB). torch's in-place
product measures this time. The lower bound for a prompt is the time for 4 multiply-adds for each state value
and token. torch's float32 matrix product measures this time. Successive calls use the states of different
layers, so no call finds its states in a cache. Each figure is the minimum over several rounds.
"""

import argparse
import ctypes
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import numpy as np
import torch

from benchmarks.common.report import Table, machine_lines, markdown, show
from mmengine.models.decoder.delta import in_chunks, one_by_one
from mmengine.native.cpu import usable_isas
from mmengine.native.delta import DeltaSizes, DeltaSizesStruct, DeltaStruct, StateStep
from mmengine.native.dtypes import DTYPES
from mmengine.native.library import open_isa

RESULTS = Path(__file__).parents[1] / "results" / "delta_cpu.md"
SIZES = DeltaSizes(num_key_heads=16, num_heads=32, key_dim=128, value_dim=128, taps=4)
STATE = SIZES.num_heads * SIZES.key_dim * SIZES.value_dim
CASES = ((1, 1), (16, 1), (1, 64), (1, 256))  # (number of rows, tokens in each row)
LAYERS, MOST_ROWS = 24, 16
SIDE = 512  # rows and columns of the square matrices in the measured product
ROUNDS = 3
DTYPE = torch.bfloat16


States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_states() -> States:
    """Return zeros for all layers and rows: the convolution's last inputs, the state matrices, and the inputs
    of unverified drafts.
    """
    s = SIZES
    return (
        torch.zeros(MOST_ROWS, LAYERS, s.taps - 1, s.width, dtype=DTYPE),
        torch.zeros(MOST_ROWS, LAYERS, s.num_heads, s.key_dim, s.value_dim),
        torch.zeros(MOST_ROWS, LAYERS, 1, s.width + 2 * s.num_heads, dtype=DTYPE),
    )


class Mixer:
    """Calls the native mixer for `rows` rows with `tokens` tokens each. Each call uses the next layer's
    states; all layers share the same random weights.
    """

    def __init__(self, library: ctypes.CDLL, states: States, rows: int, tokens: int) -> None:
        self._mix, s, count = library.mm_delta_mix, SIZES, rows * tokens
        self._mix.argtypes = (*(ctypes.c_void_p,) * 3, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32)
        self._mix.argtypes += (ctypes.c_float, ctypes.c_void_p)
        self._weights = torch.randn(s.taps, s.width), -torch.linspace(0.1, 2, s.num_heads)
        self._weights += torch.randn(s.num_heads), torch.ones(s.value_dim)
        self._c_weights = DeltaStruct()
        for name, weight in zip(("conv", "decay", "dt_bias", "norm"), self._weights, strict=True):
            setattr(self._c_weights, name, weight.data_ptr())
        self._c_sizes = DeltaSizesStruct(s.num_key_heads, s.num_heads, s.key_dim, s.value_dim, s.taps)
        self._step = StateStep(s, DTYPE).point(states, step_arrays(rows, tokens), np.zeros(rows, np.int32))
        widths = (2 * s.num_heads, s.width + s.values)
        self._numbers, self._projected = (torch.randn(count, width).to(DTYPE) for width in widths)
        self._step.c.ba = self._numbers.data_ptr()
        self._mixed = torch.empty(count, s.values, dtype=DTYPE)
        self._layers = cycle(range(LAYERS))

    def __call__(self) -> None:
        """Run the mixer for the next layer."""
        places = (ctypes.addressof(each) for each in (self._c_sizes, self._c_weights, self._step.c))
        what = self._projected.data_ptr(), DTYPES[DTYPE], 1e-6, self._mixed.data_ptr()
        self._mix(*places, next(self._layers), *what)


def step_arrays(rows: int, tokens: int) -> dict[str, np.ndarray]:
    none, each = np.zeros(0, np.int32), np.arange(rows + 1, dtype=np.int32)
    arrays = {"slots": each[:-1], "rows": each[:-1], "query_starts": tokens * each}
    arrays |= {"certain": np.full(rows, tokens, np.int32), "kept_starts": np.zeros(rows + 1, np.int32)}
    return arrays | {"kept_after": none, "kept_slots": none}


def torch_rule(rows: int, tokens: int) -> Callable[[], None]:
    """Return a function that runs torch's delta rule alone, without convolution, norm and gate."""
    heads = (tokens, rows, SIZES.num_heads)
    q, k = (torch.nn.functional.normalize(torch.randn(*heads, SIZES.key_dim), dim=-1) for _ in range(2))
    v, decay, beta = torch.randn(*heads, SIZES.value_dim), -torch.rand(heads), torch.rand(heads)
    states = cycle(torch.zeros(LAYERS, rows, *heads[2:], SIZES.key_dim, SIZES.value_dim))
    rule = one_by_one if tokens == 1 else in_chunks

    def call() -> None:
        state = next(states)
        state.copy_(rule(q, k, v, decay, beta, state)[1])

    return call


def bound_of(rows: int, tokens: int) -> tuple[Callable[[], object], float]:
    """Return a function to measure, and a factor. The lower bound for a layer's time is the function's time,
    multiplied by the factor.
    """
    if tokens == 1:
        values = cycle(torch.ones(LAYERS, rows * STATE))
        return lambda: next(values).mul_(1.0), 1.0
    square = torch.randn(SIDE, SIDE)
    return lambda: square @ square, 4 * STATE * rows * tokens / SIDE**3


def least(call: Callable[[], object]) -> float:
    """Return the call's minimum duration in seconds: CPU time with a single thread, wall time with several
    threads. Other programs have less effect on CPU time.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    found, end = list[float](), clock() + 0.2
    while len(found) < 8 or clock() < end:
        begun = clock()
        call()
        found.append(clock() - begun)
    return min(found)


def least_of(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return each call's minimum duration in seconds. The calls take turns, so other programs slow all calls
    equally.
    """
    rounds = [{name: least(call) for name, call in calls.items()} for _ in range(ROUNDS)]
    return {name: min(each[name] for each in rounds) for name in calls}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    isas, states = usable_isas()[::-1], make_states()
    names = ("", "bound", *(name for isa in isas for name in (isa, "of its bound")), "torch, the rule alone")
    table = Table(f"A layer, µs a token, {args.threads} thread{'s' * (args.threads > 1)}", names)
    with torch.inference_mode():
        for rows, tokens in CASES:
            bound, share = bound_of(rows, tokens)
            calls = {"bound": bound, "torch": torch_rule(rows, tokens)}
            calls |= {isa: Mixer(open_isa(isa), states, rows, tokens) for isa in isas}
            took = least_of(calls)
            took["bound"] *= share
            cells = [f"{took['bound'] * 1e6 / (rows * tokens):.0f}"]
            for isa in isas:
                cells += [f"{took[isa] * 1e6 / (rows * tokens):.0f}", f"{took[isa] / took['bound']:.2f}"]
            what = f"{rows} row{'s' * (rows > 1)} of {tokens} token{'s' * (tokens > 1)}"
            table.rows.append((what, *cells, f"{took['torch'] * 1e6 / (rows * tokens):.0f}"))
    lines = machine_lines(args.threads)
    show([table], lines)
    args.out.write_text(markdown("The gated delta net on a CPU", [table], lines), encoding="utf-8")


if __name__ == "__main__":
    main()
