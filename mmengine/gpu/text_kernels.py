"""A Triton kernel for the work between the qkv matmul and attention: q and k norms, rotation (RoPE), and the
store into KV blocks. The vision tower uses only the rotation.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _rotate_kernel(
    qkv,
    stride,
    weight,
    cos,
    sin,
    angle_stride,
    blocks,
    slots,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LANES: tl.constexpr,  # smallest power of two that is at least half of HEAD_DIM
    NORMS: tl.constexpr,
    APPENDS: tl.constexpr,
):
    """Each program computes one head of one token."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    HALF: tl.constexpr = HEAD_DIM // 2
    lanes = tl.arange(0, LANES)
    inside = lanes < HALF
    source = qkv + token * stride + head * HEAD_DIM + lanes
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if head < NUM_HEADS + NUM_KV_HEADS:
        if NORMS:
            scale = tl.rsqrt((tl.sum(low * low) + tl.sum(high * high)) / HEAD_DIM + eps)
            weights = weight + head * HEAD_DIM + lanes
            low *= scale * tl.load(weights, mask=inside, other=0.0).to(tl.float32)
            high *= scale * tl.load(weights + HALF, mask=inside, other=0.0).to(tl.float32)
        c = tl.load(cos + token * angle_stride + lanes, mask=inside, other=0.0)
        s = tl.load(sin + token * angle_stride + lanes, mask=inside, other=0.0)
        low, high = low * c - high * s, high * c + low * s
        tl.store(source, low.to(qkv.dtype.element_ty), mask=inside)
        tl.store(source + HALF, high.to(qkv.dtype.element_ty), mask=inside)
    if APPENDS:  # noqa: SIM102, compile-time condition
        if head >= NUM_HEADS:
            slot = tl.load(slots + token)
            is_v = (head >= NUM_HEADS + NUM_KV_HEADS).to(tl.int64)
            kv_head = head - NUM_HEADS - is_v * NUM_KV_HEADS
            place = (slot // BLOCK_SIZE * 2 + is_v) * BLOCK_SIZE + slot % BLOCK_SIZE
            target = blocks + (place * NUM_KV_HEADS + kv_head) * HEAD_DIM + lanes
            tl.store(target, low.to(blocks.dtype.element_ty), mask=inside)
            tl.store(target + HALF, high.to(blocks.dtype.element_ty), mask=inside)


def norm_rotate(
    qkv: torch.Tensor,
    weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    num_heads: int,
    cache: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Norm and rotate `qkv` in place, and store k and v in `cache`. See TextOps in text_ops.py.

    Values are rounded to their dtype only at the end.
    """
    num_tokens, num_all, head_dim = qkv.shape
    num_kv_heads = (num_all - num_heads) // 2
    blocks, slots = (qkv, qkv) if cache is None else cache  # unused without a cache
    _rotate_kernel[(num_tokens, num_heads + num_kv_heads if cache is None else num_all)](
        qkv,
        qkv.stride(0),
        qkv if weight is None else weight,  # unused without a norm
        cos,
        sin,
        head_dim // 2,
        blocks,
        slots,
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=1 if cache is None else blocks.shape[2],
        LANES=triton.next_power_of_2(head_dim // 2),
        NORMS=weight is not None,
        APPENDS=cache is not None,
        num_warps=1,
    )


def rotate(qk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate every head of qk [p, heads, d] in place. A patch's heads are contiguous.

    cos and sin are float32 [p, d / 2] with equal row strides.
    """
    num_patches, num_heads, head_dim = qk.shape
    _rotate_kernel[(num_patches, num_heads)](
        qk,
        qk.stride(0),
        qk,
        cos,
        sin,
        cos.stride(0),
        qk,
        qk,
        0.0,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=0,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=1,
        LANES=triton.next_power_of_2(head_dim // 2),
        NORMS=False,
        APPENDS=False,
        num_warps=1,
    )
