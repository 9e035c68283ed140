"""The tensor names of hosted models. This plugin keeps the names in the files, because transformers' own
conversion mapping renames the tensors later.
"""

from mmengine.checkpoint.names import TensorNames

NAMES = TensorNames(())
