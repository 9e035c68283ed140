"""Reads a model runner's result: each row's tokens, and which requests ended."""

from array import array
from itertools import chain
from typing import NamedTuple

from mmengine.errors import ErrorCode
from mmengine.events import vocabulary as ev
from mmengine_vllm.columns import int32_bytes, int64_bytes
from mmengine_vllm.entries import Step
from mmengine_vllm.vllm_object import VllmObject

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

    `rows`: the rows that got tokens, as bytes, in the step's order. `tokens`: int64 as bytes, row by row.
    `counts`: each row's number of tokens; None: 1 for each row. `names`: the requests in the order of
    `tokens`; None if `tokens` has the order of `rows`. `places`: request id -> index in `rows`; None: the
    same index as in the step.
    """

    rows: bytes
    tokens: bytes
    counts: list[int] | None = None
    names: list[str] | None = None
    places: dict[str, int] | None = None


def tokens_of(step: Step, result: VllmObject, *, has_drafts: bool) -> Tokens:
    """Return the tokens of a ModelRunnerOutput."""
    sampled, ids = result.sampled_token_ids, step.ids
    if not sampled:
        return Tokens(b"", b"", places={})
    names = result.req_ids
    if not has_drafts and len(sampled) == len(ids) == len(names):
        try:  # without drafts, most steps give each row one token
            tokens = int64_bytes([token for (token,) in sampled])
            return Tokens(step.rows, tokens, names=None if names == ids else names.copy())
        except ValueError:  # a row got no token
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
    """Return the stops and errors for the event EXECUTED, and a FINISHED for each ended request.

    `ended`: (index in the step, request). `places`: as in Tokens.
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
    """Return whether a request has ended. `live`: the scheduler's requests by id."""
    request = live.get(name)
    return request is None or request.is_finished()
