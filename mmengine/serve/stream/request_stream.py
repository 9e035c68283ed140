"""The streams from which callers read a request's outputs."""

from collections.abc import Callable
from typing import NamedTuple

from mmengine.request import GrammarRequest, SamplingParams
from mmengine.serve.stream.channel import Channel
from mmengine.serve.text.reasoning import ReasoningTokens
from mmengine.serve.text.request_output import Completion, RequestOutput

TAKEN_AT_ONCE = 128  # `take` returns after this number of outputs, or of tokens


def _nothing(channel: Channel) -> None:
    pass


class AcceptedRequest(NamedTuple):
    """Facts about an accepted request. Stream has properties with the same names."""

    request_id: str
    sampling: SamplingParams
    reasoning: ReasoningTokens
    grammar: GrammarRequest | None
    num_embeds: dict[str, int]
    num_prompt_tokens: int


class HeldAnswer(NamedTuple):
    """Identifies an answer that the log keeps until the caller releases it."""

    request_id: str
    num_choices: int


class ChannelReader:
    """Reads a channel's outputs, a limited number per call. The properties describe the request.

    `is_over` is True when no further output will come. If the request has not failed, `completion` is then
    set.
    """

    def __init__(self, channel: Channel):
        self._channel = channel
        self.is_over = False
        self.completion: Completion | None = None

    def listen(self, listener: Callable[[], None] | None) -> None:
        """Call `listener` on the caller's loop once for each step with outputs.

        If `listener` is None, the channel instead wakes callers that wait for outputs.
        """
        self._channel.listener = listener

    def take(self) -> list[RequestOutput]:
        """Return the outputs that have arrived, at most TAKEN_AT_ONCE. The outputs have no texts.

        The caller can decode texts from `token_ids`. Returns [] if no output has arrived, and at the end. If
        the request failed, raises the request's error after the last output.
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
                items.appendleft(item)  # left for the next call
                break
            else:
                self.is_over = True
                raise item
        return found

    @property
    def backlog(self) -> int:
        """How many outputs have arrived but were not read."""
        return len(self._channel.items)

    @property
    def reasoning(self) -> ReasoningTokens:
        """The markers around the answer's reasoning. Valid after `accepted`."""
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
        """The answer's grammar. Valid after `accepted`."""
        return self._channel.options.grammar

    @property
    def num_embeds(self) -> dict[str, int]:
        """Embedding counts for the prompt's media, by modality. Valid after `accepted`."""
        return self._channel.num_embeds

    @property
    def request_id(self) -> str:
        """The request's id. Valid after `accepted`."""
        return self._channel.request_id

    @property
    def num_prompt_tokens(self) -> int:
        """The prompt's token count. Valid after `accepted`."""
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
        """Whether the request was accepted and has not failed."""
        return self._channel.accepted.is_set and self._channel.error is None

    async def accepted(self) -> None:
        """Wait until the log has the request.

        With a log on disk, another process can then complete the request if this process dies. If the request
        is refused, raises the same error as reading the stream.
        """
        await self._channel.accepted.wait()
        if self._channel.error is not None:
            raise self._channel.error


class Stream(ChannelReader):
    """An async iterator over a request's outputs. `completion` is set at the end.

    A running request is cancelled by `aclose()`, at the end of `async with`, and when the stream is garbage
    collected. Iteration raises InvalidRequest, InvalidMedia or QueueFull if the prompt is refused, and
    ExecutorFailed or another error if the engine fails.
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
            item = self.texts.fill(item)  # decode here, while the engine's thread computes the next step
            self.completion = item.completion or self.completion
            return item
        self.is_over = True
        if item is None:
            raise StopAsyncIteration
        raise item

    async def next_outputs(self) -> list[RequestOutput]:
        """Wait for outputs and return them, as `take` does. Returns [] at the end."""
        found: list[RequestOutput] = []
        while not found and not self.is_over:
            await self._channel.wait()
            found = self.take()
        return found

    async def completed(self) -> Completion:
        """Read to the end and return the completion. The text is decoded only once, at the end."""
        self.texts.pieces = False
        async for _ in self:
            pass
        assert self.completion is not None, "a stream without an error ends with its completion"
        return self.completion

    @property
    def is_refused(self) -> bool:
        """Whether the request was refused. The log does not contain a refused request."""
        return self._channel.is_refused

    def leave(self) -> None:
        """Stop reading and let the request continue. The log, if any, keeps the answer."""
        self.is_over, self._close = True, _nothing

    def delivered(self) -> None:
        """Allow the log to delete the held answer when it is complete.

        Call this when the answer is stored elsewhere or not needed.
        """
        self._release([self.release()])

    def release(self) -> HeldAnswer:
        """Return the held answer's identity. The caller must pass it to `AsyncEngine.release_answers`, which
        releases several answers in a single call.
        """
        self._channel.is_held = False
        return self.held_answer

    @property
    def held_answer(self) -> HeldAnswer:
        """The answer's identity for `AsyncEngine.release_answers`. Valid after `accepted`."""
        return HeldAnswer(self._channel.request_id, self._channel.options.sampling.n)

    def cancel(self) -> None:
        """Cancel the request. The stream still returns the last outputs."""
        self._close(self._channel)

    async def __aenter__(self) -> "Stream":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel a running request. The stream returns no further output."""
        self.is_over = True
        self._close(self._channel)

    def __del__(self) -> None:
        self._close(self._channel)
