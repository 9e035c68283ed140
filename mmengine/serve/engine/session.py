"""Streaming input: `engine.session()`, a request that grows.

    with engine.session(system="You watch a door.") as session:
        for seconds, picture in camera:
            session.frame(picture, seconds)
        print(session.ask("Who came in?", max_tokens=64).text)

What is appended is computed at once, and nothing is sampled; its KV blocks stay with the session within
limits (`session_blocks`), and a question finds them. What the session was shown and said is one prompt: an
answer is that of one request with the same content."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol, Unpack

from mmengine.errors import InvalidRequest
from mmengine.models.plugin import Prepared
from mmengine.request import PREFILL, SamplingParams
from mmengine.serve.batch.run_batch import BatchEngine, outputs_of
from mmengine.serve.prompt.options import Options, SubmitOptions, make_options
from mmengine.serve.prompt.prompt import Prompt
from mmengine.serve.prompt.prompt_media import PromptMedia
from mmengine.serve.prompt.session_turns import frames_part
from mmengine.serve.requests.sessions import SessionFacts, Sessions, request_id_of
from mmengine.serve.text.request_output import Completion, require_success
from mmengine.serve.text.response_format import response_format_of


class Appended(NamedTuple):
    """`num_tokens`: of the whole session now; `num_cached_tokens`: those that were found computed."""

    num_tokens: int
    num_cached_tokens: int


class SessionEngine(BatchEngine, Protocol):
    """What a session needs of an engine, which it steps."""

    sessions: Sessions


class Frame(NamedTuple):
    """`number`: the index with which it was sent, if there was one."""

    seconds: float
    image: object
    number: int | None


class Frames:
    """Frames until there are as many as the encoder reads together, and then until a request that has them
    became part of the session: whatever becomes of one that did not, they are still held. `in_patch`: how
    many that are."""

    def __init__(self, in_patch: int):
        self._in_patch = in_patch
        self.held: list[Frame] = []
        self._taken: int | None = None  # requests that the session had when one was to bring them in

    def settle(self, num_requests: int) -> None:
        """The session has so many requests now."""
        if self._taken is not None and num_requests > self._taken:
            self.held, self._taken = [], None

    def holds(self, image: object, seconds: float, index: int | None) -> bool:
        """Whether this frame came before with the same index."""
        return index is not None and Frame(seconds, image, index) in self.held

    @property
    def num_bytes(self) -> int:
        """Of those held that are encoded."""
        return sum(len(frame.image) for frame in self.held if isinstance(frame.image, (bytes, str)))

    @property
    def is_almost_whole(self) -> bool:
        """Whether the next one makes a patch whole."""
        return len(self.held) + 1 >= self._in_patch

    def add(
        self, num_requests: int, image: object, seconds: float, index: int | None = None
    ) -> list[dict[str, object]]:
        """Gives parts when a patch is whole; else nothing, and it is held. `num_requests`: that the session
        has. Raises InvalidRequest for a time that is none, or before the last one's."""
        is_time = type(seconds) in (int, float) and 0 <= seconds < 10**9
        if not is_time or (self.held and seconds < self.held[-1].seconds):
            raise InvalidRequest("the time of a frame is a number of seconds, not less than that before it")
        frames = [*self.held, Frame(float(seconds), image, index)]
        if self.is_almost_whole:
            self._taken = num_requests
            return self._parts(frames)
        self.held, self._taken = frames, None
        return []

    @contextmanager
    def looked_at(self) -> Iterator[list[dict[str, object]]]:
        """Gives the last one as if it were alone. Where what happens in here fails, it is not held."""
        before, last = self.held[:-1], self.held[-1]
        try:
            yield self._parts([last])
        except BaseException:
            self.held = before
            raise

    @property
    def are_read_together(self) -> bool:
        """Whether they are patches of one video, and not images."""
        return self._in_patch > 1

    def rest(self, num_requests: int) -> list[dict[str, object]]:
        """Parts of those that are held: the last one of a patch that is not whole counts twice."""
        self._taken = num_requests
        return self._parts(self.held)

    def _parts(self, frames: Sequence[Frame]) -> list[dict[str, object]]:
        return frames_part([(frame.seconds, frame.image) for frame in frames], self._in_patch)


class Session:
    """One session of an `Engine`, which is stepped by what is called here: nothing else is to stream
    meanwhile. `media_options`: of all media, as those of a Prompt."""

    def __init__(
        self, engine: SessionEngine, session_id: str, media_options: Mapping[str, object] | None = None
    ):
        self._engine, self.session_id = engine, session_id
        self._media_options = media_options
        self._frames = Frames(getattr(engine.processor, "frames_in_patch", 1))

    @property
    def facts(self) -> SessionFacts:
        """Raises InvalidRequest when it was closed, or nobody asked for too long."""
        facts = self._engine.sessions.facts(self.session_id)
        self._frames.settle(facts.num_requests)
        return facts

    def append(self, content: object, *, anchor: bool = False) -> Appended:
        """Append a text, a part of a message (an image, a video), or a list of both, and compute it.
        `anchor`: it stays when the session becomes too long. A text is tokenized by itself. Raises
        InvalidRequest, InvalidMedia, QueueFull, SessionBusy, RequestFailed; the session is as before
        then."""
        facts = self.facts
        content = [*self._frames.rest(facts.num_requests), *listed(content)]
        done = self._run(facts, *self._prepared(facts, content, Options(PREFILL), is_anchor=anchor))
        return Appended(len(done.prompt_token_ids), done.num_cached_tokens)

    def frame(self, image: object, seconds: float) -> Appended | None:
        """Append a frame of a video that is at so many `seconds`. None: it waits for others that the encoder
        reads together with it, or for whatever is appended next; that it is an image is seen before. Raises
        what `append` does."""
        facts, asked, is_film = self.facts, Options(PREFILL), self._frames.are_read_together
        parts = self._frames.add(facts.num_requests, image, seconds)
        if parts:
            done = self._run(facts, *self._prepared(facts, parts, asked, is_film=is_film))
            return Appended(len(done.prompt_token_ids), done.num_cached_tokens)
        with self._frames.looked_at() as parts:
            self._prepared(facts, parts, asked, is_film=is_film)
        self._engine.sessions.end_turn(self.session_id)
        return None

    def ask(
        self, question: object, sampling: SamplingParams | None = None, **options: Unpack[SubmitOptions]
    ) -> Completion:
        """Close the turn with a question (content as `append` takes it), and answer. The answer is part of
        the session from then on, all of its tokens. Options as for `Engine.submit`, without `n`. Raises what
        `append` does."""
        facts, asked = self.facts, response_format_of(options).added_to(make_options(sampling, options))
        content = [*self._frames.rest(facts.num_requests), *listed(question)]
        return self._run(facts, *self._prepared(facts, content, asked, closes=True))

    def _prepared(
        self,
        facts: SessionFacts,
        content: object,
        asked: Options,
        *,
        closes: bool = False,
        is_anchor: bool = False,
        is_film: bool = False,
    ) -> tuple[Prepared, Options]:
        engine = self._engine
        engine.check_batchable()
        prompt, options = placed(
            *(engine.sessions, facts, content, asked, closes, is_anchor, self._media_options),
            is_film=is_film,
        )
        with PromptMedia(prompt) as media:
            return media.prompt().prepare(engine.processor), options

    def _run(self, facts: SessionFacts, prepared: Prepared, options: Options) -> Completion:
        engine = self._engine
        request_id = engine.submit_prepared(prepared, options, stream=False)
        completion = None
        with outputs_of(engine, request_id) as outputs:
            for output in outputs:
                completion = output.completion or completion
        assert completion is not None, "a request ends with its completion"
        completion = require_success(completion)
        self._frames.settle(facts.num_requests + 1)
        return completion

    def close(self) -> None:
        """Let its blocks and images go. Closing one that is closed is no error."""
        engine = self._engine
        if self.session_id in engine.sessions.names():
            engine.sessions.close(self.session_id)
            engine.step()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def listed(content: object) -> list[object]:
    """A part, or several."""
    return list(content) if isinstance(content, (list, tuple)) else [content]


def placed(
    sessions: Sessions,
    facts: SessionFacts,
    content: object,
    asked: Options,
    closes: bool,
    is_anchor: bool,
    media_options: Mapping[str, object] | None = None,
    *,
    is_film: bool = False,
) -> tuple[Prompt, Options]:
    """A request of a session, to be prepared and submitted. Raises InvalidRequest."""
    asked.check()
    if asked.sampling.n != 1 or asked.request_id or asked.cache_salt:
        raise InvalidRequest(
            "a session has one answer at a time, and names its requests and its cache itself: leave out n, "
            "request_id and cache_salt"
        )
    prompt, place = sessions.turn(
        facts, content, closes=closes, is_anchor=is_anchor, is_film=is_film, media_options=media_options
    )
    return prompt, asked.at(place, request_id_of(facts.session_id, facts.num_requests))
