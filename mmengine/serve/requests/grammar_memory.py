"""Memory for the sources of live requests' grammars."""

import sys
import threading

import msgspec

from mmengine.errors import QueueFull
from mmengine.request import GrammarRequest

MAX_BYTES = 128 * 2**20  # bytes of all different sources; each has at most 8 MiB


class GrammarMemory:
    """Grammar sources by holder. Equal sources share an object and count once. Thread-safe."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._held: dict[object, str] = {}  # by holder
        self._known: dict[str, list] = {}  # by source: [its object, the number of its holders]
        self.num_bytes = 0

    def hold(self, holder: object, grammar: GrammarRequest, *, was_accepted: bool = False) -> GrammarRequest:
        """Return `grammar` with the shared object for its source, which is kept until `release`.

        A holder has a single source. Raises QueueFull if there is no room for a new source, unless a previous
        process has accepted the request (`was_accepted`).
        """
        source = grammar.source
        with self._lock:
            size = sys.getsizeof(source)
            known = self._known.get(source)
            if known is None:
                if self.num_bytes + size > self.max_bytes and not was_accepted:
                    raise QueueFull(
                        f"the grammars of {len(self._held)} requests take {self.num_bytes:,} of "
                        f"{self.max_bytes:,} bytes, and this one needs {size:,} more: try again later"
                    )
                known = self._known[source] = [source, 0]
                self.num_bytes += size
            known[1] += 1
            self._held[holder] = known[0]
            return _with_source(grammar, known[0])

    def shared(self, grammar: GrammarRequest) -> GrammarRequest:
        """Return `grammar` with the shared object for an equal source, unchanged if none is held."""
        with self._lock:
            known = self._known.get(grammar.source)
            return grammar if known is None else _with_source(grammar, known[0])

    def release(self, holder: object) -> None:
        """Release the holder's source. A holder without a source is no error."""
        with self._lock:
            source = self._held.pop(holder, None)
            if source is None:
                return
            known = self._known[source]
            known[1] -= 1
            if not known[1]:
                del self._known[source]
                self.num_bytes -= sys.getsizeof(source)


def _with_source(grammar: GrammarRequest, source: str) -> GrammarRequest:
    return grammar if grammar.source is source else msgspec.structs.replace(grammar, source=source)
