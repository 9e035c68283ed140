"""Checks a log's records before a replay trusts them: a log may come from an untrusted source.

Records that would make a replay take too much memory, or never end, are refused here by their size. Every
other false record makes the fold raise, and `naming` converts this error to a CorruptLog with the record's
number.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import numpy as np

from mmengine.config import EngineConfig
from mmengine.core.decide.deciders import scheduler_of
from mmengine.core.decide.request_checks import check_content
from mmengine.core.decide.scheduler import DECISION_VERSION
from mmengine.core.fold.evolve import evolve
from mmengine.core.snapshot.snapshot import filled, newest_before, oldest_after
from mmengine.core.state.flight import work_done
from mmengine.core.state.policy import policy_named
from mmengine.core.state.state import State
from mmengine.core.step_result import check_drafted, prompt_logprobs
from mmengine.errors import ConfigError, CorruptLog, LogError
from mmengine.events import vocabulary as ev
from mmengine.events.codec import Record
from mmengine.events.follower import LogFollower
from mmengine.events.log import LogReader
from mmengine.events.log_end import log_end
from mmengine.events.recovery import Cut
from mmengine.events.segment import segment_paths

_CHECKED = frozenset((ev.Started, ev.Queued, ev.Finished))
# Limit on the cells (rows x tokens, or KV slots) that a replay must hold for a log's settings.
MAX_CELLS = 2**31


class CheckedLog:
    """Iterates over the records in a folder's log; `record` is the current record.

    `wait`: for a log that is still being written, see LogFollower. `after`: a record number; the iteration
    begins after the newest snapshot before that record. If the log's beginning was deleted, the iteration
    begins after the oldest snapshot. `begins_after` is the number of the snapshot's record, or -1; `first` is
    the first record, if any.

    Raises LogError when there is no log, CorruptLog for a damaged file or another format.
    """

    def __init__(self, folder: Path, wait: Callable[[], bool] | None = None, after: int | None = None):
        while wait is not None and not segment_paths(folder) and wait():
            pass  # Nothing is written yet.
        self._reader: LogReader | LogFollower = LogReader(folder)
        base = None
        if after is not None:
            base = newest_before(folder, after)
        elif self._reader.first_sequence:
            base = oldest_after(folder, self._reader.first_sequence - 1)
        if wait is not None:
            self._reader = LogFollower(folder, wait, 0 if base is None else base[1].sequence + 1)
        elif base is not None:
            self._reader = LogReader(folder, start=base[1].sequence + 1)
        self._base = base[1] if base is not None else None
        self.begins_after = -1 if self._base is None else self._base.sequence
        self._records = (record for record in self._reader if record.sequence > self.begins_after)
        self.first = self.record = next(self._records, None)
        self.started = self._started(folder)
        self.config = _replay_config(self.started, folder)
        self._live: set[str] = set() if base is None else set(base[0].requests)

    def _started(self, folder: Path) -> ev.Started:
        if self._base is not None:
            return self._base.started
        if self.first is None and (end := log_end(folder)).kind:
            raise CorruptLog(f"{folder} contains no record; {end.text}", end.kind)
        if self.first is None or not isinstance(self.first.event, ev.Started):
            raise CorruptLog(f"{folder} does not begin with STARTED, so the log is incomplete")
        return self.first.event

    def first_state(self) -> State:
        """Return the state before the first record."""
        if self._base is not None:
            return filled(self._base)
        with self.naming():
            return State(self.config)

    @property
    def torn(self) -> Cut | None:
        """The position at which the iteration ended, if the bytes there are not a whole record."""
        return self._reader.torn

    def __iter__(self) -> Iterator[Record]:
        if self.first is None:
            return
        if self._base is None:
            yield self.first
        for record in self._records if self._base is None else chain((self.first,), self._records):
            self.record = record
            event = record.event
            if type(event) in _CHECKED or isinstance(event, ev.Executed) and len(event.token_ids) % 4:
                with self.naming():
                    self._check_observation(event)
            yield record

    @contextmanager
    def naming(self, record: Record | None = None) -> Iterator[None]:
        """Convert an error in this block to a CorruptLog that names `record` (default: the current
        record).
        """
        try:
            yield
        except LogError:
            raise
        except Exception as error:
            lying = record or self.record
            if lying is None:
                raise
            raise self.contradiction(lying, error) from error

    @staticmethod
    def contradiction(record: Record, error: Exception) -> CorruptLog:
        what = (str(error).splitlines() or [""])[0][:200]
        return CorruptLog(
            f"record {record.sequence} (step {record.step}, {type(record.event).__name__}) contradicts the "
            f"records before it: {type(error).__name__}: {what}"
        )

    def apply(self, state: State, event: ev.Event) -> None:
        """Check an event's sizes and fold it. Unlike `verify`, this method does not decide again to compare
        the decisions.
        """
        _check_columns(state, event)
        evolve(state, event)

    def _check_observation(self, event: ev.Event) -> None:
        match event:
            case ev.Started():
                raise ValueError("STARTED may only be the first record of a log")
            case ev.Queued(request_id=name):
                if name in self._live:
                    raise ValueError(f"the request id {name!r} belongs to a request that has not ended")
                self._live.add(name)
                check_content(np.frombuffer(event.prompt, np.int32), event.media, self.config)
            case ev.Finished(request_id=name):
                self._live.discard(name)
            case ev.Executed():
                raise ValueError(
                    f"token_ids has {len(event.token_ids)} bytes, which is not a multiple of 4 (int32)"
                )


def _replay_config(started: ev.Started, folder: Path) -> EngineConfig:
    """Return the log's settings.

    Raises CorruptLog for an unknown schema, and for settings whose state would not fit into memory.
    """
    if started.schema != ev.SCHEMA_VERSION:
        raise CorruptLog(
            f"STARTED in {folder} has schema {started.schema}; this build reads schema {ev.SCHEMA_VERSION}",
            "version",
        )
    try:
        config = EngineConfig.from_dict(started.config)
        config.check_foldable()
        policy_named(config.policy)
    except ConfigError as error:
        raise CorruptLog(f"STARTED in {folder} contains invalid settings: {error}") from None
    if max(config.max_num_seqs * config.max_model_len, config.num_blocks * config.block_size) > MAX_CELLS:
        raise CorruptLog(
            f"STARTED in {folder} has more rows or blocks than a replay can hold: max_num_seqs x "
            f"max_model_len and num_blocks x block_size may each be at most {MAX_CELLS}"
        )
    constants = scheduler_of(config).constants(config.lookahead_tokens)
    if started.decision_version == DECISION_VERSION and started.constants != constants:
        raise CorruptLog(
            f"STARTED in {folder} contradicts itself: its constants do not follow from its settings"
        )
    if started.num_blocks != config.num_blocks:
        raise CorruptLog(
            f"STARTED in {folder} contradicts itself: its num_blocks is {started.num_blocks}, but num_blocks "
            f"in its settings is {config.num_blocks}"
        )
    return config


def _check_columns(state: State, event: ev.Event) -> None:
    """Raise ValueError for numbers with which the fold would allocate more memory than any step can need."""
    config = state.config
    match event:
        case ev.Scheduled():
            _check_column("rows", event.rows, 0, config.max_num_seqs)
            _check_column("num_tokens", event.num_tokens, 1, config.token_budget + 1)
            total = int(np.frombuffer(event.num_tokens or b"", np.int32).sum())
            if total > config.token_budget:
                raise ValueError(
                    f"the step has {total} tokens; the limit is {config.token_budget} (token_budget)"
                )
            _check_column("new_blocks", event.new_blocks, 1, config.num_blocks)
        case ev.Admitted():
            _check_column("cached_blocks", event.cached_blocks, 1, config.num_blocks)
            _check_column("new_blocks", event.new_blocks, 1, config.num_blocks)
            if not 1 <= event.num_tokens <= config.token_budget:
                raise ValueError(f"num_tokens is {event.num_tokens}, outside 1 to {config.token_budget}")
        case ev.Encoded(request_id=name, index=index):
            req_state = state.requests[name]
            done = work_done(state.part, req_state.media_keys[index])
            work = req_state.media_work[index]
            if index < 0:
                raise ValueError(f"the media item's index is {index}, below 0")
            if not done < event.until <= work:
                raise ValueError(f"until is {event.until}, outside {done + 1} to {work}")
        case ev.Fetched(request_id=name):
            _check_column("cached", event.cached, 1, config.num_blocks)
            _check_column("blocks", event.blocks, 1, config.num_blocks)
            if not event.blocks:
                raise ValueError("no block is fetched")
            size = config.block_size * (len(event.cached) + len(event.blocks)) // 4
            num_tokens = len(state.requests[name].tokens)
            if size >= num_tokens:
                raise ValueError(
                    f"{size} tokens are cached or fetched for a request with {num_tokens} tokens; at least "
                    "one token must stay to be computed"
                )
        case ev.Leased(session_id=name):
            _check_column("blocks", event.blocks, 1, config.num_blocks)
            _check_kept(event.num_kept, len(state.sessions.all[name].leased))
        case ev.LeaseTaken(session_id=name):
            _check_kept(event.num_kept, len(state.sessions.all[name].leased))
        case ev.Arrived(request_id=name):
            most = 8 * state.requests[name].num_fetching
            if not 0 < len(event.digests) <= most:
                raise ValueError(
                    f"digests has {len(event.digests)} bytes, outside 1 to {most} (8 for each block that the "
                    "request still waits for)"
                )
        case ev.Dispatched():
            if len(state.flights) >= config.max_in_flight:
                raise ValueError(
                    f"{len(state.flights)} steps are already in flight, as many as max_in_flight allows"
                )
        case ev.Executed():
            _check_tokens(state, event)
        case ev.Drafted():
            columns = (event.rows, event.num_drafts, event.drafts)
            check_drafted(state, *(np.frombuffer(column, np.int32) for column in columns))


def _check_kept(num_kept: int, most: int) -> None:
    if not 0 <= num_kept <= most:
        raise ValueError(f"num_kept is {num_kept}, outside 0 to {most} (the blocks in the session's lease)")


def _check_tokens(state: State, event: ev.Executed) -> None:
    sampled = state.sampled_rows()
    num_tokens = len(sampled)
    if event.counts is not None:
        _check_column("counts", event.counts, 1, state.config.num_draft_tokens + 2)
        counts = np.frombuffer(event.counts, np.int32)
        if len(counts) != len(sampled) or (counts > state.scheduled_drafts[sampled] + 1).any():
            raise ValueError(
                f"counts must have one value for each of the {len(sampled)} sampled rows, at most the "
                "row's number of drafts plus 1"
            )
        num_tokens = int(counts.sum())
    if len(event.token_ids) != 4 * num_tokens:
        raise ValueError(
            f"token_ids has {len(event.token_ids) // 4} tokens, but the step's {len(sampled)} sampled rows "
            f"have {num_tokens}"
        )
    for found in prompt_logprobs(event):
        if not 0 <= found.row < len(sampled):
            raise ValueError(
                f"prompt_logprobs has the index {found.row}, but the step has {len(sampled)} sampled rows"
            )
    if event.num_drafts is not None:
        _check_column("num_drafts", event.num_drafts, 0, state.config.num_draft_tokens + 1)
        num_drafts = np.frombuffer(event.num_drafts, np.int32)
        if len(num_drafts) != len(sampled) or 4 * int(num_drafts.sum()) != len(event.drafts):
            raise ValueError(
                f"num_drafts must have one value for each of the {len(sampled)} sampled rows, and their sum "
                f"must be the number of tokens in drafts ({len(event.drafts) // 4})"
            )
        if len(state.flights) > 1 and len(event.drafts):
            raise ValueError("the step has drafts, but the step after it was already dispatched")


def _check_column(name: str, column: bytes | None, low: int, high: int) -> None:
    """Raise ValueError unless the bytes are int32 values in [low, high)."""
    values = np.frombuffer(column or b"", np.int32)
    if len(values) and not low <= int(values.min()) <= int(values.max()) < high:
        raise ValueError(
            f"{name} has values from {values.min()} to {values.max()}; {low} to {high - 1} are allowed"
        )
