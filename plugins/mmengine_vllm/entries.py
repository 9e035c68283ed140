"""Defines the entries that the recorder collects during vLLM's calls: events, and named tuples. batches.py
later converts the named tuples from many steps into events together. This saves time in vLLM's calls.

A column is the bytes of an int32 array, as in an event.
"""

from typing import NamedTuple

from mmengine.events import vocabulary as ev
from mmengine_vllm.vllm_object import VllmObject

NO_ROW = -1


class Tracked:
    """A live request. `chain`: the hash state of the request's tokens while the request has no row. The
    hash states of requests with rows are in contents.PseudoIds.
    """

    __slots__ = ("request", "row", "chain", "media", "has_adapter", "waits_for_grammar")

    def __init__(self, request: VllmObject, queued: ev.Queued):
        self.request = request
        self.row = NO_ROW
        self.chain = (0, 0)
        self.media = queued.media
        self.has_adapter = queued.adapter is not None
        self.waits_for_grammar = queued.grammar is not None


class Step:
    """A step in flight. `rows`: column of rows, in the order of `ids`. `admitted`: the number of requests
    that the step admitted; they are last in `ids`. `output`: vLLM's SchedulerOutput; None after the step's
    result has arrived.
    """

    __slots__ = ("number", "output", "ids", "rows", "admitted", "decided_ns", "host_ns")

    def __init__(
        self, number: int, output: VllmObject, ids: list[str], rows: bytes, admitted: int, decided_ns: int,
        host_ns: int,
    ):  # fmt: skip
        self.number, self.output, self.ids, self.rows, self.admitted = number, output, ids, rows, admitted
        self.decided_ns, self.host_ns = decided_ns, host_ns


class Arrival(NamedTuple):
    """Becomes QUEUED. `tokens`: token ids of the prompt, int64 as bytes."""

    queued: ev.Queued
    tokens: bytes
    salt: str
    tracked: Tracked


class Admission(NamedTuple):
    event: ev.Admitted
    tracked: Tracked


class Preemption(NamedTuple):
    event: ev.Preempted
    tracked: Tracked


class Decision(NamedTuple):
    """Becomes SCHEDULED.

    `rows`: column of rows; None: the rows of the previous step. `num_tokens`: a number for each row; None: 1
    for each row. `num_drafts`: a number for each row; None: no drafts. `block_counts`: each row's share of
    `new_blocks`; None if the token counts determine the share.
    """

    rows: bytes | None
    num_tokens: list[int] | None
    new_blocks: list[int]
    encode: tuple[tuple[bytes, int, int], ...]
    num_drafts: list[int] | None
    block_counts: list[int] | None


class Result(NamedTuple):
    """Becomes EXECUTED.

    `rows`: column of the rows that got tokens, in the step's order. `tokens`: int64 as bytes. `counts`: how
    many tokens each row got; None: one each. `names`: the requests in the order of `tokens`; None: as in
    `rows`. `stale`: (former row, request) for requests that were preempted while the step ran. The step's
    tokens still count for these requests.
    """

    step: Step
    rows: bytes
    tokens: bytes
    counts: list[int] | None
    names: list[str] | None
    stops: tuple[tuple[int, str], ...]
    errors: tuple[tuple[int, str], ...]
    device_ns: int
    host_ns: int
    stale: tuple[tuple[int, Tracked], ...] = ()


class Drafts(NamedTuple):
    """Becomes DRAFTED. `counts`: each row's number of drafts in `tokens`."""

    rows: bytes
    tokens: list[int]
    counts: list[int]


Entry = ev.Event | Arrival | Admission | Preemption | Decision | Result | Drafts
Stamped = tuple[Entry, int, int]  # an entry, its step, and its time in ns
