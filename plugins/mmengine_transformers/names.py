"""The names of a hosted model's tensors: as stored, because transformers' own mapping renames them."""

from mmengine.checkpoint.names import TensorNames

NAMES = TensorNames(())
