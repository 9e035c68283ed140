"""A tiny Qwen3-VL checkpoint about drawn shapes, and the scenes it was trained on."""

import pathlib


def checkpoint_path() -> pathlib.Path:
    """Folder of the embedded checkpoint, in hub layout."""
    return pathlib.Path(__file__).resolve().parent / "checkpoint"


def draft_head_path() -> pathlib.Path:
    """Folder of the EAGLE-3 head that drafts for the embedded checkpoint, in hub layout."""
    return pathlib.Path(__file__).resolve().parent / "draft_head"
