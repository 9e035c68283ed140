"""Reads a model runner's result: each row's tokens, and which requests ended."""

from array import array
from itertools import chain
from typing import NamedTuple

from mmengine.errors import ErrorCode
from mmengine.events import vocabulary as ev
from mmengine_vllm.columns import int32_bytes, int64_bytes
from mmengine_vllm.entries import Step
from mmengine_vllm.vllm_object import VllmObject

PART = 32  # names that are compared at once
MOST_LEFT = 1000  # about how many requests RunnerOrder remembers after they left
_REASONS = {
    "FINISHED_STOPPED": "stop",
    "FINISHED_REPETITION": "stop",
    "FINISHED_LENGTH_CAPPED": "length",
    "FINISHED_IGNORED": "length",
    "FINISHED_ABORTED": "abort",
}
Places = tuple[tuple[int, str], ...]  # (index of the row among the rows that got tokens, text)


class Tokens(NamedTuple):
    """A step's tokens.

    `rows`: column of the rows that got tokens, in the step's order. `tokens`: int64 as bytes, row by row.
    `counts`: how many tokens each row got; None: one each. `order`: the column of rows in the order of
    `tokens`; None: as `rows`. `places`: request id -> index in `rows`; None: the indices equal those in the
    step.
    """

    rows: bytes
    tokens: bytes
    counts: list[int] | None = None
    order: bytes | None = None
    places: dict[str, int] | None = None


class RunnerOrder:
    """Finds the rows of a step in the order of the model runner's batch, in which few requests change their
    places from step to step.
    """

    def __init__(self) -> None:
        # The rows that requests had in the last step whose output arrived. A later decision may have changed
        # them. Requests that left stay here for a while.
        self._row_of: dict[str, int] = {}
        # The names, in parts of PART names, and the rows from the last call of `column`.
        self._parts, self._column = list[list[str]](), bytearray()
        self._is_stale = False  # whether a request has got another row since

    def arrived(self, step: Step) -> None:
        """Note the rows of the step's admissions. Call this for each step, in order."""
        if not step.admitted:
            return
        first = len(step.ids) - step.admitted
        for name, row in zip(step.ids[first:], array("i", step.rows[first * 4 :]), strict=True):
            self._is_stale |= name in self._row_of
            self._row_of[name] = row
        if len(self._row_of) > 2 * len(step.ids) + MOST_LEFT:
            self._forget_others(step)

    def column(self, step: Step, names: list[str]) -> bytes:
        """Return the column with the rows for `names`, which are the requests of `step` in any order. `step`
        must be the last step that arrived. Raises KeyError for other names.
        """
        if self._is_stale:
            self._begin_anew()
        try:
            self._follow(names)
        except KeyError:  # a request that was in no step for a while was forgotten
            self._forget_others(step)
            self._begin_anew()
            self._follow(names)
        return bytes(self._column)

    def _begin_anew(self) -> None:
        self._parts, self._column, self._is_stale = [], bytearray(), False

    def _forget_others(self, step: Step) -> None:
        self._row_of = dict(zip(step.ids, array("i", step.rows), strict=True))

    def _follow(self, names: list[str]) -> None:
        """Update the parts of the column whose names changed."""
        parts, column, row_of = self._parts, self._column, self._row_of
        count = (len(names) + PART - 1) // PART
        del parts[count:]
        parts += [[]] * (count - len(parts))
        begin = 0
        for place, before in enumerate(parts):
            part = names[begin : begin + PART]
            if part != before:
                column[begin * 4 : (begin + PART) * 4] = int32_bytes([row_of[name] for name in part])
                parts[place] = part
            begin += PART
        del column[len(names) * 4 :]


def tokens_of(step: Step, result: VllmObject, order: RunnerOrder, *, has_drafts: bool) -> Tokens:
    """Return the tokens of a ModelRunnerOutput."""
    sampled, ids = result.sampled_token_ids, step.ids
    order.arrived(step)
    if not sampled:
        return Tokens(b"", b"", places={})
    names = result.req_ids
    if not has_drafts and len(sampled) == len(ids) == len(names):
        try:  # without drafts, each row has one token if there are as many tokens as rows
            tokens = int64_bytes([token for (token,) in sampled])
            return Tokens(step.rows, tokens, order=None if names == ids else order.column(step, names))
        except ValueError:  # there are fewer tokens than rows
            pass
    if names != ids:
        sampled = [sampled[place] for place in map(result.req_id_to_index.__getitem__, ids)]
    counts = list(map(len, sampled))
    some = [place for place, count in enumerate(counts) if count]
    numbers = {ids[place]: number for number, place in enumerate(some)}
    rows = step.rows
    if len(some) < len(ids):
        column = array("i", rows)
        rows, counts = int32_bytes([column[place] for place in some]), [counts[place] for place in some]
    tokens = int64_bytes([*chain.from_iterable(sampled)])
    return Tokens(rows, tokens, counts if has_drafts else None, places=numbers)


def ends_of(
    ended: list[tuple[int, VllmObject]], places: dict[str, int] | None
) -> tuple[Places, Places, list[ev.Finished]]:
    """Return the stops and errors for EXECUTED, and a FINISHED for each request that ended.

    `ended`: the requests, each with its index in the step. `places`: as in Tokens.
    """
    if not ended:
        return (), (), []
    stops, errors, events = list[tuple[int, str]](), list[tuple[int, str]](), []
    for in_step, request in ended:
        name = request.request_id
        reason = _REASONS.get(request.status.name, "error")
        place = in_step if places is None else places.get(name)
        detail, code = "", None
        if reason == "stop":
            detail = "eos" if request.stop_reason is None else "token"
            if place is not None:
                stops.append((place, detail))
        elif reason == "error":
            detail, code = request.status.name.lower(), ErrorCode.REQUEST_FAILED
            if place is not None:
                errors.append((place, detail))
        events.append(ev.Finished(name, reason, detail, code))
    return tuple(stops), tuple(errors), events


def has_ended(live: VllmObject, name: str) -> bool:
    """Return whether a request has ended. `live`: the requests that the scheduler still has."""
    request = live.get(name)
    return request is None or request.is_finished()
