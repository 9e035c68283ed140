"""Stands for the package num2words, which SmolVLM's processor imports. Writes numbers as mmengine does."""

from mmengine_smolvlm.processing import in_words as num2words

__all__ = ["num2words"]
