"""Folders of FP8 weights, as the hub has them, made of folders in float."""

import json

import torch
from safetensors.torch import load_file, save_file

LARGEST = 448.0  # of e4m3
BLOCK = (128, 128)
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LAYERS += ("in_proj_qkv", "in_proj_z", "out_proj")  # of delta nets


def is_vision(name):
    """Whether a tensor is of the vision tower, which folders of the hub leave as it is."""
    return "visual" in name or "vision" in name


def quantised(weight, block):
    """e4m3 [out, in] and the scales of its blocks, float32."""
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
    """What they stand for, float32, a block after the other."""
    found = values.float()
    for i in range(scales.shape[0]):
        rows = slice(i * block[0], (i + 1) * block[0])
        for j in range(scales.shape[1]):
            found[rows, j * block[1] : (j + 1) * block[1]] *= scales[i, j].float()
    return found


def to_fp8(folder, block=BLOCK, scale_dtype=torch.bfloat16):
    """Quantise the layers' matrices of the text model in place. Gives all tensors as they are meant."""
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
