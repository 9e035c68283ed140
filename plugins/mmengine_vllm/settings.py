"""Reads the recorder's settings from environment variables."""

import os
from collections.abc import Mapping
from typing import NamedTuple

HASHES, TOKENS = "hashes", "tokens"
DEFAULT_STALL_S = 30.0


class Settings(NamedTuple):
    """The recorder's settings.

    `path`: the log's folder; "" for no log. `max_bytes`: retention limit; 0 for no limit. `content`:
    HASHES or TOKENS. `ring_s`: seconds that a log in memory covers; 0 for a log on disk. `stall_s`: seconds
    without a token that count as a stall; 0 for never.
    """

    path: str = ""
    max_bytes: int = 0
    content: str = HASHES
    ring_s: float = 0.0
    stall_s: float = DEFAULT_STALL_S


def settings_from(environment: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings. Raises ValueError for an invalid value."""
    content = environment.get("MMENGINE_LOG_CONTENT") or HASHES
    if content not in (HASHES, TOKENS):
        raise ValueError(f"MMENGINE_LOG_CONTENT is {content!r}; set it to {HASHES} or {TOKENS}")
    return Settings(
        path=environment.get("MMENGINE_LOG", ""),
        max_bytes=int(_number(environment, "MMENGINE_LOG_BYTES", 0)),
        content=content,
        ring_s=_number(environment, "MMENGINE_LOG_RING_SECONDS", 0),
        stall_s=_number(environment, "MMENGINE_STALL_SECONDS", DEFAULT_STALL_S),
    )


def _number(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 2**50:
        raise ValueError(f"{name} is {text!r}; set it to a number from 0 on")
    return value
