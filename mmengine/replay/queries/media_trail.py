"""Follows the encoder outputs for a request's images and videos through the encoder cache, to explain why an
output was missing.
"""

from typing import Any

from mmengine.core.state.state import State
from mmengine.encoder_cache.cache import encoder_key
from mmengine.events import vocabulary as ev
from mmengine.events.codec import Record
from mmengine.request import Request


class MediaTrail:
    """Follows the encoder outputs that a request needs, starting at the log's first record. The caller
    applies each record to the state, and then calls `after`.
    """

    def __init__(self, state: State, request: Request):
        self._keys = {
            encoder_key(item.mm_hash, request.cache_salt, request.visual_adapter) for item in request.media
        }
        self._present: set[bytes] = set()
        # Maps an encoder key to the output's loss: the step, the reason, the request that needed the space
        # (or ""), and a remark (or "").
        self._lost: dict[bytes, tuple[int, str, str, str]] = {}

    def loses(self, event: ev.Event) -> bool:
        """Return whether the event, which is not applied yet, evicts an output that the request needs."""
        return any(key in self._present for key in getattr(event, "evict", ()))

    def after(self, state: State, record: Record, expected: ev.Event | None = None) -> None:
        """Update the trail with a record that was just applied. `expected`: the rules' decision on the same
        state, if the record evicts an output that the request needs; None if unknown.
        """
        for key in self._keys:
            if state.encoder.has(key):
                self._present.add(key)
            elif key in self._present:
                self._present.discard(key)
                note = ""
                if expected is not None and key not in getattr(expected, "evict", ()):
                    note = ", although this build's rules would not have evicted it"
                self._lost[key] = (record.step, *_cause(state, record), note)

    def miss(self, key: bytes) -> tuple[str, dict[str, Any]]:
        """Return the reason why an output was not in the cache, as a text and as a dict."""
        if key not in self._lost:
            return "never encoded before", {"miss": "never there"}
        step, why, name, note = self._lost[key]
        facts = {"miss": "lost", "lost_step": step, "why": why, "for": name}
        if why == "crash":
            return f"lost with the process that ended at step {step}", facts
        if why == "failed":
            return f"lost because step {step}, which encoded it, failed", facts
        text = f"evicted from the cache in step {step}"
        return text + (f" in favour of {name}" if name else "") + note, facts


def _cause(state: State, record: Record) -> tuple[str, str]:
    match record.event:
        case ev.Admitted(request_id=name) | ev.Encoded(request_id=name):
            return "evicted", name
        case ev.Scheduled(encode=encode):
            rows = [state.requests_by_row[row] for _, row, _ in encode]
            return "evicted", next(
                (req_state.request.request_id for req_state in rows if req_state is not None), ""
            )
        case ev.Failed():
            return "failed", ""
        case ev.Recovered():
            return "crash", ""
    return "evicted", ""
