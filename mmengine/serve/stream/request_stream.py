"""The streams from which callers read a request's outputs."""

from collections.abc import Callable
from typing import NamedTuple

from mmengine.request import GrammarRequest, SamplingParams
from mmengine.serve.stream.channel import Channel
from mmengine.serve.text.reasoning import ReasoningTokens
from mmengine.serve.text.request_output import Completion, RequestOutput

TAKEN_AT_ONCE = 128  # outputs, or tokens, that one call takes before other tasks run


def _nothing(channel: Channel) -> None:
    pass


class AcceptedRequest(NamedTuple):
    """The facts about a request that are known once it is `accepted`; Stream has properties with the same
    names.
    """

    request_id: str
    sampling: SamplingParams
    reasoning: ReasoningTokens
    grammar: GrammarRequest | None
    num_embeds: dict[str, int]
    num_prompt_tokens: int


class HeldAnswer(NamedTuple):
    """An answer that the log keeps until its caller releases it."""

    request_id: str
    num_choices: int


class ChannelReader:
    """Reads a channel's outputs in small batches, and has the facts about its request.

    `is_over` means that no output comes any more; `completion` is set then unless the request failed.
    """

    def __init__(self, channel: Channel):
        self._channel = channel
        self.is_over = False
        self.completion: Completion | None = None

    def listen(self, listener: Callable[[], None] | None) -> None:
        """Have `listener` called on the caller's loop when outputs arrive, once for each step.

        Without a listener, a caller that waits is woken instead.
        """
        self._channel.listener = listener

    def take(self) -> list[RequestOutput]:
        """Return the outputs that have arrived, at most TAKEN_AT_ONCE, without texts.

        Their `token_ids` determine the texts. Returns [] if there are none now, and at the end, when
        `is_over` is set. After the last output it raises the same errors as a Stream's iteration.
        """
        items = self._channel.items
        found: list[RequestOutput] = []
        num_tokens = 0
        while items and not self.is_over and len(found) < TAKEN_AT_ONCE and num_tokens < TAKEN_AT_ONCE:
            item = items.popleft()
            if isinstance(item, RequestOutput):
                found.append(item)
                num_tokens += len(item.token_ids)
                if item.completion is not None:
                    self.completion = item.completion
            elif item is None:
                self.is_over = True
            elif found:
                items.appendleft(item)  # for the next call
                break
            else:
                self.is_over = True
                raise item
        return found

    @property
    def backlog(self) -> int:
        """How many outputs have arrived and were not read."""
        return len(self._channel.items)

    @property
    def reasoning(self) -> ReasoningTokens:
        """The markers of the answer's reasoning, once `accepted`."""
        return self._channel.reasoning

    @property
    def sampling(self) -> SamplingParams:
        return self._channel.options.sampling

    @property
    def envelope(self) -> bytes:
        """The bytes that the log keeps with the request."""
        return self._channel.options.envelope

    @property
    def grammar(self) -> GrammarRequest | None:
        """The answer's grammar, once `accepted`."""
        return self._channel.options.grammar

    @property
    def num_embeds(self) -> dict[str, int]:
        """Embedding counts for the prompt's media by modality, once `accepted`."""
        return self._channel.num_embeds

    @property
    def request_id(self) -> str:
        """The request's id, once `accepted`."""
        return self._channel.request_id

    @property
    def num_prompt_tokens(self) -> int:
        """The prompt's token count, once `accepted`."""
        return self._channel.num_prompt_tokens

    @property
    def accepted_request(self) -> AcceptedRequest:
        channel = self._channel
        options = channel.options
        return AcceptedRequest(
            channel.request_id,
            options.sampling,
            channel.reasoning,
            options.grammar,
            channel.num_embeds,
            channel.num_prompt_tokens,
        )

    @property
    def is_accepted(self) -> bool:
        """Whether `accepted` returns at once."""
        return self._channel.accepted.is_set and self._channel.error is None

    async def accepted(self) -> None:
        """Wait until the log has the request.

        From then on, with a log on disk, the request is answered even if this process ends. If the request is
        refused, raises the same error as the stream.
        """
        await self._channel.accepted.wait()
        if self._channel.error is not None:
            raise self._channel.error


class Stream(ChannelReader):
    """A request's outputs as an async iterator of RequestOutput. `completion` is set at the end.

    Leaving `async with`, `aclose()`, or dropping the stream cancels a running request. Raises InvalidRequest,
    InvalidMedia or QueueFull if the prompt is refused, and ExecutorFailed or another error if the engine
    failed.
    """

    def __init__(
        self, channel: Channel, close: Callable[[Channel], None], release: Callable[[list[HeldAnswer]], None]
    ):
        super().__init__(channel)
        self.texts = channel.texts
        self._close, self._release = close, release

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> RequestOutput:
        if self.is_over:
            raise StopAsyncIteration
        await self._channel.wait()
        item = self._channel.items.popleft()
        if isinstance(item, RequestOutput):
            item = self.texts.fill(item)  # here, while the engine's thread computes
            self.completion = item.completion or self.completion
            return item
        self.is_over = True
        if item is None:
            raise StopAsyncIteration
        raise item

    async def next_outputs(self) -> list[RequestOutput]:
        """Wait for outputs and return them as `take` does; [] at the end."""
        found: list[RequestOutput] = []
        while not found and not self.is_over:
            await self._channel.wait()
            found = self.take()
        return found

    async def completed(self) -> Completion:
        """Read to the end, without decoding partial texts, and return the completion."""
        self.texts.pieces = False
        async for _ in self:
            pass
        assert self.completion is not None, "a stream without an error ends with its completion"
        return self.completion

    @property
    def is_refused(self) -> bool:
        """Whether the request was refused before the log had it."""
        return self._channel.is_refused

    def leave(self) -> None:
        """Stop reading and let the request continue; the log, if any, keeps the answer."""
        self.is_over, self._close = True, _nothing

    def delivered(self) -> None:
        """Let the log forget the held answer once it is complete.

        Call this when the answer is stored or not needed.
        """
        self._release([self.release()])

    def release(self) -> HeldAnswer:
        """Stop holding the answer, and return its name for `AsyncEngine.release_answers`, which takes
        several.
        """
        self._channel.is_held = False
        return self.held_answer

    @property
    def held_answer(self) -> HeldAnswer:
        """The answer's name for `AsyncEngine.release_answers`, once `accepted`."""
        return HeldAnswer(self._channel.request_id, self._channel.options.sampling.n)

    def cancel(self) -> None:
        """Cancel the request; its last outputs still come."""
        self._close(self._channel)

    async def __aenter__(self) -> "Stream":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel a running request; no further output comes."""
        self.is_over = True
        self._close(self._channel)

    def __del__(self) -> None:
        self._close(self._channel)
