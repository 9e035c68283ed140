"""Quantises values into GGUF's blocks by rounding to nearest, for tests and benchmarks.

This module quantises IQ4_NL, IQ4_XS and the K-quants, which the `gguf` package only decodes. The package
quantises the other types. A group's scale comes from its extreme values. llama.cpp searches for better scales
and has smaller errors.
"""

from collections.abc import Callable

import gguf
import numpy as np

from mmengine.checkpoint.gguf.k_blocks import IQ4_VALUES

FLOATS = ("F32", "F16", "BF16")
# Type with blocks of 256 values -> llama.cpp's fallback type for rows with partial blocks.
NARROW = dict.fromkeys(("Q2_K", "Q3_K", "IQ4_XS"), "IQ4_NL")
NARROW |= {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def quantise(kind: str, values: np.ndarray) -> bytes:
    """Return float32 `values` [..., k] as the bytes of whole blocks of type `kind`.

    k must be a multiple of the block's number of values.
    """
    if write := _WRITERS.get(kind):
        size = 32 if kind == "IQ4_NL" else 256
        return write(np.ascontiguousarray(values, np.float32).reshape(-1, size)).tobytes()
    return gguf.quantize(values, gguf.GGMLQuantizationType[kind]).tobytes()


def _half(values: np.ndarray) -> np.ndarray:
    """Return values [blocks] as float16 bytes, uint8 [blocks, 2]."""
    return values.astype("<f2")[:, None].view(np.uint8)


def _extreme(values: np.ndarray) -> np.ndarray:
    """Return the value with the largest magnitude along the last axis, with its sign."""
    places = np.abs(values).argmax(-1)[..., None]
    return np.take_along_axis(values, places, -1)[..., 0]


def _ratio(values: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Return values / by, and 0 where `by` is 0."""
    return np.divide(values, by, out=np.zeros(np.broadcast(values, by).shape, np.float32), where=by != 0)


def _symmetric(
    blocks: np.ndarray, group: int, least: int, least_scale: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return d as float16 bytes [blocks, 2], integer scales [blocks, groups], and values / (d * scale)
    [blocks, groups, group]. Scales range from `least_scale` to -least_scale - 1. `least`: the smallest code.
    """
    groups = blocks.reshape(len(blocks), -1, group)
    wanted = _extreme(groups) / least
    d = _half(_extreme(wanted) / least_scale)
    exact = d.view("<f2").astype(np.float32)
    scales = _ratio(wanted, exact).round().clip(least_scale, -least_scale - 1)
    return d, scales.astype(np.int8), _ratio(groups, (exact * scales)[..., None])


def _with_minimums(
    blocks: np.ndarray, group: int, most: int, most_scale: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return d and dmin as float16 bytes [blocks, 4], scales and minimums [blocks, groups] up to
    `most_scale`, and codes [blocks, 256] up to `most`.
    """
    groups = blocks.reshape(len(blocks), -1, group)
    low = np.minimum(groups.min(-1), 0)
    steps = (groups.max(-1) - low) / most
    halves = np.concatenate((_half(steps.max(-1) / most_scale), _half((-low).max(-1) / most_scale)), axis=1)
    d, dmin = np.ascontiguousarray(halves).view("<f2").astype(np.float32).T[..., None]
    scales = _ratio(steps, d).round().clip(0, most_scale)
    mins = _ratio(-low, dmin).round().clip(0, most_scale)
    codes = _ratio(groups + (dmin * mins)[..., None], (d * scales)[..., None]).round().clip(0, most)
    shared = scales.astype(np.uint8), mins.astype(np.uint8)
    return halves, *shared, codes.astype(np.uint8).reshape(len(blocks), -1)


def _nearest(values: np.ndarray) -> np.ndarray:
    """Return for each value the index of the nearest entry in IQ4_VALUES, uint8."""
    middles = (IQ4_VALUES[1:].astype(np.float32) + IQ4_VALUES[:-1]) / 2
    return np.searchsorted(middles, values).astype(np.uint8)


def _pack(codes: np.ndarray, parts: int, width: int, shift: int) -> np.ndarray:
    """Pack codes [blocks, n]. A run has `width` codes. Each group of `parts` runs is packed into `width`
    bytes, each run `shift` bits higher than the previous run.
    """
    runs = codes.reshape(len(codes), -1, parts, width) << (shift * np.arange(parts, dtype=np.uint8))[:, None]
    return np.bitwise_or.reduce(runs, axis=2).reshape(len(codes), -1)


def _six_bits(scales: np.ndarray, mins: np.ndarray) -> np.ndarray:
    """Pack eight scales and eight minimums of six bits into 12 bytes."""
    first = scales[:, :4] | scales[:, 4:] >> 4 << 6
    second = mins[:, :4] | mins[:, 4:] >> 4 << 6
    return np.concatenate((first, second, scales[:, 4:] & 15 | (mins[:, 4:] & 15) << 4), axis=1)


def _q2_k(blocks: np.ndarray) -> np.ndarray:
    halves, scales, mins, codes = _with_minimums(blocks, 16, 3, 15)
    return np.concatenate((scales | mins << 4, _pack(codes, 4, 32, 2), halves), axis=1)


def _q3_k(blocks: np.ndarray) -> np.ndarray:
    d, scales, ratios = _symmetric(blocks, 16, -4, -32)
    codes = (ratios.round().clip(-4, 3) + 4).astype(np.uint8).reshape(len(blocks), -1)
    shared = (scales + np.int8(32)).view(np.uint8)
    packed = np.concatenate((_pack(shared & 15, 2, 8, 4), _pack(shared >> 4, 4, 4, 2)), axis=1)
    return np.concatenate((_pack(codes >> 2, 8, 32, 1), _pack(codes & 3, 4, 32, 2), packed, d), axis=1)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    halves, scales, mins, codes = _with_minimums(blocks, 32, 15, 63)
    return np.concatenate((halves, _six_bits(scales, mins), _pack(codes, 2, 32, 4)), axis=1)


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    halves, scales, mins, codes = _with_minimums(blocks, 32, 31, 63)
    high = _pack(codes >> 4, 8, 32, 1)
    return np.concatenate((halves, _six_bits(scales, mins), high, _pack(codes & 15, 2, 32, 4)), axis=1)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    d, scales, ratios = _symmetric(blocks, 16, -32, -128)
    codes = (ratios.round().clip(-32, 31) + 32).astype(np.uint8).reshape(len(blocks), -1)
    packed = (_pack(codes & 15, 2, 64, 4), _pack(codes >> 4, 4, 32, 2))
    return np.concatenate((*packed, scales.view(np.uint8), d), axis=1)


def _iq4_nl(blocks: np.ndarray) -> np.ndarray:
    d = _half(_extreme(blocks) / -127)
    ratios = _ratio(blocks, d.view("<f2").astype(np.float32))
    return np.concatenate((d, _pack(_nearest(ratios), 2, 16, 4)), axis=1)


def _iq4_xs(blocks: np.ndarray) -> np.ndarray:
    d, scales, ratios = _symmetric(blocks, 32, -127, -32)
    shared = (scales + np.int8(32)).view(np.uint8)
    high = np.bitwise_or.reduce((shared >> 4).astype("<u2") << np.arange(0, 16, 2, dtype="<u2"), axis=1)
    low = shared[:, ::2] & 15 | (shared[:, 1::2] & 15) << 4
    codes = _pack(_nearest(ratios).reshape(len(blocks), -1), 2, 16, 4)
    return np.concatenate((d, high.astype("<u2")[:, None].view(np.uint8), low, codes), axis=1)


_WRITERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
