"""Compiles our Triton kernels for GPUs, of which none need be here (TRITON_INTERPRET must be off)."""

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mmengine.gpu import linear_kernels, norm_kernels, sampling_kernels, text_kernels

CAPABILITIES = (80, 90)  # A100, H100 and H200
ROTATE = {
    "qkv": "*bf16",
    "stride": "i32",
    "weight": "*bf16",
    "cos": "*fp32",
    "sin": "*fp32",
    "angle_stride": "i32",
    "blocks": "*bf16",
    "slots": "*i64",
    "eps": "fp32",
}
SIZES = {"NUM_HEADS": 16, "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "BLOCK_SIZE": 16, "LANES": 64}
LOGITS = {"logits": "*fp32", "stride": "i32", "vocab": "i32"}
BEST = {"scores": "*fp32", "tokens": "*i64"}
ROWS = {"largest": "*fp32", "temperature": "*fp32"}
CHUNK = {"CHUNK": sampling_kernels.CHUNK}


def linear(width: int, depth: int, kind: str, has_bias: bool = False):
    """The linear layer of a Qwen3-VL, and how it is launched."""
    tile = linear_kernels.tile_of(width, torch.bfloat16 if kind == "bf16" else torch.float32)
    arguments = dict.fromkeys(("x", "weight", "bias", "y"), f"*{kind}") | {"num_rows": "i32"}
    constants = {"WIDTH": width, "DEPTH": depth, "HAS_BIAS": has_bias, "GROUP": linear_kernels.GROUP}
    constants |= {"ROWS": tile.rows, "COLUMNS": tile.columns, "STEP": tile.depth}
    return linear_kernels._linear_kernel, arguments, constants, 4, tile.stages


def norm(adds: bool):
    arguments = dict.fromkeys(("x", "residual", "weight", "out"), "*bf16") | {"eps": "fp32"}
    return norm_kernels._norm_kernel, arguments, {"WIDTH": 4096, "LANES": 4096, "ADDS": adds}, 8


KERNELS = [
    linear(24_576, 4096, "bf16"),  # gate and up of the 8B
    linear(6144, 4096, "bf16", has_bias=True),  # q, k and v
    linear(4096, 12_288, "bf16"),  # down
    linear(151_936, 4096, "fp32"),  # the head
    norm(adds=False),
    norm(adds=True),
    (
        norm_kernels._gate_kernel,
        {"gate_up": "*bf16", "out": "*bf16"},
        {"WIDTH": 12_288, "CHUNK": norm_kernels.GATE_CHUNK},
        4,
    ),
    (text_kernels._rotate_kernel, ROTATE, SIZES | {"NORMS": True, "APPENDS": True}, 1),
    (text_kernels._rotate_kernel, ROTATE, SIZES | {"NORMS": True, "APPENDS": False}, 1),
    (text_kernels._rotate_kernel, ROTATE, SIZES | {"HEAD_DIM": 72, "NORMS": False, "APPENDS": False}, 1),
    (
        sampling_kernels._draw_kernel,
        LOGITS | ROWS | {"least": "*fp32", "keys": "*i64"} | BEST,
        CHUNK,
        4,
    ),
    (
        sampling_kernels._top_p_kernel,
        {"logits": "*fp32", "stride": "i32"} | ROWS | {"top_p": "*fp32", "least": "*fp32"},
        CHUNK | {"VOCAB": 151_936},
        8,
    ),
    (
        sampling_kernels._top_k_kernel,
        {"best": "*fp32", "width": "i32", "top_k": "*i64", "top_p": "*fp32", "least": "*fp32"},
        {"CHUNK": 1024},
        4,
    ),
    (
        sampling_kernels._log_softmax_kernel,
        {"logits": "*fp32", "stride": "i32", "largest": "*fp32", "out": "*fp32"},
        CHUNK | {"VOCAB": 151_936},
        8,
    ),
    (
        sampling_kernels._mask_kernel,
        LOGITS | {"places": "*i64", "bits": "*i32", "words": "i32"} | BEST,
        CHUNK,
        4,
    ),
]


def main() -> None:
    for kernel, arguments, constants, num_warps, *stages in KERNELS:
        aligned = [kernel.arg_names.index(name) for name, kind in arguments.items() if kind.startswith("*")]
        attributes = {(place,): [["tt.divisibility", 16]] for place in aligned}
        options = {"num_warps": num_warps} | ({"num_stages": stages[0]} if stages else {})
        for capability in CAPABILITIES:
            signature = arguments | dict.fromkeys(constants, "constexpr")
            source = ASTSource(kernel, signature, constants, attributes)
            made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            spilled = made.asm["ptx"].count("ld.local")
            shared = made.metadata.shared
            print(
                f"{kernel.__name__} sm_{capability}: {len(made.asm['cubin'])} bytes, {shared} shared, "
                f"{spilled} spilled"
            )


if __name__ == "__main__":
    main()
