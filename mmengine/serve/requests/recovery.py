"""Resumes the requests in a log: reloads their media, and compiles their grammars again.

Callers can then find the previous process's requests and attach to them. In the core, each choice is a
separate request with its own id, the core id.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from mmengine.config import EngineConfig
from mmengine.core.resume import Resume, ResumeState
from mmengine.core.undelivered_answers import ResumedAnswer
from mmengine.errors import InvalidMedia, MMEngineError
from mmengine.events.vocabulary import Queued
from mmengine.models.plugin import MediaInput
from mmengine.request import MediaItem
from mmengine.serve.prompt.prompt import core_ids
from mmengine.serve.requests.adapters import Adapters, LocalAdapter
from mmengine.serve.requests.media_store import MediaStore
from mmengine.serve.requests.operator_log import operator_log
from mmengine.serve.requests.request_resources import GrammarMemory
from mmengine.serve.requests.session_media import holder_of

if TYPE_CHECKING:  # lazy, because mmengine.build imports torch
    from mmengine.build import Built


class UnclaimedRequest(Protocol):
    """A request from the previous process to which no caller is attached.

    `envelope`: bytes that the caller stored with the request. A caller recognizes requests by id or envelope.
    """

    @property
    def request_id(self) -> str: ...

    @property
    def envelope(self) -> bytes: ...

    @property
    def tenant(self) -> str: ...


@dataclass(frozen=True, slots=True)
class RecoveredRequest:
    """A request from the previous process, with all its choices.

    `queued` is the first choice's QUEUED event. `num_tokens` counts the output tokens of all choices in the
    log. `has_ended`: whether all choices are complete in the log, and only their delivery is missing.
    """

    request_id: str
    num_choices: int
    queued: Queued
    num_tokens: int
    has_ended: bool

    @property
    def envelope(self) -> bytes:
        """The bytes that the caller stored with the request."""
        return self.queued.envelope

    @property
    def tenant(self) -> str:
        """The tenant to which the request belongs, or ""."""
        return self.queued.tenant


def find_recovered(resumed: Mapping[str, ResumedAnswer]) -> tuple[dict[str, RecoveredRequest], list[str]]:
    """Return the recovered requests by request id, and core ids whose answers no caller can claim.

    `resumed` maps core ids to answers.

    No caller can claim a vector that is not in the log, or a request with a cancelled or already delivered
    choice.
    """
    choices: dict[str, dict[str, ResumedAnswer]] = {}  # core id of the first choice -> core id -> choice
    for name, answer in resumed.items():
        choices.setdefault(answer.queued.group or name, {})[name] = answer
    out: dict[str, RecoveredRequest] = {}
    unclaimed: list[str] = []
    for first, answers in choices.items():
        request_id = first.removesuffix("/0") if len(answers) > 1 else first
        names = core_ids(request_id, len(answers))
        if answers.keys() != set(names) or any(answer.is_gone for answer in answers.values()):
            unclaimed += answers
            continue
        tokens = sum(len(answer.token_ids) for answer in answers.values())
        ended = all(answer.reason for answer in answers.values())
        out[request_id] = RecoveredRequest(request_id, len(answers), answers[names[0]].queued, tokens, ended)
    return out, unclaimed


MEDIA_FOLDER = "media"
_NOT_KEPT = (
    "the media store is disabled, and the request's images and videos were lost with the process that ended"
)


def open_log(
    built: "Built",
    log: str | Path | None,
    resume: Resume | None,
    memory: GrammarMemory,
    adapters: Adapters,
    coming: Iterable[LocalAdapter],
) -> tuple[MediaStore | None, dict[str, ResumedAnswer]]:
    """Return the media store beside `log`, and the previous process's answers by core id.

    If `built` resumes a log, the core continues this log. `coming`: the adapters that the caller loads next.
    """
    found = built.resumed
    store = None if log is None else _open_store(log, built.config, found)
    if found is None:
        return store, {}
    cause = "" if resume is None else resume.cause
    _recover(built, found, store, memory, adapters, coming, cause)
    return store, found.answers


def _open_store(log: str | Path, config: EngineConfig, resumed: ResumeState | None) -> MediaStore | None:
    """Return the media store beside a log, or None if the settings disable the store.

    Removes stored media that no request or session in `resumed` needs.
    """
    if not config.media_store_bytes:
        return None
    store = MediaStore(Path(log) / MEDIA_FOLDER, config.media_store_bytes)
    if resumed is not None:
        for name, req_state in resumed.state.requests.items():
            store.hold_stored(name, req_state.request.media)
        for name, session in resumed.state.sessions.all.items():
            store.hold_stored(holder_of(name), session.media)
    store.sweep()
    return store


def _recover(
    built: "Built",
    resumed: ResumeState,
    store: MediaStore | None,
    memory: GrammarMemory,
    adapters: Adapters,
    coming: Iterable[LocalAdapter],
    cause: str,
) -> None:
    """Make the core continue from the log.

    A request whose media, grammar or adapter is missing ends with an error.
    """
    loaded: dict[bytes, MediaInput] = {}
    lost = []
    for name, req_state in resumed.state.requests.items():
        items = req_state.request.media
        try:
            media = [_load(item, store, built, loaded) for item in items]
        except InvalidMedia as error:
            media = []
            lost.append((name, str(error)))
        built.executor.attach(name, media)
    lost += _compile_again(built, resumed, memory)
    lost += adapters.recover(resumed, coming)
    built.core.recover(resumed.recovered(tuple(lost)), cause)
    running = len(resumed.state.requests)
    operator_log.info(
        "log continued", steps_lost=len(resumed.steps), requests=running, requests_lost=len(lost)
    )


def _compile_again(built: "Built", resumed: ResumeState, memory: GrammarMemory) -> list[tuple[str, str]]:
    """Compile the requests' grammars again, because logs contain no compiled grammars.

    Waits for the grammars that running requests use. Grammars that only waiting requests need may be ready
    later.

    Returns (request id, reason) for each request whose grammar is not available.
    """
    lost, ready = [], []
    for name, req_state in resumed.state.requests.items():
        if req_state.request.grammar is None or name in resumed.state.grammar_failed:
            continue
        try:
            grammar = memory.hold(name, req_state.request.grammar, was_accepted=True)
            request = req_state.request
            built.grammars.hold(
                name, grammar, request.budget(built.config.max_model_len), request.stop_reserve
            )
        except MMEngineError as refusal:
            lost.append((name, str(refusal)))
            continue
        if not req_state.waits_for_grammar:
            ready.append(name)
    return lost + [(name, error) for name in ready if (error := built.grammars.error_of(name))]


def _load(
    item: MediaItem, store: MediaStore | None, built: "Built", loaded: dict[bytes, MediaInput]
) -> MediaInput:
    if store is None:
        raise InvalidMedia(_NOT_KEPT)
    if item.mm_hash not in loaded:
        loaded[item.mm_hash] = store.load(item, built.processor)
    # the same image may be at a different position in each prompt
    return replace(loaded[item.mm_hash], item=item)
