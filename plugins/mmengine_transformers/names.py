"""The tensor names of hosted models. Names stay as stored, because transformers' own mapping renames
tensors.
"""

from mmengine.checkpoint.names import TensorNames

NAMES = TensorNames(())
