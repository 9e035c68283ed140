"""A tiny Qwen3-VL checkpoint that answers questions about drawn shapes, and the scenes that it was trained
on.
"""

import pathlib


def checkpoint_path() -> pathlib.Path:
    """Return the embedded checkpoint's folder, in hub layout."""
    return pathlib.Path(__file__).resolve().parent / "checkpoint"


def draft_head_path() -> pathlib.Path:
    """Return the embedded checkpoint's draft head, an EAGLE-3 head: a folder in hub layout."""
    return pathlib.Path(__file__).resolve().parent / "draft_head"
