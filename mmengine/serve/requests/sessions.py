"""Opens and closes an engine's sessions, and builds the prompts for their requests."""

import math
import secrets
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from mmengine.core.decide.start import num_found
from mmengine.core.engine import EngineCore
from mmengine.core.state.sessions import SessionState
from mmengine.encoder_cache.cache import encoder_key
from mmengine.errors import InvalidRequest, shown
from mmengine.events.vocabulary import SessionOpened
from mmengine.models.plugin import MediaInput, Opens, Prepared, Processor, TurnProcessor
from mmengine.request import Adapter, MediaItem, Request, num_before
from mmengine.serve.prompt.options import DEFAULT_OPTIONS, Options, SessionOptions
from mmengine.serve.prompt.prompt import Prompt
from mmengine.serve.prompt.session_turns import (
    SessionChain,
    SessionPlace,
    build_chain,
    has_open_video,
    next_opening,
    parts_of,
)
from mmengine.serve.requests.adapters import Adapters
from mmengine.serve.requests.media_store import MediaStore
from mmengine.serve.requests.running_requests import RunningRequests
from mmengine.serve.requests.session_media import Load, SessionMedia

IDLE_S = 600.0  # default idle time after which a session is closed
MAX_IDLE_S = 10**7
SHORTEST_LENGTH = 16  # tokens


class SessionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A session's settings. The log stores them.

    `length`: the session's limit in tokens; 0 means max_model_len. `keep`: at the limit, the session is
    shortened to at most this many tokens; 0 means half the length. `adapter`: name of the session's LoRA
    adapter, or "". `envelope`: bytes that the caller stores with the session.
    """

    system: str = ""
    length: int = 0
    keep: int = 0
    cache_salt: str = ""
    tenant: str = ""
    template_options: dict[str, object] = {}
    adapter: str = ""
    envelope: bytes = b""

    @classmethod
    def of(cls, options: SessionOptions) -> "SessionSettings":
        """Return the settings in a caller's options."""
        given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        return cls(**given)


class SessionFacts(NamedTuple):
    """A session's current state.

    `num_requests`: number of the session's requests. `live`: the running request's id, or "". `answer`: the
    last answer's token ids.
    """

    session_id: str
    settings: SessionSettings
    opens: Opens
    num_requests: int
    num_tokens: int
    num_media: int
    num_leased_tokens: int
    live: str
    answer: list[int]
    has_open_video: bool


@dataclass(frozen=True, slots=True)
class TurnPrompt(Prompt):
    """A prompt that appends a message to a session. `messages` has only this message."""

    settings: SessionSettings = SessionSettings()
    opens: Opens = ""
    closes: bool = False
    has_open_video: bool = False
    is_film: bool = False

    def prepare(self, processor: Processor, options: Options = DEFAULT_OPTIONS) -> Prepared:
        """Return the appended content's tokens and patches. Raises InvalidRequest, InvalidMedia."""
        if not isinstance(processor, TurnProcessor):
            raise InvalidRequest("this model's processor does not support sessions")
        assert self.messages is not None
        return processor.prepare_turn(
            self.messages[0]["content"],
            system=self.settings.system,
            opens=self.opens,
            closes=self.closes,
            in_film=self.has_open_video,
            is_film=self.is_film,
            base_folder=self.base_folder,
            media_options=self.processor_options,
            cache_salt=self.settings.cache_salt,
            template_options=self.template_options,
        )


class Sessions:
    """An engine's sessions, with their media and adapters. Only the engine's thread may use them."""

    def __init__(self, core: EngineCore, media: SessionMedia, processor: Processor, adapters: Adapters):
        self._core, self._media, self._config = core, media, core.config
        self._processor, self._adapters = processor, adapters
        self._settings: dict[str, SessionSettings] = {}
        # Includes the previous process's sessions.
        self._known = set(core.state.sessions.all)

    def open(self, session_id: str, settings: SessionSettings, idle_s: float) -> str:
        """Open a session, and return its id. If `session_id` is empty, the id is random.

        Raises InvalidRequest, QueueFull.
        """
        settings = self._checked(settings, idle_s)
        self._adapters.named(settings.adapter)
        session_id = session_id or f"session-{secrets.token_hex(8)}"
        if not session_id.isprintable():
            raise InvalidRequest("a session id must consist of printable characters")
        try:
            envelope = msgspec.msgpack.encode(settings)
        except (OverflowError, TypeError) as error:
            text = f"the log stores a session's options, which must be JSON with integers of 64 bits: {error}"
            raise InvalidRequest(text) from None
        opened = SessionOpened(session_id, settings.cache_salt, math.ceil(idle_s * 1e9), envelope)
        self._core.sessions.open(opened)
        self._settings[session_id] = settings
        self._known.add(session_id)
        return session_id

    def _checked(self, settings: SessionSettings, idle_s: float) -> SessionSettings:
        if type(idle_s) not in (int, float) or not 0 <= idle_s <= MAX_IDLE_S:
            raise InvalidRequest(f"idle_s must lie in 0 (never) to {MAX_IDLE_S} seconds, not {shown(idle_s)}")
        most = self._config.max_model_len
        length = settings.length or most
        keep = settings.keep or length // 2
        if not SHORTEST_LENGTH <= length <= most or not 0 < keep <= length:
            raise InvalidRequest(
                f"length must lie in {SHORTEST_LENGTH} to {most} tokens (max_model_len), and keep in 1 to "
                f"length, not {shown(settings.length)} and {shown(settings.keep)}"
            )
        return msgspec.structs.replace(settings, length=length, keep=keep)

    def begin_turn(self, session_id: str) -> None:
        """Begin a turn. The session is not idle during a turn. An unknown session is no error."""
        self._core.sessions.hold(session_id)

    def end_turn(self, session_id: str) -> None:
        """End a turn. The session is idle from now on. Called when the turn's request has ended, or when the
        turn ran no request because its video frame does not yet complete a temporal patch.
        """
        self._core.sessions.release(session_id)

    def continue_turns_of(self, stuck: "Sessions") -> None:
        """Continue the open turns of a hung engine, which this engine replaces."""
        self._core.sessions.hold_sessions_of(stuck._core.sessions)

    def close(self, session_id: str) -> None:
        """Close a session, even while a request runs. Raises InvalidRequest for a closed session."""
        self._core.sessions.close(session_id, "closed")

    @property
    def idle_s(self) -> float | None:
        """Seconds until the next session reaches its idle limit, or None without idle sessions."""
        next_ns = self._core.inbox.next_idle_ns
        return None if next_ns is None else max(0.0, (next_ns - time.monotonic_ns()) / 1e9)

    def tidy(self) -> None:
        """Release the media and settings of closed sessions."""
        found, waits = self._core.view.sessions.all, self._core.inbox.opening
        for session_id in [name for name in self._known if name not in found and name not in waits]:
            self._known.discard(session_id)
            self._settings.pop(session_id, None)
            self._media.drop(session_id)

    def names(self) -> list[str]:
        """Return the open sessions' ids, oldest first."""
        inbox = self._core.inbox
        known = (*self._core.state.sessions.all, *inbox.opening)
        return [name for name in known if name not in inbox.closing]

    def settings(self, session_id: str) -> SessionSettings:
        """Return a session's settings. Raises InvalidRequest for a closed session."""
        session = self._core.sessions.find(session_id)
        if session_id not in self._settings:  # the previous process opened the session
            self._settings[session_id] = msgspec.msgpack.decode(session.envelope, type=SessionSettings)
        return self._settings[session_id]

    def adapter(self, session_id: str) -> Adapter | None:
        """Return the adapter that is now loaded under the session's adapter name. Raises InvalidRequest if
        the adapter is not loaded, or if the session is not open.
        """
        return self._adapters.named(self.settings(session_id).adapter)

    def facts(self, session_id: str) -> SessionFacts:
        """Return a session's state. Raises InvalidRequest for a closed session."""
        settings, session = self.settings(session_id), self._core.sessions.find(session_id)
        num_outputs = session.chunks[-1].num_outputs if session.chunks else 0
        return SessionFacts(
            session_id,
            settings,
            next_opening(session),
            session.num_grown,
            len(session.tokens),
            len(session.media),
            len(session.leased) * self._config.block_size,
            session.live,
            session.tokens[len(session.tokens) - num_outputs :].tolist(),
            has_open_video(session),
        )

    def question(self, session_id: str) -> np.ndarray:
        """Return the prompt tokens of the session's last request, without earlier turns, int32 [n].

        Raises InvalidRequest if the session is not open.
        """
        session = self._core.sessions.find(session_id)
        if not session.chunks:
            return session.tokens
        last = session.chunks[-1]
        return session.tokens[last.start : len(session.tokens) - last.num_outputs]

    def turn(
        self,
        facts: SessionFacts,
        content: object,
        *,
        closes: bool,
        is_anchor: bool,
        is_film: bool = False,
        media_options: Mapping[str, object] | None = None,
    ) -> tuple[TurnPrompt, SessionPlace]:
        """Return new content as a prompt, and the prompt's place in the session. Raises InvalidRequest."""
        settings = facts.settings
        prompt = TurnPrompt(
            messages=[{"role": "user", "content": parts_of(content)}],
            settings=settings,
            opens=facts.opens,
            closes=closes,
            has_open_video=facts.has_open_video,
            is_film=is_film,
            media_options=dict(media_options) if media_options else None,
            template_options=settings.template_options or None,
        )
        film = is_film + (is_film and facts.has_open_video)
        limits = settings.length, settings.keep
        place = SessionPlace(facts.session_id, facts.opens, is_anchor, *limits, film, facts.has_open_video)
        return prompt, place

    def chain(self, prepared: Prepared, place: SessionPlace, num_answer: int) -> SessionChain:
        """Return the whole prompt for a session's request. Raises InvalidRequest."""
        options = self.settings(place.session_id).template_options
        found = self._found(place)

        def film_begins() -> list[int]:
            processor = self._processor
            return processor.around_film(options)[0] if isinstance(processor, TurnProcessor) else []

        return build_chain(found, prepared, place, max(1, num_answer), film_begins)

    def to_load(self, prepared: Prepared, place: SessionPlace, options: Options) -> list[Load]:
        """Return loaders, in prompt order, for the older media that a request must encode again. These are
        the media after the request's prefix cache hit. Returns [] if the encoder cache has all their
        features. Raises `chain`'s errors.
        """
        sampling = options.of_prompt(len(prepared.prompt_token_ids)).sampling
        chain, session = self.chain(prepared, place, sampling.max_tokens), self._found(place)
        new = {one.item.mm_hash for one in prepared.media}
        salt, adapter = session.cache_salt, self.adapter(place.session_id)
        request = Request("", chain.tokens, sampling, chain.media, cache_salt=salt, adapter=adapter)

        def media_after(found: int) -> dict[bytes, MediaItem]:
            first = num_before(chain.media, found)
            older = [item for item in chain.media[first:] if item.mm_hash not in new]
            visual = request.visual_adapter
            keys = (encoder_key(item.mm_hash, salt, visual) for item in older)
            is_kept = all(map(self._core.view.encoder.has, keys))
            return {} if is_kept else {item.mm_hash: item for item in older}

        leased = min(chain.num_kept, len(session.leased) * self._config.block_size)
        can_begin = not self._config.num_state_slots and sampling.prompt_logprobs is None
        if can_begin and not media_after(leased):  # usual case; skips the prefix cache lookup
            return []
        items = media_after(num_found(self._core.view, request))
        return self._media.loads(place.session_id, items.values())

    def hold(self, prepared: Prepared, place: SessionPlace, chain: SessionChain) -> Sequence[MediaInput]:
        """Keep the media in the prompt `chain` for the session, and return the pixels. Raises InvalidMedia,
        QueueFull.
        """
        self._media.take(self._found(place), chain.media, prepared.media)
        return self._media.inputs(place.session_id, chain.media, (*prepared.media, *place.loaded))

    def _found(self, place: SessionPlace) -> SessionState:
        session = self._core.sessions.find(place.session_id)
        if next_opening(session) != place.opens or has_open_video(session) != place.was_in_film:
            raise InvalidRequest(
                "another request was appended to the session meanwhile: append the content again"
            )
        return session


def make_sessions(
    core: EngineCore,
    store: MediaStore | None,
    processor: Processor,
    adapters: Adapters,
    requests: RunningRequests,
    awaited: Set[str] = frozenset(),
) -> Sessions:
    """Return an engine's sessions. Session requests from the previous process continue, because their answers
    belong to the sessions. Requests whose ids are not in `awaited` continue without a caller.
    """
    for session_id, session in core.state.sessions.all.items():
        for number in range(session.num_grown + 1):
            if (name := request_id_of(session_id, number)) not in awaited:
                requests.detach(name)
    media = SessionMedia(store, processor, core.config.session_media_bytes)
    return Sessions(core, media, processor, adapters)


def request_id_of(session_id: str, number: int) -> str:
    """Return the request id for a session's request after `number` earlier requests."""
    return f"{session_id}.{number}"
