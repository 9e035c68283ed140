"""Triton kernels that filter, mask and sample logits, with the same results as runtime/sampling/filters.py
and gumbel.py.

`draw` and `keep_allowed` divide each row into chunks. One program per chunk stores the best token of the
chunk, and torch then takes the best of these tokens. The other kernels have one program per row.
"""

import torch
import triton
import triton.language as tl

# Number of tokens in a chunk. This is a multiple of 4, because each Philox call gives noise for four tokens.
CHUNK = 4096


@triton.jit
def _noise(bits):
    """Return standard Gumbel noise for 32 random bits, as runtime/sampling/gumbel.py defines it."""
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)
    # log1p(-u) by Kahan's formula, which needs only log and cancels the rounding error of 1 - u.
    rest = 1.0 - uniform
    lost = rest - 1.0
    logs = tl.where(lost == 0.0, -uniform, tl.log(rest) * (-uniform / tl.where(lost == 0.0, 1.0, lost)))
    return -tl.log(-logs)


@triton.jit
def _scaled(logits, largest, temperature):
    return tl.div_rn(logits - largest, temperature)


# `least` may have any alignment. Without this option, Triton would compile a kernel for each new alignment
# during a step.
@triton.jit(do_not_specialize_on_alignment=["least"])
def _draw_kernel(
    logits,
    stride,
    vocab,
    largest,
    temperature,
    least,
    keys,
    scores,
    tokens,
    CHUNK: tl.constexpr,
):
    """See `draw`."""
    row, chunk, rows = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(0)
    seed = tl.load(keys + row).to(tl.uint64, bitcast=True)
    output = tl.load(keys + rows + row).to(tl.uint32)
    sample = tl.load(keys + 2 * rows + row).to(tl.uint32)
    top, heat = tl.load(largest + row), tl.load(temperature + row)
    bound = tl.load(least + row)
    fours = chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
    counter = fours.to(tl.uint32)
    b0, b1, b2, b3 = tl.philox(seed, counter, counter * 0 + output, counter * 0 + sample, counter * 0)
    best = tl.full([CHUNK // 4], float("-inf"), tl.float32)
    token = fours * 4
    for word in tl.static_range(4):
        place = fours * 4 + word
        values = tl.load(logits + row * stride + place, mask=place < vocab, other=float("-inf"))
        values = _scaled(values, top, heat)
        bits = b0 if word == 0 else (b1 if word == 1 else (b2 if word == 2 else b3))
        score = tl.where(values >= bound, values + _noise(bits), float("-inf"))
        token = tl.where(score > best, place, token)
        best = tl.maximum(score, best)
    highest = tl.max(best, 0)
    first = tl.min(tl.where(best == highest, token, vocab - 1), 0)
    tl.store(scores + row * tl.num_programs(1) + chunk, highest)
    tl.store(tokens + row * tl.num_programs(1) + chunk, first)


@triton.jit
def _top_p_kernel(
    logits, stride, largest, temperature, top_p, least, VOCAB: tl.constexpr, CHUNK: tl.constexpr
):
    """Each program finds the bound of one row. See `top_p_bound`.

    A token is kept if the tokens with higher logits have less mass than `top_p`. A token's distance is the
    scaled difference between the row's largest logit and the token's logit. The kernel finds the bits of the
    largest kept distance, two per iteration. This works because non-negative floats have the same order
    as their bits, read as integers.
    """
    row = tl.program_id(0).to(tl.int64)
    top, heat, share = tl.load(largest + row), tl.load(temperature + row), tl.load(top_p + row)
    source = logits + row * stride
    total = 0.0
    for start in range(0, VOCAB, CHUNK):
        place = start + tl.arange(0, CHUNK)
        values = tl.load(source + place, mask=place < VOCAB, other=float("-inf"))
        total += tl.sum(tl.exp(_scaled(values, top, heat)))
    wanted = share * total
    found = tl.full([], 0, tl.uint32)
    for turn in range(16):
        step = tl.full([], 1, tl.uint32) << (30 - 2 * turn)
        one, two, three = 0.0, 0.0, 0.0
        for start in range(0, VOCAB, CHUNK):
            place = start + tl.arange(0, CHUNK)
            values = tl.load(source + place, mask=place < VOCAB, other=float("-inf"))
            values = _scaled(values, top, heat)
            mass, bits = tl.exp(values), tl.abs(values).to(tl.uint32, bitcast=True)
            one += tl.sum(tl.where(bits < found + step, mass, 0.0))
            two += tl.sum(tl.where(bits < found + 2 * step, mass, 0.0))
            three += tl.sum(tl.where(bits < found + 3 * step, mass, 0.0))
        found += step * ((one < wanted).to(tl.uint32) + (two < wanted) + (three < wanted))
    found = tl.minimum(found, 0x7F800000)  # infinity: no token is filtered
    tl.store(least + row, -found.to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["top_k"])
def _top_k_kernel(best, width, top_k, top_p, least, CHUNK: tl.constexpr):
    """Each program finds the bound of one row of `best`, which is sorted. See `top_k_bound`."""
    row = tl.program_id(0).to(tl.int64)
    count, share = tl.load(top_k + row), tl.load(top_p + row)
    source = best + row * width
    top = tl.load(source)
    total = 0.0
    for start in range(0, count, CHUNK):
        place = start + tl.arange(0, CHUNK)
        values = tl.load(source + place, mask=place < count, other=float("-inf"))
        total += tl.sum(tl.exp(values - top))
    # With top_p 1 all k tokens must be kept. A finite limit could exclude the last tokens, because the sums
    # have rounding errors.
    wanted = tl.where(share >= 1.0, float("inf"), share * total)
    bound, before = top, 0.0
    for start in range(0, count, CHUNK):
        place = start + tl.arange(0, CHUNK)
        values = tl.load(source + place, mask=place < count, other=float("-inf"))
        mass = tl.exp(values - top)
        is_kept = (place < count) & (before + tl.cumsum(mass, 0) - mass < wanted)
        bound = tl.minimum(bound, tl.min(tl.where(is_kept, values, float("inf")), 0))
        before += tl.sum(mass)
    tl.store(least + row, bound)


@triton.jit
def _log_softmax_kernel(logits, stride, largest, out, VOCAB: tl.constexpr, CHUNK: tl.constexpr):
    """Each program computes one row. See `log_softmax`."""
    row = tl.program_id(0).to(tl.int64)
    top, source = tl.load(largest + row), logits + row * stride
    total = 0.0
    for start in range(0, VOCAB, CHUNK):
        place = start + tl.arange(0, CHUNK)
        values = tl.load(source + place, mask=place < VOCAB, other=float("-inf"))
        total += tl.sum(tl.exp(values - top))
    mass = tl.log(total)
    for start in range(0, VOCAB, CHUNK):
        place = start + tl.arange(0, CHUNK)
        values = tl.load(source + place, mask=place < VOCAB, other=float("-inf"))
        tl.store(out + row * VOCAB + place, values - top - mass, mask=place < VOCAB)


@triton.jit
def _mask_kernel(logits, stride, vocab, places, bits, words, scores, tokens, CHUNK: tl.constexpr):
    index, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(places + index)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = place < vocab
    word = tl.load(bits + index * words + place // 32, mask=inside, other=0)
    allowed = ((word >> (place % 32)) & 1) != 0
    target = logits + row * stride + place
    values = tl.where(allowed, tl.load(target, mask=inside, other=float("-inf")), float("-inf"))
    tl.store(target, values, mask=inside)
    highest = tl.max(values, 0)
    first = tl.min(tl.where(values == highest, place, vocab - 1), 0)
    tl.store(scores + index * tl.num_programs(1) + chunk, highest)
    tl.store(tokens + index * tl.num_programs(1) + chunk, first)


def draw(
    logits: torch.Tensor,
    largest: torch.Tensor,
    temperature: torch.Tensor,
    least: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    """Return an int64 tensor [r] with a sampled token for each row of the float32 logits [r, vocab].

    Samples the same tokens as filters.apply_temperature with gumbel.gumbel_noise. A token is a candidate if
    (logit - `largest`) / `temperature` is at least `least`. `largest`, `temperature` (above 0) and `least`
    are float32 [r]. `keys`, int64 [3, r]: seeds, output indices and sample indices. Each row of logits is
    contiguous.
    """
    rows, vocab = logits.shape
    scores, tokens = _partial(rows, vocab, logits.device)
    _draw_kernel[scores.shape](
        logits, logits.stride(0), vocab, largest, temperature, least, keys, scores, tokens, CHUNK=CHUNK
    )
    return _best(scores, tokens)[1]


def top_p_bound(
    logits: torch.Tensor, largest: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Return the argument `least` for `draw`, float32 [r]. This bound keeps the likeliest tokens until their
    mass reaches `top_p`.

    Tokens that tie with the last kept token are kept too. `top_p` [r] is between 0 and 1, exclusive.
    """
    least = torch.empty_like(largest)
    _top_p_kernel[(len(logits),)](
        logits,
        logits.stride(0),
        largest,
        temperature,
        top_p,
        least,
        VOCAB=logits.shape[1],
        CHUNK=CHUNK,
        num_warps=8,
    )
    return least


def top_k_bound(best: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return a float32 tensor [r]: the bound that filters.top_bound returns.

    `best`: each row's k largest logits [r, k], sorted in descending order.

    `top_k`: int64 [r], from 1 to k. `top_p`: float32 [r]. A row's result does not depend on the top_k of
    other rows.
    """
    best, least = best.contiguous(), torch.empty_like(top_p)
    _top_k_kernel[(len(best),)](best, best.shape[1], top_k, top_p, least, CHUNK=min(CHUNK, 1024))
    return least


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Return the log softmax of float32 logits [r, vocab].

    Unlike in torch, the sums do not depend on a row's address, so equal rows have equal bits.
    """
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    out = torch.empty(logits.shape, device=logits.device)
    _log_softmax_kernel[(len(logits),)](
        logits,
        logits.stride(0),
        logits.amax(-1),
        out,
        VOCAB=logits.shape[1],
        CHUNK=CHUNK,
        num_warps=8,
    )
    return out


def keep_allowed(
    logits: torch.Tensor, places: torch.Tensor, bits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Set the logits of disallowed tokens to -inf, in place.

    Row `places[i]` of the float32 logits [s, vocab] gets the mask `bits[i]`. `places`: int64 [m]. `bits`:
    int32 [m, words], one bit per token, 1 if allowed. Returns two tensors for the masked rows: the largest
    remaining logit (float32 [m]), and the token of this logit (int64 [m]). Ties go to the lowest id.
    """
    scores, tokens = _partial(len(places), logits.shape[1], logits.device)
    _mask_kernel[scores.shape](
        logits, logits.stride(0), logits.shape[1], places, bits, bits.shape[1], scores, tokens, CHUNK=CHUNK
    )
    return _best(scores, tokens)


def _partial(rows: int, vocab: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate two tensors for each row's chunks: the best scores and the best tokens."""
    shape = rows, -(-vocab // CHUNK)
    return torch.empty(shape, device=device), torch.empty(shape, dtype=torch.int64, device=device)


def _best(scores: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's highest score over all chunks, and the token with this score. Ties go to the first
    chunk.
    """
    highest = scores.amax(-1, keepdim=True)
    behind = tokens.amax() + 1
    return highest[:, 0], torch.where(scores == highest, tokens, behind).amin(-1)
