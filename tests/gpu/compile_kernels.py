"""Compile the Triton kernels for several GPUs on a machine without a GPU. TRITON_INTERPRET must be off.

Without options, each kernel is compiled for a few shapes. `--attention` compiles only the attention kernels,
for all entries of HEADS and all tile sizes. `--newest` compiles only for the newest compute capability.
"""

import re
import subprocess
import sys
from tempfile import NamedTemporaryFile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mmengine.gpu import (
    attention_kernels,
    linear_kernels,
    norm_kernels,
    sampling_kernels,
    text_kernels,
)
from mmengine.gpu.attention_tiles import SPAN, TILE_ROWS

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
    """Return a KERNELS entry for the linear layer: kernel, argument types, constants, warps, stages."""
    tile = linear_kernels.tile_of(width, torch.bfloat16 if kind == "bf16" else torch.float32)
    arguments = dict.fromkeys(("x", "weight", "bias", "y"), f"*{kind}") | {"num_rows": "i32"}
    constants = {"WIDTH": width, "DEPTH": depth, "HAS_BIAS": has_bias, "GROUP": linear_kernels.GROUP}
    constants |= {"ROWS": tile.rows, "COLUMNS": tile.columns, "STEP": tile.depth}
    return linear_kernels._linear_kernel, arguments, constants, 4, tile.stages


def norm(adds: bool):
    arguments = dict.fromkeys(("x", "residual", "weight", "out"), "*bf16") | {"eps": "fp32"}
    return norm_kernels._norm_kernel, arguments, {"WIDTH": 4096, "LANES": 4096, "ADDS": adds}, 8


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Each entry: heads, KV heads, head size, dtype of q, dtype of the blocks. The sizes are those of the included
# checkpoint, Qwen3-VL-8B and other models.
HEADS = [(4, 2, 32, "bf16", "bf16"), (4, 2, 32, "fp32", "fp32"), (14, 2, 64, "fp16", "fp16")]
HEADS += [(32, 8, 128, each, of) for each, of in (("bf16", "bf16"), ("fp32", "fp32"), ("bf16", "u8"))]
HEADS += [(8, 1, 256, "bf16", "bf16")]
ATTENDED = [(HEADS[0], 16), (HEADS[1], 64), (HEADS[2], 32), (HEADS[3], 16), (HEADS[3], 64), (HEADS[5], 16)]


def attend(heads: int, kv_heads: int, head_dim: int, kind: str, blocks: str, rows: int, joins: bool = False):
    """Return a KERNELS entry for an attention kernel that computes tiles with `rows` rows."""
    name = "_join_kernel" if joins else "_attend_kernel"
    kernel = getattr(attention_kernels, name)
    constants = attention_kernels.shapes(heads, kv_heads, head_dim, rows, DTYPES[kind])
    tiling = attention_kernels.tiling(constants["LANES"], DTYPES[kind])
    warps, stages = constants.pop("num_warps"), tiling.pop("num_stages")
    if not joins:
        constants |= tiling | {"BLOCK_SIZE": 16, "SPAN": SPAN, "IS_FP8": blocks == "u8"}
    typed = {"q": f"*{kind}", "out": f"*{kind}", "blocks": f"*{blocks}", "totals": "*fp32", "sums": "*fp32"}
    typed |= dict.fromkeys(("q_stride", "num_parts", "width"), "i32") | {"scale": "fp32"}
    arguments = {each: typed.get(each, "*i32") for each in kernel.arg_names if each not in constants}
    return kernel, arguments, constants, warps, *(() if joins else (stages,))


KERNELS = [
    linear(24_576, 4096, "bf16"),  # gate and up in Qwen3-VL-8B
    linear(6144, 4096, "bf16", has_bias=True),  # q, k and v
    linear(2048, 6144, "bf16"),  # down in Qwen3-VL-2B
    linear(151_936, 4096, "fp32"),  # the language model head
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
    (text_kernels._rotate_kernel, ROTATE, SIZES | {"NORMS": False, "APPENDS": True}, 1),
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
    *(attend(*heads, rows) for heads, rows in ATTENDED),
    attend(*HEADS[3], 16, joins=True),
]
ALL = [attend(*heads, rows, joins) for heads in HEADS for rows in TILE_ROWS for joins in (False, True)]


def main() -> None:
    for kernel, arguments, constants, num_warps, *stages in ALL if "--attention" in sys.argv else KERNELS:
        aligned = [kernel.arg_names.index(name) for name, kind in arguments.items() if kind.startswith("*")]
        attributes = {(place,): [["tt.divisibility", 16]] for place in aligned}
        options = {"num_warps": num_warps} | ({"num_stages": stages[0]} if stages else {})
        for capability in CAPABILITIES[-1:] if "--newest" in sys.argv else CAPABILITIES:
            signature = arguments | dict.fromkeys(constants, "constexpr")
            source = ASTSource(kernel, signature, constants, attributes)
            made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            cubin, shared = made.asm["cubin"], made.metadata.shared
            print(
                f"{kernel.__name__} sm_{capability}: {len(cubin)} bytes, {shared} shared, "
                f"{stack_bytes(cubin)} spilled"
            )


def stack_bytes(cubin: bytes) -> int:
    """Return how many bytes per thread the kernel spills from registers to the stack."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        words = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        found = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", found)[1])


if __name__ == "__main__":
    main()
