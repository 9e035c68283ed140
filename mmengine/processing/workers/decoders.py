"""An engine's pool of decoder processes. A process that dies is replaced."""

import math
import signal
import threading
import time

from mmengine.errors import InvalidMedia, QueueFull
from mmengine.models.media_decoding import DecodedMedia, DecoderRecipe, EncodedMedia
from mmengine.processing.workers.attempt import Attempt, current_attempt
from mmengine.processing.workers.process import DecoderLost, DecoderProcess

_POLL_S = 0.05  # Seconds between checks whether a waiting request was given up.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0  # Shortest and longest pause after a failed start, in seconds.
NO_LIMIT_S = 10**6  # Stands for no limit.


class Decoders:
    """A MediaDecoder for several threads. At most `num_processes` processes decode at once, and further calls
    wait. If `waits` is false in a call's Attempt, the call exceeds this limit instead of waiting.

    Processes start on demand. If a process crashes, or if decoding exceeds `limit_s` (0: no limit) or the
    request's deadline, only the current item fails. After a failed start, no process is started during a
    pause, which grows with each failure. During the pause, an item that needs a new process raises QueueFull.
    """

    def __init__(self, recipe: DecoderRecipe, num_processes: int, memory_bytes: int, limit_s: float) -> None:
        self._recipe, self._memory_bytes = recipe, memory_bytes
        self._limit_s = limit_s or NO_LIMIT_S
        self._num_places = num_processes
        self._changed = threading.Condition()
        self._idle: list[DecoderProcess] = []
        self._num_busy = 0
        self._closed = False
        self._pause_s, self._no_start_before, self._start_error = 0.0, 0.0, ""
        self.num_lost = 0  # Processes that ended while they decoded an item.

    def __call__(self, media: EncodedMedia) -> DecodedMedia:
        attempt = current_attempt()
        self._take_place(attempt)
        process = None
        try:
            process = self._process()
            with attempt.running(process.kill):
                return self._decode(process, media, attempt)
        finally:
            self._leave(process)

    def _take_place(self, attempt: Attempt) -> None:
        with self._changed:
            while self._num_busy >= self._num_places and attempt.waits:
                attempt.check()
                self._changed.wait(_POLL_S)
            self._num_busy += 1

    def _leave(self, process: DecoderProcess | None) -> None:
        lost = process is not None and not process.usable
        with self._changed:
            self._num_busy -= 1
            self.num_lost += lost
            kept = process is not None and process.usable and not self._closed
            if process is not None and kept:
                self._idle.append(process)
            self._changed.notify()
        if process is not None and not kept:
            process.close()

    def _process(self) -> DecoderProcess:
        with self._changed:
            if self._idle:
                return self._idle.pop()
            if time.monotonic() < self._no_start_before:
                raise QueueFull(f"no decoder can be started: {self._start_error}; try again later")
        try:
            started = DecoderProcess(self._recipe, self._memory_bytes)
        except (DecoderLost, OSError) as error:
            raise self._start_failed(error) from None
        with self._changed:
            self._pause_s, self._start_error = 0.0, ""
        return started

    def _start_failed(self, error: Exception) -> QueueFull:
        with self._changed:
            self._pause_s = min(max(FIRST_PAUSE_S, 2 * self._pause_s), LONGEST_PAUSE_S)
            self._no_start_before = time.monotonic() + self._pause_s
            self._start_error = str(error)
        return QueueFull(f"no decoder can be started: {error}; try again later")

    def _decode(self, process: DecoderProcess, media: EncodedMedia, attempt: Attempt) -> DecodedMedia:
        now = time.monotonic()
        limit_s = self._limit_s
        if attempt.ends_at is not None:
            limit_s = min(limit_s, attempt.ends_at - now)
        try:
            return process.decode(media, now + limit_s, math.ceil(limit_s))
        except TimeoutError:
            attempt.check()  # Raises AttemptOver if the request's own deadline has passed.
            raise self._too_slow(media) from None
        except DecoderLost as error:
            attempt.check()
            if error.signal_number == signal.SIGXCPU:
                raise self._too_slow(media) from None
            what = f"{media.where} cannot be {self._recipe.done}"
            raise InvalidMedia(f"{what}: its process died ({error})") from None

    def _too_slow(self, media: EncodedMedia) -> InvalidMedia:
        return InvalidMedia(
            f"{media.where} takes longer than {self._limit_s:g} seconds to be {self._recipe.done} "
            "(prepare_timeout_s); send a smaller one"
        )

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return the reasons why media cannot be decoded now, or () if decoding is possible."""
        with self._changed:
            is_none_there = not self._idle and not self._num_busy
            if is_none_there and self._start_error and time.monotonic() < self._no_start_before:
                return (f"no decoder can be started: {self._start_error}",)
        return ()

    def close(self) -> None:
        """End idle processes now, and busy processes after their current items."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
        for process in idle:
            process.close()
