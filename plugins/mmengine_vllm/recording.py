"""Connects a scheduler's recorder with its log, and keeps faults away from vLLM."""

import atexit
import logging
import os
import threading
from collections.abc import Callable
from time import monotonic_ns

from mmengine.events import vocabulary as ev
from mmengine_vllm.batches import events_of
from mmengine_vllm.contents import PseudoIds, TokenIds
from mmengine_vllm.host_facts import full_attention_group, not_derived, started_of
from mmengine_vllm.log_files import LogFile, free_folder
from mmengine_vllm.recorder import Recorder
from mmengine_vllm.settings import TOKENS, Settings, settings_from
from mmengine_vllm.vllm_object import VllmObject, read

log = logging.getLogger("vllm.mmengine_vllm")  # vLLM configures the logger "vllm"
FLUSH_ENTRIES = 64
FLUSH_S = 0.25


class Recording:
    """One scheduler's recording. Raises LogError and ConfigError if it cannot begin."""

    def __init__(self, scheduler: VllmObject, version: str, settings: Settings):
        self.settings = settings
        self.started = started_of(scheduler, version, settings.content)
        config = self.started.config
        hides = settings.content != TOKENS
        rows, width = config["max_num_seqs"] * config["max_in_flight"], config["num_draft_tokens"]
        contents = PseudoIds(rows, config["max_model_len"] + width + 2) if hides else TokenIds()
        self.recorder = Recorder(
            contents,
            num_rows=rows,
            block_size=config["block_size"],
            overlaps=config["max_in_flight"] > 1,
            group=full_attention_group(scheduler),
            counts_blocks=bool(not_derived(scheduler)),
            hides=hides,
            has_drafts=width > 0,
            has_adapters=config["max_loras"] > 0,
        )
        self.file = LogFile(free_folder(settings.path, _suffix(scheduler)), self.started, monotonic_ns())
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._written_ns = 0
        threading.Thread(target=self._watch, name="mmengine-log", daemon=True).start()
        atexit.register(self.close)

    def call(self, method: Callable[..., None], *args: VllmObject, **kwargs: VllmObject) -> None:
        """Call a method of the recorder. No fault leaves this method: the first one ends the recording."""
        if self._over.is_set():
            return
        try:
            with self._lock:
                method(*args, **kwargs)
                if len(self.recorder.entries) >= FLUSH_ENTRIES:
                    self._flush()
        except Exception as error:
            self._step_aside(error)

    def _flush(self) -> None:
        entries, self.recorder.entries = self.recorder.entries, []
        self.file.write(events_of(entries, self.recorder.contents))
        self._written_ns = monotonic_ns()

    def flush(self) -> None:
        """Write what was collected. VllmObject thread may call this method."""
        try:
            with self._lock:
                if self.recorder.entries and not self._over.is_set():
                    self._flush()
        except Exception as error:
            self._step_aside(error)

    def _watch(self) -> None:
        while not self._over.wait(FLUSH_S):
            if monotonic_ns() - self._written_ns > FLUSH_S * 10**9:
                self.flush()

    def _step_aside(self, error: Exception) -> None:
        """End the recording: warn once, and mark the log as incomplete from here."""
        if self._over.is_set():
            return
        self._over.set()
        what = f"{type(error).__name__}: {error}"
        log.warning("mmengine_vllm stopped recording; the log %s ends here: %s", self.file.folder, what)
        self.recorder.entries = []
        self.recorder.requests = {}
        try:
            self.file.close(ev.Noted("incomplete", what[:1000]), self.recorder.step)
        except Exception as other:
            log.warning("mmengine_vllm could not close the log %s: %s", self.file.folder, other)

    def close(self) -> None:
        """Write the rest and close the log. A second call does nothing."""
        self.flush()
        with self._lock:
            if self._over.is_set():
                return
            self._over.set()
            try:
                self.file.close()
            except Exception as error:
                log.warning("mmengine_vllm could not close the log %s: %s", self.file.folder, error)


def begin(scheduler: VllmObject, version: str) -> Recording | None:
    """Return the scheduler's recording, or None if there is none to make or it cannot begin."""
    try:
        settings = settings_from()
        if not settings.path:
            log.warning("mmengine_vllm records nothing: set MMENGINE_LOG to a folder for the log")
            return None
        recording = Recording(scheduler, version, settings)
    except Exception as error:
        log.warning("mmengine_vllm records nothing: %s: %s", type(error).__name__, error)
        return None
    log.info(
        "mmengine_vllm records to %s (process %d, content: %s)",
        recording.file.folder,
        os.getpid(),
        settings.content,
    )
    return recording


def _suffix(scheduler: VllmObject) -> str:
    """Return what separates the logs of data-parallel engines."""
    size = read(scheduler, "parallel_config.data_parallel_size", 1)
    rank = read(scheduler, "parallel_config.data_parallel_index", 0)
    return f"-dp{rank}" if size > 1 else ""
