"""Loads the torchvision package in build/torchvision on machines without CUDA.

That package's wheel declares two operators only with CUDA. This module comes first on the path, declares the
operators, and then runs the package's code in this module's namespace.
"""

from importlib.machinery import PathFinder
from pathlib import Path

import torch

_operators = torch.library.Library("torchvision", "DEF")
_operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_build = Path(__file__).resolve().parents[4] / "build" / "torchvision"
_found = PathFinder.find_spec("torchvision", [str(_build)])
assert _found is not None and _found.origin is not None, "make fetch-torchvision was not run"
__path__ = list(_found.submodule_search_locations or ())
__file__ = _found.origin
exec(compile(Path(_found.origin).read_bytes(), _found.origin, "exec"))
