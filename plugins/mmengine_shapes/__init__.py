"""The included checkpoint, a tiny Qwen3-VL model that answers questions about drawn shapes, and its training
scenes.
"""

import pathlib


def checkpoint_path() -> pathlib.Path:
    """Return the folder of the included checkpoint, in hub layout."""
    return pathlib.Path(__file__).resolve().parent / "checkpoint"


def draft_head_path() -> pathlib.Path:
    """Return the folder of the included checkpoint's draft head (EAGLE-3), in hub layout."""
    return pathlib.Path(__file__).resolve().parent / "draft_head"
