"""Declares two operators of torchvision before torchvision is imported. Each Python process of the
environment of `make vllm` runs this file at its start.

PyPI's torchvision needs CUDA libraries for its operators, and importing torchvision requires that these two
operators exist. The transforms are pure Python.
"""

import sys


class _BeforeTorchvision:
    """Finds no module, and declares the operators when torchvision is looked for."""

    library = None

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and self.library is None:
            import torch  # lazy: most processes do not need it

            self.library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _BeforeTorchvision())
