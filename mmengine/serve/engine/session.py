"""Sessions of an `Engine`: prompts to which callers append content, and about which they ask questions.

    with engine.session(system="You watch a door.") as session:
        for seconds, picture in camera:
            session.frame(picture, seconds)
        print(session.ask("Who came in?", max_tokens=64).text)

Appended content is prefilled immediately. The session keeps the content's KV blocks, up to `session_blocks`,
and questions reuse the blocks. An answer equals the answer to a single request with all earlier content and
answers.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
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
    """The session's token count after an append, and how many tokens were prefix cache hits."""

    num_tokens: int
    num_cached_tokens: int


class SessionEngine(BatchEngine, Protocol):
    """The engine members that a session uses. The session steps the engine."""

    sessions: Sessions


class Frame(NamedTuple):
    """A video frame. `number` is the sender's index for the frame, if any."""

    seconds: float
    image: object
    number: int | None


class Frames:
    """Collects video frames until `in_patch` frames form a patch, which the encoder reads as a unit.

    A failed request loses no frame: frames are held until their request has succeeded.
    """

    def __init__(self, in_patch: int):
        self._in_patch = in_patch
        self.held: list[Frame] = []
        self._taken: int | None = None  # num_requests of the session when the held frames were submitted

    def settle(self, num_requests: int) -> None:
        """Drop the held frames if their request succeeded. A successful request increases the session's
        request count, `num_requests`.
        """
        if self._taken is not None and num_requests > self._taken:
            self.held, self._taken = [], None

    def holds(self, image: object, seconds: float, index: int | None) -> bool:
        """Return whether an equal frame with this index is held."""
        return index is not None and Frame(seconds, image, index) in self.held

    @property
    def num_bytes(self) -> int:
        """The held frames' total encoded size in bytes."""
        return sum(len(frame.image) for frame in self.held if isinstance(frame.image, (bytes, str)))

    @property
    def is_almost_whole(self) -> bool:
        """Whether the next frame will complete a patch."""
        return len(self.held) + 1 >= self._in_patch

    def add(
        self, num_requests: int, image: object, seconds: float, index: int | None = None
    ) -> list[dict[str, object]]:
        """Hold a frame.

        Returns the message parts of a complete patch, or [] if the patch is not complete. `num_requests` is
        the session's request count. Raises InvalidRequest if `seconds` is not a valid time or is before the
        last frame's time.
        """
        is_time = type(seconds) in (int, float) and 0 <= seconds < 10**9
        if not is_time or (self.held and seconds < self.held[-1].seconds):
            raise InvalidRequest(
                "the time of a frame must be a number of seconds, and not be before the previous frame's time"
            )
        frames = [*self.held, Frame(float(seconds), image, index)]
        if self.is_almost_whole:
            self._taken = num_requests
            return self._parts(frames)
        self.held, self._taken = frames, None
        return []

    @contextmanager
    def preview(self) -> Iterator[list[dict[str, object]]]:
        """Yield message parts for the last frame alone, so that the caller can check the image.

        If the `with` block raises an error, the frame is dropped.
        """
        before, last = self.held[:-1], self.held[-1]
        try:
            yield self._parts([last])
        except BaseException:
            self.held = before
            raise

    @property
    def are_read_together(self) -> bool:
        """Whether several frames form a video patch. Otherwise each frame is an image."""
        return self._in_patch > 1

    def rest(self, num_requests: int) -> list[dict[str, object]]:
        """Return the held frames' message parts. An incomplete patch's last frame is repeated."""
        self._taken = num_requests
        return self._parts(self.held)

    def _parts(self, frames: Sequence[Frame]) -> list[dict[str, object]]:
        return frames_part([(frame.seconds, frame.image) for frame in frames], self._in_patch)


class Session:
    """A session in an `Engine`. The methods step the engine, so no other request may stream meanwhile.

    `media_options` apply to all media in the session, with the same meaning as in Prompt.
    """

    def __init__(
        self, engine: SessionEngine, session_id: str, media_options: Mapping[str, object] | None = None
    ):
        self._engine, self.session_id = engine, session_id
        self._media_options = media_options
        self._frames = Frames(getattr(engine.processor, "frames_in_patch", 1))

    @property
    def facts(self) -> SessionFacts:
        """The session's state.

        Raises InvalidRequest if the session is closed, for example because it was idle.
        """
        facts = self._engine.sessions.facts(self.session_id)
        self._frames.settle(facts.num_requests)
        return facts

    def append(self, content: object, *, anchor: bool = False) -> Appended:
        """Append and prefill a text, a message part (an image or a video), or a list of texts and parts.

        With `anchor`, the content stays even if the session exceeds the maximum length and drops old content.
        Each text is tokenized separately. Raises InvalidRequest, InvalidMedia, QueueFull, SessionBusy or
        RequestFailed; the session is then unchanged.
        """
        facts = self.facts
        content = [*self._frames.rest(facts.num_requests), *as_parts(content)]
        done = self._run(facts, *self._prepared(facts, content, Options(PREFILL), is_anchor=anchor))
        return Appended(len(done.prompt_token_ids), done.num_cached_tokens)

    def frame(self, image: object, seconds: float) -> Appended | None:
        """Append a video frame at the time `seconds`.

        Returns None if the frame is not prefilled yet, because later frames or other content must complete
        the patch. The image is checked before this method returns. Raises the same errors as `append`.
        """
        facts, given, is_film = self.facts, Options(PREFILL), self._frames.are_read_together
        parts = self._frames.add(facts.num_requests, image, seconds)
        if parts:
            done = self._run(facts, *self._prepared(facts, parts, given, is_film=is_film))
            return Appended(len(done.prompt_token_ids), done.num_cached_tokens)
        with self._frames.preview() as parts:
            self._prepared(facts, parts, given, is_film=is_film)
        self._engine.sessions.end_turn(self.session_id)
        return None

    def ask(
        self, question: object, sampling: SamplingParams | None = None, **options: Unpack[SubmitOptions]
    ) -> Completion:
        """Ask a question, which ends the user's turn, and return the answer.

        `question` has the same types as the content for `append`.

        Afterwards the session also includes the answer's tokens. Takes the same options as `Engine.submit`,
        except `n`. Raises the same errors as `append`.
        """
        facts, given = self.facts, response_format_of(options).added_to(make_options(sampling, options))
        content = [*self._frames.rest(facts.num_requests), *as_parts(question)]
        return self._run(facts, *self._prepared(facts, content, given, closes=True))

    def _prepared(
        self,
        facts: SessionFacts,
        content: object,
        given: Options,
        *,
        closes: bool = False,
        is_anchor: bool = False,
        is_film: bool = False,
    ) -> tuple[Prepared, Options]:
        engine = self._engine
        engine.check_batchable()
        prompt, options = session_request(
            *(engine.sessions, facts, content, given, closes, is_anchor, self._media_options),
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
        """Close the session and release its KV blocks and images. Closing a closed session is no error."""
        engine = self._engine
        if self.session_id in engine.sessions.names():
            engine.sessions.close(self.session_id)
            engine.step()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def as_parts(content: object) -> list[object]:
    """Return `content` as a list of message parts and texts."""
    return list(content) if isinstance(content, (list, tuple)) else [content]


def session_request(
    sessions: Sessions,
    facts: SessionFacts,
    content: object,
    given: Options,
    closes: bool,
    is_anchor: bool,
    media_options: Mapping[str, object] | None = None,
    *,
    is_film: bool = False,
) -> tuple[Prompt, Options]:
    """Return the prompt and the options for a session's next request. Raises InvalidRequest."""
    given.check()
    if given.sampling.n != 1 or given.request_id or given.cache_salt:
        raise InvalidRequest("a session sets these options itself: leave out n, request_id and cache_salt")
    prompt, place = sessions.turn(
        facts, content, closes=closes, is_anchor=is_anchor, is_film=is_film, media_options=media_options
    )
    given = replace(given, tenant=given.tenant or facts.settings.tenant)
    return prompt, given.at(place, request_id_of(facts.session_id, facts.num_requests))
