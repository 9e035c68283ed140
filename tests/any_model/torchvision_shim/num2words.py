"""Replaces the package num2words, which SmolVLM's processor imports. tests/smolvlm compares this function
with the package.
"""

from mmengine_smolvlm.processing import in_words as num2words

__all__ = ["num2words"]
