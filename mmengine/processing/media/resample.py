"""Resizes uint8 frames with numpy. The results have the same bits as the results of torch's uint8 kernels.

transformers resizes video frames with `torch.nn.functional.interpolate(antialias=True)` on uint8, in the mode
"bicubic" or "lanczos". torch resizes the width in a first pass and the height in a second pass, and rounds
each pass to uint8. The weights are 16-bit integers with as many fraction bits as the largest weight allows.
float64 represents all sums exactly, so matrix products give the same integers as torch. Pillow's results
differ by one grey value, because Pillow's weights have more bits. The difference is larger where Pillow
resizes the height first.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

Filter = Literal["bicubic", "lanczos"]

CUBIC_A = -0.5  # Keys' kernel, as in Pillow and torch's antialiased path.
BLOCK = 64  # Output samples per matrix product. Larger blocks have a larger share of zero weights.


def resize(planes: np.ndarray, height: int, width: int, by: Filter = "bicubic") -> np.ndarray:
    """Resize uint8 [c, h, w] to uint8 [c, height, width]."""
    channels, old_height, old_width = planes.shape
    if width != old_width:
        rows = _pass(planes.reshape(channels * old_height, old_width).T, width, by)
        planes = rows.T.reshape(channels, old_height, width)
    if height != old_height:
        planes = np.stack([_pass(plane, height, by) for plane in planes])
    return np.ascontiguousarray(planes)


def _pass(lines: np.ndarray, size: int, by: Filter) -> np.ndarray:
    """Resize along the first axis: uint8 [n, m] becomes uint8 [size, m]."""
    blocks, precision = _weights(lines.shape[0], size, by)
    lines = lines.astype(np.float64)
    out = np.empty((size, lines.shape[1]), np.uint8)
    for start, first, matrix in blocks:
        total = matrix @ lines[first : first + matrix.shape[1]]
        total += 1 << (precision - 1)
        total *= 2.0**-precision
        np.floor(total, out=total)
        out[start : start + matrix.shape[0]] = np.clip(total, 0, 255, out=total)
    return out


@lru_cache(maxsize=64)
def _weights(old: int, new: int, by: Filter) -> tuple[tuple[tuple[int, int, np.ndarray], ...], int]:
    """Return blocks of weights, and the number of fraction bits in the weights.

    A block is (first output, first input, weights [outputs, inputs]).
    """
    kernel = _KERNELS[by]
    scale = old / new
    stretch = max(scale, 1.0)
    centers = scale * (np.arange(new) + 0.5)
    low = np.maximum((centers - kernel.reach * stretch + 0.5).astype(np.int64), 0)
    high = np.minimum((centers + kernel.reach * stretch + 0.5).astype(np.int64), old)
    taps = low[:, None] + np.arange(int((high - low).max()))
    weights = kernel.weight((taps - centers[:, None] + 0.5) / stretch) * (taps < high[:, None])
    weights /= weights.sum(axis=1, keepdims=True)
    precision = 0
    while precision < 22 and int(0.5 + weights.max() * (1 << (precision + 1))) < 1 << 15:
        precision += 1
    fixed = np.trunc(weights * (1 << precision) + np.copysign(0.5, weights))
    blocks = []
    for start in range(0, new, BLOCK):
        stop = min(start + BLOCK, new)
        first, last = int(low[start]), int(high[stop - 1])
        matrix = np.zeros((stop - start, last - first))
        row, tap = np.nonzero(taps[start:stop] < high[start:stop, None])
        matrix[row, taps[start:stop][row, tap] - first] = fixed[start:stop][row, tap]
        blocks.append((start, first, matrix))
    return tuple(blocks), precision


def _cubic(x: np.ndarray) -> np.ndarray:
    x = np.abs(x)
    near = ((CUBIC_A + 2) * x - (CUBIC_A + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * CUBIC_A
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def _lanczos(x: np.ndarray) -> np.ndarray:
    """Return the Lanczos kernel: a sinc, windowed by a sinc that is three times as wide."""
    return np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0.0)


class _Kernel(NamedTuple):
    reach: int  # Number of input samples on either side if the image is not shrunk.
    weight: Callable[[np.ndarray], np.ndarray]


_KERNELS: dict[Filter, _Kernel] = {"bicubic": _Kernel(2, _cubic), "lanczos": _Kernel(3, _lanczos)}
