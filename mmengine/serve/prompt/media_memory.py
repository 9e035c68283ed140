"""Limits the memory for pixels in prepared prompts, and chooses whether threads or processes decode media."""

import threading
from collections.abc import Callable, Sequence

import numpy as np

from mmengine.config import EngineConfig
from mmengine.models.plugin import MediaInput, Processor
from mmengine.processing.workers.decoders import Decoders
from mmengine.processing.workers.schemas import SchemaProcesses
from mmengine.runtime.device.threads import usable_cores

MOST_WORKERS = 4
_POLL_S = 0.1  # interval in seconds at which a waiting worker checks whether its prompt was cancelled


def media_workers(setting: int) -> int:
    """Return how many threads prepare media. A `setting` of 0 means half of the usable cores, but at least 1
    and at most 4 threads. Several threads are useful because Pillow and numpy release the GIL, but the
    model's threads need cores too.
    """
    return setting or max(1, min(MOST_WORKERS, usable_cores().count // 2))


def decoders_of(processor: Processor, config: EngineConfig, untrusted: bool) -> Decoders | None:
    """Return a process pool that decodes media, or None if the preparation threads decode media.

    With `media_decoding="auto"`, processes decode media from untrusted callers, and threads decode all other
    media.
    """
    recipe = getattr(processor, "decoder_recipe", None)
    auto = "processes" if untrusted else "threads"
    chosen = auto if config.media_decoding == "auto" else config.media_decoding
    if recipe is None or chosen == "threads":
        return None
    workers = media_workers(config.media_workers)
    return Decoders(recipe, workers, config.media_process_bytes, config.prepare_timeout_s)


def schema_processes_of(config: EngineConfig, num_processes: int) -> SchemaProcesses | None:
    """Return a process pool that normalizes large schemas from untrusted callers. Returns None if
    `media_decoding="threads"`: threads then normalize schemas.
    """
    if config.media_decoding == "threads":
        return None
    return SchemaProcesses(num_processes, config.media_process_bytes, config.prepare_timeout_s)


class MediaMemory:
    """Counts the bytes of pixel patches that prepared prompts and requests (the holders) use. Thread-safe.
    Before a worker prepares a prompt, it waits until the count is below `max_bytes`. An array with several
    holders, such as n answers to a picture, counts once. A prompt's size is known only after its preparation.
    Each worker may therefore exceed `max_bytes` by a prompt's size.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._held: dict[object, list[int]] = {}  # ids of arrays by holder
        self._rows: dict[
            int, tuple[int, np.ndarray]
        ] = {}  # by id: (number of holders, array); the id stays unique while the array exists
        self.num_bytes = 0

    @property
    def has_room(self) -> bool:
        return self.num_bytes < self._max_bytes or not self.num_bytes

    def wait_for_room(self, given_up: Callable[[], bool]) -> None:
        """Wait until `has_room`, or until `given_up` returns True because the prompt was cancelled."""
        with self._changed:
            while not self.has_room and not given_up():
                self._changed.wait(_POLL_S)

    def hold(self, holder: object, media: Sequence[MediaInput]) -> None:
        with self._changed:
            for rows in (one.patches for one in media):
                count, _ = self._rows.get(id(rows), (0, rows))
                self._rows[id(rows)] = count + 1, rows
                self._held.setdefault(holder, []).append(id(rows))
                self.num_bytes += 0 if count else rows.nbytes

    def release(self, holder: object) -> None:
        """Release the holder's pixels, if any."""
        with self._changed:
            for name in self._held.pop(holder, ()):
                count, rows = self._rows[name]
                if count > 1:
                    self._rows[name] = count - 1, rows
                else:
                    del self._rows[name]
                    self.num_bytes -= rows.nbytes
            self._changed.notify_all()
