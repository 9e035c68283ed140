"""Leaves a checkpoint's tensor names unchanged, because transformers renames the tensors during loading."""

from mmengine.checkpoint.names import TensorNames

NAMES = TensorNames(())
