"""What the grammars of requests that are not over may take as texts."""

import sys
import threading

from mmengine.errors import QueueFull

MAX_BYTES = 128 * 2**20  # of all different texts; each has 8 MiB at most


class GrammarMemory:
    """Grammars as texts, by holder. Equal texts are one object, and count once. Thread-safe."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._held: dict[object, str] = {}  # by holder
        self._known: dict[str, list] = {}  # by text: [its object, how many holders it has]
        self.num_bytes = 0

    def hold(self, holder: object, text: str, *, was_accepted: bool = False) -> str:
        """The one object for `text`, kept until `release`; a holder has one text. Raises QueueFull where a
        new text finds no room; a text that `was_accepted`, by a process before, is held all the same."""
        with self._lock:
            size = sys.getsizeof(text)
            known = self._known.get(text)
            if known is None:
                if self.num_bytes + size > self.max_bytes and not was_accepted:
                    raise QueueFull(
                        f"the grammars of {len(self._held)} requests take {self.num_bytes:,} of "
                        f"{self.max_bytes:,} bytes, and this one has {size:,} more; try again later"
                    )
                known = self._known[text] = [text, 0]
                self.num_bytes += size
            known[1] += 1
            self._held[holder] = known[0]
            return known[0]

    def shared(self, text: str) -> str:
        """The object of an equal text that is held, else `text` itself."""
        with self._lock:
            known = self._known.get(text)
            return text if known is None else known[0]

    def release(self, holder: object) -> None:
        """The holder needs its text no more. A holder without one is no error."""
        with self._lock:
            text = self._held.pop(holder, None)
            if text is None:
                return
            known = self._known[text]
            known[1] -= 1
            if not known[1]:
                del self._known[text]
                self.num_bytes -= sys.getsizeof(text)
