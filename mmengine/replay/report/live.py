"""Produces messages that keep a report page up to date while its log grows: first everything in the log, and
then the changes.

The messages have the report's columns. After `MAX_STEPS` steps or `MAX_LANES` requests, the page starts again
with only the live requests.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from mmengine.events.codec import Record
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.report.collect import STATES, Collector
from mmengine.version import __version__

MAX_STEPS = 20_000  # Maximum number of steps on a live page.
MAX_LANES = 20_000  # Maximum number of requests on a live page.
MAX_NOTES = 64  # Maximum number of notes in a message.
_ARRIVED = ("start", "prompt", "media", "embeds")
_CHANGING = ("end", "cached", "answer", "preemptions")
Message = dict[str, object]
_T = TypeVar("_T")


class LiveReport:
    """Collects the data for a live page. The owner passes each record to `take`. `news` returns the changes
    since the previous call.
    """

    def __init__(self, log: CheckedLog, name: str):
        self._log, self._name = log, name
        self._begin(Collector(log))

    def _begin(self, collector: Collector) -> None:
        self._collector = collector
        self._is_new = True
        self._told = dict.fromkeys(("steps", "lanes", "segments", "chunks", "reasons", "notes", "failed"), 0)
        # The values in each lane (request) when they were last sent.
        self._lanes = np.zeros((0, len(_CHANGING)), np.int32)

    def take(self, record: Record) -> None:
        self._collector.take(record)

    def news(self) -> list[Message]:
        """Return the messages to send, in order. Returns [] if nothing changed."""
        collector = self._collector
        if len(collector.steps["rows"]) > MAX_STEPS or len(collector.lanes.ids) > MAX_LANES:
            self._begin(Collector(self._log, collector.state))
        if self._collector.first_step < 0:
            return []
        found = [self._head()] if self._is_new else []
        self._is_new = False
        if (more := self._more()) is not None:
            found.append(more)
        return found

    def _head(self) -> Message:
        return {
            "type": "begin",
            "name": self._name,
            "version": __version__,
            "states": STATES,
            "first_step": self._collector.first_step,
            "config": self._collector.log.config.as_dict(),
        }

    def _new(self, what: str, values: Sequence[_T], end: int | None = None) -> Sequence[_T]:
        start, self._told[what] = self._told[what], len(values) if end is None else end
        return values[start : self._told[what]]

    def _more(self) -> Message | None:
        collector, told = self._collector, self._told
        collector.count_answers()
        lanes, segments, done = collector.lanes, collector.lanes.segments, collector.num_done
        start, first_segment = told["steps"], told["segments"]
        begun = collector.steps["time_ns"][0]
        steps = {
            name: (np.array(values[start:done], np.int64) - (begun if name == "time_ns" else 0)).tolist()
            for name, values in collector.steps.items()
        }
        told["steps"], told["segments"] = done, len(segments["lane"])
        ids = self._new("lanes", lanes.ids)
        arrived = {name: lanes.columns[name][len(lanes.ids) - len(ids) :].tolist() for name in _ARRIVED}
        chunks = self._new("chunks", collector.chunks)
        new_segments = {name: values[first_segment:].tolist() for name, values in segments.items()}
        more: Message = {
            "type": "more",
            "steps": steps,
            "failed": self._new("failed", collector.failed),
            "lanes": {"ids": ids, **arrived},
            "changed": self._changed(lanes.columns, lanes.ends),
            "segments": new_segments,
            "chunks": [each.ravel().tolist() for each in chunks],
            "reasons": self._new("reasons", collector.reasons),
            "notes": self._new("notes", collector.notes)[-MAX_NOTES:],
        }
        said = (steps["rows"], ids, more["changed"], new_segments["lane"], more["notes"])
        return more if any(said) else None

    def _changed(self, columns: Mapping[str, Sequence[int]], ends: Sequence[str]) -> list[list[object]]:
        """Return a list for each changed lane (request): its number, end step, cached tokens, answer tokens,
        preemptions, and finish reason.
        """
        now = np.stack([np.array(columns[name], np.int32) for name in _CHANGING], axis=1)
        before = np.full_like(now, -1)
        before[: len(self._lanes)] = self._lanes
        self._lanes = now
        return [
            [lane, *now[lane].tolist(), ends[lane]]
            for lane in (now != before).any(axis=1).nonzero()[0].tolist()
        ]
