"""Compiles our Triton kernels for GPUs, of which none need be here (TRITON_INTERPRET must be off)."""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mmengine.gpu import sampling_kernels, text_kernels

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
KERNELS = [
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
        sampling_kernels._mask_kernel,
        LOGITS | {"places": "*i64", "bits": "*i32", "words": "i32"} | BEST,
        CHUNK,
        4,
    ),
]


def main() -> None:
    for kernel, arguments, constants, num_warps in KERNELS:
        for capability in CAPABILITIES:
            source = ASTSource(kernel, arguments | dict.fromkeys(constants, "constexpr"), constants)
            target = GPUTarget("cuda", capability, 32)
            made = triton.compile(source, target=target, options={"num_warps": num_warps})
            spilled = made.asm["ptx"].count("ld.local")
            print(f"{kernel.__name__} sm_{capability}: {len(made.asm['cubin'])} bytes, {spilled} spilled")


if __name__ == "__main__":
    main()
