"""Replaces the package num2words, which SmolVLM's processor imports, by mmengine's function. Both sides of a
check use this function. tests/smolvlm compares its words with the words of the package.
"""

from mmengine_smolvlm.processing import in_words as num2words

__all__ = ["num2words"]
