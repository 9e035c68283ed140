"""Writes a recorder's events to a log on disk, or to a ring of the last events in memory. The recorder's
errors never reach vLLM.
"""

import atexit
import logging
import os
import signal
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from time import monotonic_ns
from types import FrameType

from msgspec.structs import replace

from mmengine.block_groups import log_order
from mmengine.config import EngineConfig
from mmengine.errors import LogError, MMEngineError
from mmengine.events import vocabulary as ev
from mmengine_vllm.bases import Written
from mmengine_vllm.batches import events_of
from mmengine_vllm.contents import PseudoIds, TokenIds
from mmengine_vllm.host_facts import (
    VERSIONS,
    begun_midway,
    is_known,
    not_derived,
    started_of,
    unknown_fields,
)
from mmengine_vllm.kv_groups import full_attention_group
from mmengine_vllm.log_files import LogFile, LogSeries, free_folder
from mmengine_vllm.midway import beginning_of
from mmengine_vllm.recorder import Recorder, UnknownCall
from mmengine_vllm.ring import Base, Ring
from mmengine_vllm.settings import TOKENS, Settings, settings_from
from mmengine_vllm.vllm_object import VllmObject, read

log = logging.getLogger("vllm.mmengine_vllm")  # vLLM configures the logger "vllm"
CONVERTED_ENTRIES = 128  # Recorder entries are converted to events in batches of this size.
FLUSH_EVENTS = 256
FLUSH_S = 0.25
CLOSE_S = 10.0  # timeout in s of `close` for a dump in progress


class Recording:
    """The recording of one scheduler. Raises LogError and ConfigError if the recording cannot begin."""

    def __init__(self, scheduler: VllmObject, version: str, settings: Settings):
        self.settings, self._scheduler = settings, scheduler
        self.started = started_of(scheduler, version, settings.content)
        self.recorder = _recorder_of(scheduler, self.started, hides=settings.content != TOKENS)
        self.path = settings.path + _suffix(scheduler)
        self._events: Written = []  # events that are not yet written
        self._is_first = True  # True until the first call of `schedule`
        self._lock = threading.Lock()
        self._is_over, self._wakes = False, threading.Event()
        self._dump_for = ""  # the reason for a requested dump, or ""
        self._written_ns = self._reported_ns = monotonic_ns()
        self._ring: Ring | None = None
        self._series: LogSeries | None = None
        if settings.ring_s:
            self._ring = Ring(settings.ring_s)
            self._ring.begin(Base(monotonic_ns(), [], 0, 0, set()))
            self._handle_signal()
        else:
            self._series = LogSeries(self.path, settings.max_bytes, self.started)
        self._watcher = threading.Thread(target=self._watch, name="mmengine-log", daemon=True)
        self._watcher.start()
        atexit.register(self.close)

    @property
    def where(self) -> str:
        """The log's location and how to get the log, for the startup message."""
        if self._series is not None:
            return f"to {self._series.folder}"
        how = f"kill -USR1 {os.getpid()} writes them to {self.path}"
        return f"the last {self.settings.ring_s:g} seconds in memory; {how}"

    # Methods that the scheduler's thread calls

    def call(self, method: Callable[..., None], *args: VllmObject, **kwargs: VllmObject) -> None:
        """Call a recorder method. Raises nothing: the first error ends the recording."""
        if self._is_over:
            return
        num_before = 0
        try:
            with self._lock:
                num_before = len(self.recorder.entries)
                method(*args, **kwargs)
                if len(self.recorder.entries) >= CONVERTED_ENTRIES:
                    self._convert()
                    if len(self._events) >= FLUSH_EVENTS:
                        self._flush()
        except Exception as error:
            self._step_aside(error, num_before)

    def scheduled(self, output: VllmObject, *args: VllmObject) -> None:
        """Record the result of `schedule`. For the first result, log a warning with the fields that are not
        recorded.
        """
        if self._is_first:
            self._is_first = False
            if fields := unknown_fields(output):
                log.warning(
                    "mmengine_vllm: SchedulerOutput has fields that the log leaves out: %s", ", ".join(fields)
                )
        self.recorder.scheduled(output, *args)

    def executed(self, *args: VllmObject) -> None:
        """Record a call of `update_from_output`. If due, begin a new log folder or a new ring base."""
        self.recorder.executed(*args)
        due = self._series.is_due() if self._series is not None else False
        if self._ring is not None:
            due = self._ring.is_due(monotonic_ns())
        if due:
            self._begin_anew()

    def failed(self, what: str, error: BaseException) -> None:
        """Record that a method of vLLM's scheduler raised an error, and write the log."""
        self.call(self.recorder.note, "exception", f"{what}: {_described(error)}")
        if self._ring is None:
            self.flush()
        else:
            self.dump(f"{what} raised {type(error).__name__}")

    def _begin_anew(self) -> None:
        self._flush()
        made = beginning_of(self.recorder, self._scheduler)
        if made is None:
            return  # the next update will try again
        recorder, (events, step) = self.recorder, made
        base = Base(monotonic_ns(), events, recorder.step, step, set(recorder.encoded))
        if self._ring is not None:
            self._ring.begin(base)
        if self._series is not None:
            self._series.begin(base)

    # Methods that any thread may call

    def _convert(self) -> None:
        entries, self.recorder.entries = self.recorder.entries, []
        self._events += events_of(entries, self.recorder.contents, self.recorder.order)

    def _flush(self) -> None:
        self._convert()
        events, self._events = self._events, []
        if self._ring is not None:
            self._ring.write(events)
        if self._series is not None:
            self._series.write(events)
        self._written_ns = monotonic_ns()

    def flush(self) -> None:
        """Write the collected entries to the log or the ring."""
        try:
            with self._lock:
                if (self.recorder.entries or self._events) and not self._is_over:
                    self._flush()
        except Exception as error:
            self._step_aside(error)

    def dump(self, why: str) -> None:
        """Write the ring to a new folder. After a failure, log a warning and continue the ring."""
        if self._ring is None or self._is_over:
            return
        try:
            with self._lock:
                self._flush()
                events, is_whole = self._ring.contents(), self._ring.is_whole
            facts = {"dumped": why}
            started = begun_midway(self.started, facts)
            if is_whole:
                started = replace(self.started, fingerprints={**self.started.fingerprints, **facts})
            file = LogFile(free_folder(self.path), started, _first_ns(events))
            file.write(events)
            file.close()
        except Exception as error:
            log.warning("mmengine_vllm could not write its ring: %s: %s", type(error).__name__, error)
            return
        log.warning("mmengine_vllm wrote %d records to %s: %s", len(events), file.folder, why)

    def close(self) -> None:
        """Write the remaining entries and a requested dump, and close the log. A second call does nothing."""
        self.flush()
        self._dump_if_signalled()
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            self._wakes.set()
            self._close(None)
        self._watcher.join(CLOSE_S)  # the thread may be in the middle of a dump

    def _close(self, last: ev.Event | None) -> None:
        try:
            if self._series is not None:
                self._series.close(last, self.recorder.step)
        except LogError as error:
            log.warning("mmengine_vllm could not close its log: %s", error)

    def _step_aside(self, error: Exception, num_entries: int = 0) -> None:
        """End the recording after an error. Log a warning, write the first `num_entries` entries, and mark
        the log as incomplete.
        """
        if self._is_over:
            return
        self._is_over = True
        self._wakes.set()
        what = f"{type(error).__name__}: {error}"
        log.warning("mmengine_vllm stopped recording %s; the log ends here: %s", self.where, what)
        # Further errors are ignored: the warning names the first error.
        with self._lock, suppress(Exception):
            self.recorder.requests = {}
            del self.recorder.entries[num_entries:]
            self._flush()
        self._close(ev.Noted("incomplete", _described(error)))

    # Methods of the watching thread

    def _watch(self) -> None:
        """Every FLUSH_S seconds, write waiting entries, dump the ring after a signal, and report stalls."""
        while not self._is_over:
            self._wakes.wait(FLUSH_S)
            self._wakes.clear()
            self._dump_if_signalled()
            if monotonic_ns() - self._written_ns > FLUSH_S * 1e9:
                self.flush()
            self._look_for_stall()

    def _dump_if_signalled(self) -> None:
        with self._lock:
            why, self._dump_for = self._dump_for, ""
        if why:
            self.dump(why)

    def _look_for_stall(self) -> None:
        """Report a stall: requests exist, but no row got a token for `stall_s` seconds."""
        recorder, now = self.recorder, monotonic_ns()
        since = max(recorder.progress_ns, self._reported_ns)
        if not recorder.requests or recorder.is_paused:
            self._reported_ns = now
        if not self.settings.stall_s or now - since < self.settings.stall_s * 1e9 or self._reported_ns == now:
            return
        self._reported_ns = now
        num_running = recorder.num_running
        what = (
            f"no token for {self.settings.stall_s:g} seconds: {num_running} requests run and "
            f"{len(recorder.requests) - num_running} wait"
        )
        log.warning("mmengine_vllm: %s", what)
        self.call(recorder.note, "stall", what)
        self.dump(what) if self._ring is not None else self.flush()

    def _handle_signal(self) -> None:
        """Let SIGUSR1 dump the ring. An earlier handler of the signal is called too."""

        def handle(number: int, frame: FrameType | None) -> None:
            self._dump_for = "SIGUSR1"
            self._wakes.set()
            if callable(before):
                before(number, frame)

        try:
            before = signal.signal(signal.SIGUSR1, handle)
        except (ValueError, AttributeError) as error:  # this is not the main thread, or the system is Windows
            log.warning("mmengine_vllm: SIGUSR1 will not dump the ring: %s", error)


def _recorder_of(scheduler: VllmObject, started: ev.Started, *, hides: bool) -> Recorder:
    config = EngineConfig.from_dict(started.config)
    width = config.num_draft_tokens
    contents = PseudoIds(config.num_rows, config.max_model_len + width + 2) if hides else TokenIds()
    return Recorder(
        contents,
        num_rows=config.num_rows,
        block_size=config.block_size,
        overlaps=config.max_in_flight > 1,
        group=full_attention_group(scheduler),
        groups=log_order(config.block_groups),
        counts_blocks=bool(not_derived(scheduler)),
        hides=hides,
        has_drafts=width > 0,
        has_adapters=config.max_loras > 0,
    )


def _described(error: BaseException) -> str:
    """Return an error's type and, for mmengine's errors, the text. Other errors' texts may quote a request,
    so the code line that raised the error is returned instead.
    """
    if isinstance(error, (MMEngineError, UnknownCall)):
        return f"{type(error).__name__}: {error}"[:1000]
    frames = traceback.extract_tb(error.__traceback__)
    place = (
        f" in {frames[-1].name} ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})"
        if frames
        else ""
    )
    return f"{type(error).__name__}{place}"


def _first_ns(events: list[tuple[ev.Event, int, int]]) -> int:
    return events[0][2] if events else monotonic_ns()


def begin(scheduler: VllmObject, version: str) -> Recording | None:
    """Return the scheduler's recording, or None if there is no log folder or the recording cannot begin."""
    try:
        settings = settings_from()
        if not settings.path:
            log.warning("mmengine_vllm records nothing: set MMENGINE_LOG to a folder for the log")
            return None
        recording = Recording(scheduler, version, settings)
    except Exception as error:
        log.warning("mmengine_vllm records nothing: %s: %s", type(error).__name__, error)
        return None
    if not is_known(version):
        known = f"{VERSIONS[0]} to {VERSIONS[-1]}"
        what = "the log ends at the first call that it cannot describe"
        log.warning("mmengine_vllm knows vLLM %s, and this is vLLM %s: %s", known, version, what)
    content = settings.content
    log.info("mmengine_vllm records %s (process %d, content: %s)", recording.where, os.getpid(), content)
    return recording


def _suffix(scheduler: VllmObject) -> str:
    """Return a suffix that separates the logs of data-parallel engines."""
    size = read(scheduler, "parallel_config.data_parallel_size", 1)
    rank = read(scheduler, "parallel_config.data_parallel_index", 0)
    return f"-dp{rank}" if size > 1 else ""
