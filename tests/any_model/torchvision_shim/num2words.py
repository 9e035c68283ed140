"""Replaces the package num2words, which SmolVLM's processor imports. tests/smolvlm compares this
replacement with the package's recorded output.
"""

from mmengine_smolvlm.processing import in_words as num2words

__all__ = ["num2words"]
