"""Paged attention for head sizes and machines that FlashInfer does not support. Not yet run on a GPU.

A tile contains consecutive queries from a single row (request), each with all heads that share a KV head
(attention_tiles.py). A program computes one tile after another, and reads KEYS keys at a time. The row's keys
are divided into spans of SPAN keys. Each span gets its own softmax, and the softmaxes are joined in order.
Several programs that share a tile's spans therefore get the same bits as a single program.
"""

import torch
import triton
import triton.language as tl

from mmengine.gpu.attention_tiles import SPAN, Work

_LOG2_E = 1.4426950408889634
_KEY_BYTES = 256  # if a key has more bytes, each read takes half as many keys
_WIDE_BYTES = 2**15  # a tile of at least this many bytes gets 8 warps instead of 4


@triton.jit
def _join(top, mass, total, other_top, other_mass, other_total):
    """Join the softmaxes over two sets of keys.

    For each query, `top` is the highest score, `mass` the sum of the weights, and `total` the weighted sum of
    V. The explicit fma calls make all compilations round alike.
    """
    joined = tl.maximum(top, other_top)
    base = tl.where(joined == float("-inf"), 0.0, joined)
    one, two = tl.exp2(top - base), tl.exp2(other_top - base)
    ones, twos = tl.broadcast_to(one[:, None], total.shape), tl.broadcast_to(two[:, None], total.shape)
    return joined, tl.fma(other_mass, two, mass * one), tl.fma(other_total, twos, total * ones)


@triton.jit
def _values(x, IS_FP8: tl.constexpr, dtype: tl.constexpr):
    """Return `x` in `dtype`. With IS_FP8, `x` contains float8_e4m3fn bytes.

    The byte's bits are shifted into a float16's layout. The factor 256 corrects the exponent's bias.
    """
    if IS_FP8:
        bits = x.to(tl.uint16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        x = tl.where((bits & 0x7F) == 0x7F, float("nan"), half * 256.0).to(dtype)
    return x


# One binary must serve every step, so Triton must not specialise on values that change from step to step.
@triton.jit(do_not_specialize=["num_parts", "width"])
def _attend_kernel(
    q,
    q_stride,
    blocks,
    out,
    totals,  # float32 [parts, kv_heads, width, HEAD_DIM]
    sums,  # float32 [2, parts, kv_heads, width]: highest score, sum of weights
    num_parts,
    width,
    counts,  # number of tiles, number of joins
    tiles,
    query_starts,
    befores,
    lengths,
    page_starts,
    pages,
    scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,  # HEAD_DIM, rounded up to a power of two
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPAN: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """See `attend`. With n programs per KV head, program (i, h) computes KV head h for tiles i, i + n, …."""
    kv_head = tl.program_id(1)
    dtype: tl.constexpr = q.dtype.element_ty
    rows, lanes = tl.arange(0, ROWS), tl.arange(0, LANES)
    inside = lanes < HEAD_DIM
    for tile in range(tl.program_id(0), tl.load(counts), tl.num_programs(0)):
        row, query = tl.load(tiles + tile * 4), tl.load(tiles + tile * 4 + 1)
        part, span = tl.load(tiles + tile * 4 + 2), tl.load(tiles + tile * 4 + 3)
        start = tl.load(query_starts + row)
        num_queries = tl.load(query_starts + row + 1) - start
        before, length = tl.load(befores + row), tl.load(lengths + row)
        own_pages = pages + tl.load(page_starts + row)
        queries = query + rows // GROUP
        is_own = (rows < ROWS // GROUP * GROUP) & (queries < num_queries)
        place = (start + queries).to(tl.int64)
        heads = (kv_head * GROUP + rows % GROUP) * HEAD_DIM
        stored = is_own[:, None] & inside[None, :]
        asked = tl.load(q + (place * q_stride + heads)[:, None] + lanes[None, :], mask=stored, other=0.0)
        last_seen = tl.minimum(before + queries, length - 1)
        end = tl.minimum(length, before + tl.minimum(query + ROWS // GROUP, num_queries))
        first_key, end_key = 0, end
        if part >= 0:
            first_key, end_key = span * SPAN, tl.minimum(end, (span + 1) * SPAN)

        whole_top = tl.full([ROWS], float("-inf"), tl.float32)
        whole_mass = tl.zeros([ROWS], tl.float32)
        whole_total = tl.zeros([ROWS, LANES], tl.float32)
        top, mass, total = whole_top, whole_mass, whole_total
        for key in range(first_key, end_key, KEYS):
            keys = key + tl.arange(0, KEYS)
            there = keys < end
            page = tl.load(own_pages + keys // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
            slot = (page * (2 * BLOCK_SIZE) + keys % BLOCK_SIZE) * (NUM_KV_HEADS * HEAD_DIM)
            source = blocks + (slot + kv_head * HEAD_DIM)[:, None] + lanes[None, :]
            read = there[:, None] & inside[None, :]
            k = _values(tl.load(source, mask=read, other=0.0), IS_FP8, dtype)
            v = tl.load(source + BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM, mask=read, other=0.0)
            v = _values(v, IS_FP8, dtype)
            scores = tl.dot(asked, tl.trans(k), input_precision="ieee") * scale
            scores = tl.where(keys[None, :] <= last_seen[:, None], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            weights, shrink = tl.exp2(scores - base[:, None]), tl.exp2(top - base)
            mass = tl.fma(mass, shrink, tl.sum(weights, 1))
            total = tl.dot(weights.to(dtype), v, total * shrink[:, None], input_precision="ieee")
            top = higher
            if (key + KEYS) % SPAN == 0:
                whole_top, whole_mass, whole_total = _join(
                    whole_top, whole_mass, whole_total, top, mass, total
                )
                top = tl.full([ROWS], float("-inf"), tl.float32)
                mass = tl.zeros([ROWS], tl.float32)
                total = tl.zeros([ROWS, LANES], tl.float32)
        whole_top, whole_mass, whole_total = _join(whole_top, whole_mass, whole_total, top, mass, total)

        if part >= 0:
            at = (part * NUM_KV_HEADS + kv_head) * width + rows
            tl.store(sums + at, whole_top, mask=is_own)
            tl.store(sums + num_parts * NUM_KV_HEADS * width + at, whole_mass, mask=is_own)
            tl.store(totals + at[:, None] * HEAD_DIM + lanes[None, :], whole_total, mask=stored)
        else:
            target = out + (place * (NUM_KV_HEADS * GROUP * HEAD_DIM) + heads)[:, None] + lanes[None, :]
            mean = whole_total / tl.where(whole_mass == 0.0, 1.0, whole_mass)[:, None]
            tl.store(target, mean.to(dtype), mask=stored)


@triton.jit(do_not_specialize=["num_parts", "width"])
def _join_kernel(
    out,
    totals,
    sums,
    num_parts,
    width,
    counts,
    joins,
    query_starts,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Join the stored softmaxes for each shared tile, in the order of its spans."""
    kv_head = tl.program_id(1)
    rows, lanes = tl.arange(0, ROWS), tl.arange(0, LANES)
    inside = lanes < HEAD_DIM
    for tile in range(tl.program_id(0), tl.load(counts + 1), tl.num_programs(0)):
        row, query = tl.load(joins + tile * 4), tl.load(joins + tile * 4 + 1)
        part, end = tl.load(joins + tile * 4 + 2), tl.load(joins + tile * 4 + 3)
        start = tl.load(query_starts + row)
        queries = query + rows // GROUP
        is_own = (rows < ROWS // GROUP * GROUP) & (start + queries < tl.load(query_starts + row + 1))
        stored = is_own[:, None] & inside[None, :]
        whole_top = tl.full([ROWS], float("-inf"), tl.float32)
        whole_mass = tl.zeros([ROWS], tl.float32)
        whole_total = tl.zeros([ROWS, LANES], tl.float32)
        for one in range(part, end):
            at = (one * NUM_KV_HEADS + kv_head) * width + rows
            top = tl.load(sums + at, mask=is_own, other=float("-inf"))
            mass = tl.load(sums + num_parts * NUM_KV_HEADS * width + at, mask=is_own, other=0.0)
            total = tl.load(totals + at[:, None] * HEAD_DIM + lanes[None, :], mask=stored, other=0.0)
            whole_top, whole_mass, whole_total = _join(whole_top, whole_mass, whole_total, top, mass, total)
        heads = (kv_head * GROUP + rows % GROUP) * HEAD_DIM
        place = (start + queries).to(tl.int64) * (NUM_KV_HEADS * GROUP * HEAD_DIM) + heads
        mean = whole_total / tl.where(whole_mass == 0.0, 1.0, whole_mass)[:, None]
        tl.store(out + place[:, None] + lanes[None, :], mean.to(out.dtype.element_ty), mask=stored)


def shapes(num_heads: int, num_kv_heads: int, head_dim: int, rows: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the compile-time constants and the number of warps for both kernels. `dtype`: q's dtype."""
    lanes = max(16, triton.next_power_of_2(head_dim))
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": num_heads // num_kv_heads,
        "HEAD_DIM": head_dim,
        "LANES": lanes,
        "ROWS": rows,
        "num_warps": 8 if rows * lanes * dtype.itemsize >= _WIDE_BYTES else 4,
    }


def tiling(lanes: int, dtype: torch.dtype) -> dict[str, int]:
    """Return KEYS, the number of keys per read, and num_stages, the number of reads in flight.

    Registers and shared memory limit both numbers.
    """
    is_narrow = lanes * dtype.itemsize <= _KEY_BYTES
    keys = (64 if is_narrow else 32) // (1 if dtype.itemsize == 2 else 2)
    return {"KEYS": keys, "num_stages": 3 if is_narrow else 2}


def attend(q: torch.Tensor, blocks: torch.Tensor, work: Work) -> torch.Tensor:
    """Return a contiguous tensor with q's shape and dtype: causal attention of q [t, heads, d] over the rows
    in `work`.

    The heads of each token in q are contiguous. `blocks` [n, 2, block_size, kv_heads, d] have q's dtype, or
    are float8_e4m3fn bytes (uint8). A query that sees no key gets zeros.
    """
    num_heads, head_dim = q.shape[1:]
    _, _, block_size, num_kv_heads, _ = blocks.shape
    shape = shapes(num_heads, num_kv_heads, head_dim, work.rows, q.dtype)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    parts = (work.totals, work.sums, work.sums.shape[1], work.width, work.counts)
    _attend_kernel[(work.programs, num_kv_heads)](
        q,
        q.stride(0),
        blocks,
        out,
        *parts,
        work.tiles,
        work.query_starts,
        work.befores,
        work.lengths,
        work.page_starts,
        work.pages,
        head_dim**-0.5 * _LOG2_E,
        BLOCK_SIZE=block_size,
        SPAN=SPAN,
        IS_FP8=blocks.dtype == torch.uint8,
        **shape,
        **tiling(shape["LANES"], q.dtype),
    )
    if work.joins is not None:
        _join_kernel[(work.programs, num_kv_heads)](out, *parts, work.joins, work.query_starts, **shape)
    return out
