"""Converts experts between the two formats of hub checkpoints: separate matrices and stacked matrices."""

import re

import torch

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)_proj\.weight(|_scale_inv)")


def stacked(tensors, count, *, turned):
    """Return all tensors, with each layer's `count` experts stacked into gate_up_proj and down_proj. FP8
    scales are stacked likewise. `turned`: whether to transpose each matrix.
    """
    found, groups = {}, {}
    for name, value in tensors.items():
        if place := _EXPERT.fullmatch(name):
            groups.setdefault((place[1], place[4], int(place[2])), {})[place[3]] = value
        else:
            found[name] = value
    for whole, end in sorted({key[:2] for key in groups}):
        each = [groups[whole, end, i] for i in range(count)]
        gate_up = torch.stack([torch.cat((one["gate"], one["up"])) for one in each])
        down = torch.stack([one["down"] for one in each])
        for name, value in (("gate_up_proj", gate_up), ("down_proj", down)):
            found[f"{whole}.{name}{end}"] = (value.transpose(1, 2) if turned else value).contiguous()
    return found


def alone(tensors):
    """Return all tensors, with each stack split into experts. The stacks must not be transposed."""
    found = {}
    for name, value in tensors.items():
        whole, _, part = name.rpartition(".experts.")
        if part not in ("gate_up_proj", "down_proj"):
            found[name] = value
            continue
        for i, one in enumerate(value):
            names = ("down",) if part == "down_proj" else ("gate", "up")
            for each, matrix in zip(names, one.chunk(len(names)), strict=True):
                found[f"{whole}.experts.{i}.{each}_proj.weight"] = matrix.contiguous()
    return found
