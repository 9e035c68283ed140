"""Keeps a checkpoint's tensor names, because transformers renames the tensors when it loads them."""

from mmengine.checkpoint.names import TensorNames

NAMES = TensorNames(())
