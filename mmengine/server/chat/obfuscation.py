"""Pads a stream's events with the field `obfuscation`. An observer of an encrypted connection sees the
events' sizes, which would otherwise reveal the lengths of tokens.
"""

import hashlib
from base64 import b64encode

from mmengine.core.executor import PromptLogprobs
from mmengine.serve.text.choice_deltas import Delta
from mmengine.server.chat.chat_frames import Frames

STEP = 64  # Events are padded to a multiple of STEP bytes.
_END = b"}\n\n"
_FIELD = b',"obfuscation":"%b"}\n\n'
_FIELD_BYTES = len(_FIELD) - len(_END) - len(b"%b")


def obfuscate(event: bytes) -> bytes:
    """Return an event with the field `obfuscation`. The event's data is a JSON object. The field's characters
    come from a hash of the event, so a repeated stream has the same bytes.
    """
    count = -(len(event) + _FIELD_BYTES) % STEP
    characters = b64encode(hashlib.sha512(event).digest())[:count]
    return event[: -len(_END)] + _FIELD % characters


class ObfuscatedFrames:
    """Wraps the frames of an OpenAI format, and obfuscates each choice's frames."""

    def __init__(self, inner: Frames):
        self._inner = inner
        self.tails, self.done = inner.tails, inner.done
        self.error, self.usage, self.whole = inner.error, inner.usage, inner.whole

    def first(self, index: int, scores: PromptLogprobs | None = None) -> bytes:
        return _each(self._inner.first(index, scores))

    def delta(self, index: int, delta: Delta) -> bytes:
        return _each(self._inner.delta(index, delta))

    def finish(self, index: int, rest: Delta, finish_reason: str, stop_reason: str | int | None) -> bytes:
        return _each(self._inner.finish(index, rest, finish_reason, stop_reason))


def _each(frame: bytes) -> bytes:
    return b"".join(obfuscate(event + b"\n\n") for event in frame.split(b"\n\n")[:-1])
