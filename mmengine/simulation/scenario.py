"""Reads simulation scenarios. A .json file has settings, requests, events and expected records. A .jsonl file
has a request on each line, and no settings.
"""

import codecs
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from mmengine.core.decide.request_checks import MAX_ID_CHARS
from mmengine.errors import InvalidRequest
from mmengine.request import Adapter
from mmengine.simulation.bounded_files import MAX_TOKENS, decode, lines
from mmengine.simulation.workload import (
    IMAGE_TOKEN,
    NEVER,
    SimEvent,
    SimRequest,
    Workload,
    generated_tokens,
    image_item,
    name_hash,
)

MAX_STEP = 2**40  # the largest step number in a scenario
_Step = Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)]


class _Grammar(msgspec.Struct, forbid_unknown_fields=True):
    ranges: list[tuple[int, int]]


class _Adapter(msgspec.Struct, forbid_unknown_fields=True):
    """An adapter in a scenario. Adapters with equal fields have equal weights."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID_CHARS)]
    bytes: Annotated[int, msgspec.Meta(ge=0, le=2**50)] = 0
    visual: bool = False


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    prompt: list[list[Any]]
    max_tokens: int
    arrival_step: _Step = 0
    images: list[tuple[int, int, str]] = []
    priority: int = 0
    stop_token: int | None = None
    stop_at: int | None = None
    grammar: _Grammar | None = None
    inject_bad_at: int | None = None
    adapter: str | _Adapter | None = None
    session: str = ""


class _Event(msgspec.Struct, forbid_unknown_fields=True):
    step: _Step
    op: Literal["abort", "grammar_ready", "grammar_error", "reset_prefix_cache", "close_session"]
    id: str = ""
    when: Literal["before_update"] | None = None
    reset_running: bool = False


class _Scenario(msgspec.Struct, forbid_unknown_fields=True):
    requests: list[_Request]
    config: dict[str, Any] = {}
    events: list[_Event] = []
    max_steps: _Step = MAX_STEP
    name: str = ""
    about: str = ""
    source: str = ""
    unfinished: list[str] = []
    expect: list[dict[str, Any]] | None = None


def read_scenario(path: Path) -> Workload:
    """Read a scenario. For an invalid file, raises InvalidRequest with the position in the file."""
    data = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    scenario = decode(data, _Scenario, str(path))
    return Workload(
        name=scenario.name or path.stem,
        requests=_requests(scenario.requests, path),
        timed=False,
        settings=scenario.config,
        events=[
            SimEvent(each.step, each.op, each.id, each.when is not None, each.reset_running)
            for each in scenario.events
        ],
        max_steps=scenario.max_steps,
        expect=scenario.expect,
        media_names=_media_names(scenario.requests),
    )


def read_requests(path: Path, limit: int | None) -> Workload:
    """Read a .jsonl file with requests. Such a file has no events, so all grammars are ready immediately."""
    decoder = msgspec.json.Decoder(_Request)
    parsed = [decode(line, decoder, f"{path}, line {number}") for number, line in lines(path, limit)]
    return Workload(
        name=path.stem, requests=_requests(parsed, path), timed=False, media_names=_media_names(parsed)
    )


def _media_names(requests: Iterable[_Request]) -> dict[bytes, str]:
    names = {name for request in requests for _, _, name in request.images}
    return {image_item(0, 1, name).mm_hash: name for name in sorted(names)}


def _requests(parsed: list[_Request], path: Path) -> list[SimRequest]:
    seen: set[str] = set()
    requests = []
    for request in parsed:
        if request.id in seen:
            raise InvalidRequest(f"{path}: two requests are called {request.id!r}; give each its own id")
        seen.add(request.id)
        requests.append(_request(request, f"{path}: request {request.id!r}"))
    return requests


def _request(request: _Request, where: str) -> SimRequest:
    segments = [_segment(segment, where) for segment in request.prompt]
    num_prompt = sum(count for count, _ in segments)
    least = 0 if request.session else 1
    if not 1 <= num_prompt <= MAX_TOKENS or not least <= request.max_tokens <= MAX_TOKENS:
        raise InvalidRequest(
            f"{where}: prompt and max_tokens must each be 1 to {MAX_TOKENS} tokens long; in a session "
            "max_tokens 0 computes the prompt and generates no tokens"
        )
    if (request.stop_at is None) != (request.stop_token is None):
        raise InvalidRequest(f"{where}: stop_at and stop_token need one another; give both or neither")
    ranges = tuple(request.grammar.ranges) if request.grammar else ()
    if request.grammar and (not ranges or any(not 0 <= low < high <= 2**31 for low, high in ranges)):
        raise InvalidRequest(f"{where}: grammar.ranges must be pairs [low, high] with 0 <= low < high")
    for offset, length, _ in request.images:
        if offset < 0 or length < 1 or offset + length > num_prompt:
            raise InvalidRequest(
                f"{where}: an image at {offset} of length {length} extends beyond the prompt"
            )
    return SimRequest(
        request_id=request.id,
        num_prompt=num_prompt,
        prompt=lambda: np.concatenate([make() for _, make in segments]),
        max_tokens=request.max_tokens,
        arrival=request.arrival_step,
        media=tuple(image_item(offset, length, name) for offset, length, name in request.images),
        priority=request.priority,
        stop_token=_or_never(request.stop_token),
        stop_at=_or_never(request.stop_at),
        ranges=ranges,
        bad_at=_or_never(request.inject_bad_at),
        adapter=_adapter(request.adapter),
        session=request.session,
    )


def _adapter(given: str | _Adapter | None) -> Adapter | None:
    if given is None:
        return None
    asked = _Adapter(given) if isinstance(given, str) else given
    said = f"{asked.name} {asked.bytes} {asked.visual}"  # different fields mean different contents
    return Adapter(name_hash(said), asked.bytes, asked.visual, asked.name)


def _or_never(value: int | None) -> int:
    return NEVER if value is None else value


def _segment(segment: list[Any], where: str) -> tuple[int, Callable[[], np.ndarray]]:
    """Return the length of a prompt's segment, and a function that generates the segment's tokens (int32).

    A segment is ["lit", [tokens]], ["gen", key, n, start] or ["img", n].
    """
    match segment:
        case ["lit", list(tokens)] if all(type(t) is int and 0 <= t < 2**31 for t in tokens):
            return len(tokens), lambda: np.array(tokens, np.int32)
        case ["gen", str(key), int(count), int(start)] if 0 <= count <= MAX_TOKENS and 0 <= start < 2**30:
            return count, lambda: generated_tokens(key, start, count)
        case ["gen", str(), int()]:
            return _segment([*segment, 0], where)
        case ["img", int(count)] if 0 <= count <= MAX_TOKENS:
            return count, lambda: np.full(count, IMAGE_TOKEN, np.int32)
    raise InvalidRequest(
        f'{where}: a piece of the prompt is neither ["lit", [tokens]], ["gen", key, n, start] nor '
        f'["img", n]: {str(segment)[:80]}'
    )
