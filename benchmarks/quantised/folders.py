"""Write checkpoint folders with quantised decoder matrices, for benchmarks.

FP8 weights have the format of the hub's `*-FP8` checkpoints. 4-bit weights have the format of
compressed-tensors. The quantisation is not calibrated, so answers are worse than with a published checkpoint.
"""

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file

INDEX = "model.safetensors.index.json"
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
BLOCK, GROUP = 128, 128  # BLOCK: rows and columns per FP8 block; GROUP: values per 4-bit group
Tensors = dict[str, torch.Tensor]


def fp8_blocks(weight: torch.Tensor, rows: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 codes [out, in] and a scale for each block. A block has `rows` x BLOCK values."""
    n, k = weight.shape
    whole = (
        F.pad(weight.float(), (0, -k % BLOCK, 0, -n % rows))
        .unflatten(0, (-1, rows))
        .unflatten(2, (-1, BLOCK))
    )
    scales = whole.abs().amax((1, 3)).clamp(min=1e-12) / 448
    codes = (whole / scales[:, None, :, None]).flatten(2).flatten(0, 1)[:n, :k]
    return codes.to(torch.float8_e4m3fn), scales


def _fp8(name: str, weight: torch.Tensor, rows: int = BLOCK) -> Tensors:
    codes, scales = fp8_blocks(weight, rows)
    return {name: codes, f"{name}_scale_inv": scales}


def _int4(name: str, weight: torch.Tensor, group: int = GROUP) -> Tensors:
    groups = weight.float().unflatten(1, (-1, group))
    scales = (groups.abs().amax(2) / 7).half()
    codes = (groups / scales.float()[..., None]).round().clamp(-8, 7).to(torch.int32).flatten(1) + 8
    eights = codes.unflatten(1, (-1, 8))
    words = sum((eights[..., i] << (4 * i) for i in range(1, 8)), eights[..., 0])
    return {f"{name}_packed": words, f"{name}_scale": scales, f"{name}_shape": torch.tensor(weight.shape)}


def _int4_of(group: int) -> dict[str, object]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


FORMS: dict[str, tuple[Callable[[str, torch.Tensor], Tensors], dict[str, object]]] = {
    "fp8": (_fp8, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}),
    "fp8 rows": (partial(_fp8, rows=1), {"quant_method": "fp8", "weight_block_size": [1, BLOCK]}),
    "int4": (_int4, _int4_of(GROUP)),
    "int4 64": (partial(_int4, group=64), _int4_of(64)),
    "int4 32": (partial(_int4, group=32), _int4_of(32)),
}


def quantised(folder: Path, out: Path, form: str) -> Path:
    """Write the quantised model to `out`, and return `out`. Does nothing if `out` exists."""
    write, how = FORMS[form]
    if out.exists():
        return out
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors", INDEX))
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": how}))
    places: dict[str, str] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors: Tensors = {}
        with safe_open(shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                value = file.get_tensor(name)
                part = name.removesuffix(".weight").rpartition(".")[2]
                tensors |= write(name, value) if part in LAYERS and ".visual." not in name else {name: value}
        save_file(
            {name: value.contiguous() for name, value in tensors.items()}, out / shard.name, {"format": "pt"}
        )
        places |= dict.fromkeys(tensors, shard.name)
    if len(set(places.values())) > 1:
        (out / INDEX).write_text(json.dumps({"weight_map": places}))
    return out


def weight_bytes(folder: Path) -> int:
    return sum(os.path.getsize(path) for path in folder.glob("*.safetensors"))
