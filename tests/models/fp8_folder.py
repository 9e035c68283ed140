"""Quantises checkpoint folders to FP8 with block scales, like the *-FP8 folders of the hub."""

import json

import torch
from safetensors.torch import load_file, save_file

LARGEST = 448.0  # The largest e4m3 value.
BLOCK = (128, 128)
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LAYERS += ("in_proj_qkv", "in_proj_z", "out_proj")  # The matrices of delta nets.


def is_vision(name):
    """Return whether a tensor belongs to the vision tower, which hub folders leave unquantised."""
    return "visual" in name or "vision" in name


def quantised(weight, block):
    """Return the weight as e4m3 [out, in], and each block's scale, float32 [block rows, block columns]."""
    rows, columns = (-(-size // each) for size, each in zip(weight.shape, block, strict=True))
    scales = torch.empty(rows, columns)
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(rows):
        for j in range(columns):
            place = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scales[i, j] = weight[place].abs().max().clamp(min=1e-6) / LARGEST
            values[place] = (weight[place].float() / scales[i, j]).to(torch.float8_e4m3fn)
    return values, scales


def plain(values, scales, block):
    """Dequantise e4m3 values to float32, one block at a time."""
    found = values.float()
    for i in range(scales.shape[0]):
        rows = slice(i * block[0], (i + 1) * block[0])
        for j in range(scales.shape[1]):
            found[rows, j * block[1] : (j + 1) * block[1]] *= scales[i, j].float()
    return found


def to_fp8(folder, block=BLOCK, scale_dtype=torch.bfloat16):
    """Quantise the text layers' matrices in the folder's files. Returns all tensors, dequantised."""
    path = folder / "model.safetensors"
    tensors, meant = load_file(path), {}
    for name in list(tensors):
        part = name.removesuffix(".weight").rpartition(".")[2]
        if part not in LAYERS or is_vision(name):
            meant[name] = tensors[name]
            continue
        values, scales = quantised(tensors[name], block)
        scales = scales.to(scale_dtype)
        tensors[name], tensors[f"{name}_scale_inv"] = values, scales
        meant[name] = plain(values, scales, block)
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
        "modules_to_not_convert": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return meant
