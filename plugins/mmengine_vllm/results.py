"""Reads a model runner's result: each row's tokens, and which requests ended."""

from itertools import chain
from typing import NamedTuple

import numpy as np

from mmengine.errors import ErrorCode
from mmengine.events import vocabulary as ev
from mmengine_vllm.columns import intp_array
from mmengine_vllm.entries import Step
from mmengine_vllm.vllm_object import VllmObject

NO_ROWS = np.zeros(0, np.intp)
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

    `rows`: intp, the rows that got tokens. `tokens`: int64, row by row. `counts`: how many tokens each row
    got; None: one each. `places`: request id -> index among these rows; None: the indices equal those in the
    step.
    """

    rows: np.ndarray
    tokens: np.ndarray
    counts: list[int] | None
    places: dict[str, int] | None


class ResultOrder:
    """Finds the places of a step's requests in the model runner's order, which changes rarely."""

    def __init__(self) -> None:
        self._names, self._ids = list[str](), list[str]()
        self._places: np.ndarray | None = None

    def places(self, ids: list[str], result: VllmObject) -> np.ndarray | None:
        """Return the place of each of `ids` in a ModelRunnerOutput, intp; None if the orders are equal."""
        names = result.req_ids
        if names == ids:
            return None
        if self._places is None or ids != self._ids or names != self._names:
            index = result.req_id_to_index
            self._places = intp_array([index[name] for name in ids])
            self._names, self._ids = names, ids
        return self._places


def tokens_of(step: Step, result: VllmObject, order: ResultOrder, *, has_drafts: bool) -> Tokens:
    """Return the tokens of a ModelRunnerOutput, in the step's order."""
    sampled, ids = result.sampled_token_ids, step.ids
    if not sampled:
        return Tokens(NO_ROWS, NO_ROWS, None, {})
    places = order.places(ids, result)
    if not has_drafts and len(sampled) == len(ids):
        try:  # without drafts, each row has one token if there are as many tokens as rows
            tokens = intp_array([token for (token,) in sampled])
            return Tokens(step.rows, tokens if places is None else tokens[places], None, None)
        except ValueError:  # there are fewer tokens than rows
            pass
    if places is not None:
        sampled = [sampled[place] for place in places.tolist()]
    counts = list(map(len, sampled))
    some = [place for place, count in enumerate(counts) if count]
    numbers = {ids[place]: number for number, place in enumerate(some)}
    counts = [counts[place] for place in some]
    tokens = intp_array([*chain.from_iterable(sampled)])
    return Tokens(step.rows[some], tokens, counts if has_drafts else None, numbers)


def ends_of(
    ended: list[tuple[int, VllmObject]], places: dict[str, int] | None
) -> tuple[Places, Places, list[ev.Finished]]:
    """Return the stops and errors for EXECUTED, and a FINISHED for each request that ended.

    `ended`: the requests, each with its index in the step. `places`: as in Tokens.
    """
    stops, errors, events = [], [], []
    for in_step, request in ended:
        name = request.request_id
        reason = _REASONS.get(request.status.name, "error")
        place = in_step if places is None else places.get(name)
        detail, code = "", None
        if reason == "stop":
            detail = "eos" if request.stop_reason is None else "token"
            stops.append((place, detail))
        elif reason == "error":
            detail, code = request.status.name.lower(), ErrorCode.REQUEST_FAILED
            errors.append((place, detail))
        events.append(ev.Finished(name, reason, detail, code))
    known = [tuple((place, what) for place, what in found if place is not None) for found in (stops, errors)]
    return known[0], known[1], events


def has_ended(live: VllmObject, name: str) -> bool:
    """Return whether a request has ended. `live`: the requests that the scheduler still has."""
    request = live.get(name)
    return request is None or request.is_finished()
