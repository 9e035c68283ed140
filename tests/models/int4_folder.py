"""Quantises checkpoint folders to 4 bits, in the formats of compressed-tensors, GPTQ and AWQ."""

import json

import torch
from safetensors.torch import load_file, save_file

from tests.models.fp8_folder import LAYERS, is_vision

# The order in which a word stores eight columns, from the low bits up.
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def quantised(weight, group, symmetric):
    """Return codes and zero points from 0 to 15, and float16 scales. Codes are [out, in]; the rest are
    [out, in / group].
    """
    groups = weight.float().unflatten(1, (-1, group))
    low, high = groups.amin(2), groups.amax(2)
    if symmetric:
        scales = (torch.maximum(-low, high) / 7.5).half().float().clamp(min=1e-4)
        zeros = torch.full_like(scales, 8)
    else:
        scales = ((high - low) / 15).half().float().clamp(min=1e-4)
        zeros = (-low / scales).round().clamp(1, 15)  # GPTQ's first format cannot express a zero point of 0.
    codes = ((groups / scales[..., None]).round() + zeros[..., None]).clamp(0, 15)
    return codes.flatten(1).int(), zeros.int(), scales.half()


def meant(codes, zeros, scales, group):
    """Dequantise to float32. The products are exact in float64, and are rounded once."""
    zeros, scales = (each.double().repeat_interleave(group, 1) for each in (zeros, scales))
    return ((codes - zeros) * scales).float()


def words(values, order=range(8)):
    """Pack values 0 to 15 [..., n] into int32 [..., n / 8]."""
    eights = values.long().unflatten(-1, (-1, 8))
    found = sum(eights[..., column] << 4 * place for place, column in enumerate(order))
    return torch.where(found >= 2**31, found - 2**32, found).int()


def _padded(values, dim):
    size = list(values.shape)
    size[dim] = -size[dim] % 8
    return torch.cat((values, torch.zeros(size, dtype=values.dtype)), dim)


def compressed(name, codes, zeros, scales, group, symmetric):
    found = {
        f"{name}_packed": words(_padded(codes, 1)),
        f"{name}_scale": scales.bfloat16() if symmetric else scales,
        f"{name}_shape": torch.tensor(codes.shape),
    }
    return found if symmetric else found | {f"{name}_zero_point": words(_padded(zeros, 0).T).T.contiguous()}


def gptq(name, codes, zeros, scales, group, less=1):
    beginning = name.removesuffix("weight")
    return {
        f"{beginning}qweight": words(codes).T.contiguous(),
        f"{beginning}qzeros": words((zeros - less).T.contiguous()),
        f"{beginning}scales": scales.T.contiguous(),
        f"{beginning}g_idx": (torch.arange(codes.shape[1]) // group).int(),
    }


def awq(name, codes, zeros, scales, group):
    beginning = name.removesuffix("weight")
    return {
        f"{beginning}qweight": words(codes.T.contiguous(), AWQ_COLUMNS),
        f"{beginning}qzeros": words(zeros.T.contiguous(), AWQ_COLUMNS),
        f"{beginning}scales": scales.T.contiguous(),
    }


def _compressed_config(group, symmetric):
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group, "symmetric": symmetric}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
    }


def _config(method, group, **more):
    return {"quant_method": method, "bits": 4, "group_size": group, **more}


LAYOUTS = {  # For each format: functions that return a matrix's tensors, and the quantization_config.
    "compressed-tensors, symmetric": (
        lambda *matrix: compressed(*matrix, True),
        lambda group: _compressed_config(group, True),
    ),
    "compressed-tensors": (
        lambda *matrix: compressed(*matrix, False),
        lambda group: _compressed_config(group, False),
    ),
    "gptq": (gptq, lambda group: _config("gptq", group, desc_act=False, sym=False)),
    "gptq_v2": (
        lambda *matrix: gptq(*matrix, less=0),
        lambda group: _config("gptq", group, checkpoint_format="gptq_v2"),
    ),
    "awq": (awq, lambda group: _config("awq", group, zero_point=True, version="gemm")),
}


def to_int4(folder, layout, group):
    """Quantise the matrices of the text model's layers in the folder's files. Returns all tensors,
    dequantised.
    """
    path = folder / "model.safetensors"
    tensors, found = load_file(path), {}
    write, config = LAYOUTS[layout]
    for name in list(tensors):
        part = name.removesuffix(".weight").rpartition(".")[2]
        if part not in LAYERS or is_vision(name):
            found[name] = tensors[name]
            continue
        symmetric = "symmetric" in layout
        matrix = quantised(tensors.pop(name), group, symmetric)
        if symmetric:
            matrix = (*matrix[:2], matrix[2].bfloat16().half())
        tensors |= write(name, *matrix, group)
        found[name] = meant(*matrix, group)
    save_file(tensors, path, {"format": "pt"})
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | {"quantization_config": config(group)}))
    return found
