"""Declares two operators of torchvision before torchvision is imported. In the environment of `make vllm`,
each Python process runs this file at its start.

Importing torchvision requires these operators, but PyPI's torchvision loads its operators only with CUDA
libraries. Its transforms are pure Python and work without the operators.
"""

import sys


class _BeforeTorchvision:
    """Declares the operators when torchvision is imported. `find_spec` returns None, so Python's other
    finders import the module.
    """

    library = None

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and self.library is None:
            import torch  # lazy: most processes do not need it

            self.library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _BeforeTorchvision())
