"""Quantises checkpoint folders to FP8 and NVFP4, in the formats of compressed-tensors and ModelOpt."""

import json

import torch
from safetensors.torch import load_file, save_file

from tests.models.fp8_folder import LARGEST, LAYERS, is_vision

GROUP = 16
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def fp8_rows(weight):
    """Return e4m3 codes [out, in], and bfloat16 scales [out, 1]."""
    scales = (weight.float().abs().amax(1, keepdim=True).clamp(min=1e-6) / LARGEST).bfloat16()
    return (weight.float() / scales.float()).to(torch.float8_e4m3fn), scales


def nvfp4(weight):
    """Return codes 0 to 15 [out, in], e4m3 scales [out, in / 16], and a global scale. Dequantising divides
    the e4m3 scales by the global scale.
    """
    groups = weight.float().unflatten(1, (-1, GROUP))
    most = groups.abs().amax(2)
    whole = LARGEST * E2M1[-1] / most.max().clamp(min=1e-6)
    scales = (most / E2M1[-1] * whole).to(torch.float8_e4m3fn)
    divisors = (scales.float() / whole).clamp(min=1e-12)[..., None]
    distances = ((groups / divisors).abs()[..., None] - torch.tensor(E2M1)).abs()
    codes = distances.argmin(-1) + 8 * (groups < 0)
    return codes.flatten(1), scales, whole


def packed(codes):
    return (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)


def meant(codes, scales, whole, *, divides):
    """Dequantise NVFP4 to float32."""
    values = torch.tensor([*E2M1, *(-each for each in E2M1)])[codes]
    scales = scales.float() / whole if divides else scales.float() * whole
    return values * scales.repeat_interleave(GROUP, 1)


def stored_nvfp4(name, weight, layout):
    """Return a matrix's stored tensors, and the dequantised values."""
    codes, scales, whole = nvfp4(weight)
    if layout == "compressed-tensors":
        tensors = {
            f"{name}_packed": packed(codes),
            f"{name}_scale": scales,
            f"{name}_global_scale": whole[None],
            name.removesuffix("weight") + "input_global_scale": torch.ones(1),
        }
        return tensors, meant(codes, scales, whole, divides=True)
    tensors = {
        name: packed(codes),
        f"{name}_scale": scales,
        f"{name}_scale_2": 1 / whole,
        name.removesuffix("weight") + "input_scale": torch.tensor(1.0),
    }
    return tensors, meant(codes, scales, 1 / whole, divides=False)


def stored_fp8(name, weight, layout):
    codes, scales = fp8_rows(weight)
    values = codes.float() * scales.float()
    return {name: codes, f"{name}_scale": scales}, values


FORMS = {"fp8": stored_fp8, "nvfp4": stored_nvfp4}


def group_config(form):
    if form == "fp8":
        weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
        inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
        return {
            "format": "float-quantized",
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": inputs,
        }
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "symmetric": True,
    }
    inputs = {**weights, "dynamic": "local"}
    named = {"format": "nvfp4-pack-quantized", "targets": ["Linear"]}
    return {**named, "weights": weights, "input_activations": inputs}


def config_of(layout, forms):
    if layout == "modelopt":
        names = {"fp8": "FP8_PER_CHANNEL_PER_TOKEN", "nvfp4": "NVFP4"}
        algorithm = names[forms[0]] if len(forms) == 1 else "MIXED_PRECISION"
        return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}
    groups = {f"group_{number}": group_config(form) for number, form in enumerate(forms)}
    kind = groups["group_0"]["format"] if len(forms) == 1 else "mixed-precision"
    named = {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups}
    return {**named, "ignore": ["lm_head"], "kv_cache_scheme": None}


def to_float_codes(folder, layout, *forms):
    """Quantise the text layers' matrices in the folder. `forms` are used in turn, a form for each matrix.

    Returns all tensors with dequantised values.
    """
    path = folder / "model.safetensors"
    tensors, meant = load_file(path), {}
    for number, name in enumerate(sorted(tensors)):
        weight = tensors[name]
        if name.removesuffix(".weight").rpartition(".")[2] not in LAYERS or is_vision(name):
            meant[name] = weight
            continue
        stored, meant[name] = FORMS[forms[number % len(forms)]](name, weight, layout)
        del tensors[name]
        tensors |= stored
    save_file({name: each.contiguous() for name, each in tensors.items()}, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = config_of(layout, forms)
    (folder / "config.json").write_text(json.dumps(config))
    return meant
