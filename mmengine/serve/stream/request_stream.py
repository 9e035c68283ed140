"""One request of an AsyncEngine, from the side of its caller."""

from collections.abc import Callable
from typing import NamedTuple

from mmengine.request import GrammarRequest, SamplingParams
from mmengine.serve.stream.channel import Channel
from mmengine.serve.text.reasoning import ReasoningTokens
from mmengine.serve.text.request_output import Completion, RequestOutput

TAKEN_AT_ONCE = 128  # outputs, or tokens, that are taken of a stream before others have their turn


def _nothing(channel: Channel) -> None:
    pass


class AcceptedRequest(NamedTuple):
    """What a stream knows of its request when it is `accepted`, as its properties tell it."""

    request_id: str
    sampling: SamplingParams
    reasoning: ReasoningTokens
    grammar: GrammarRequest | None
    num_embeds: dict[str, int]
    num_prompt_tokens: int


class HeldAnswer(NamedTuple):
    """An answer that the log keeps until it is told that it need not."""

    request_id: str
    num_choices: int


class ChannelReader:
    """What a channel brings, a little at a time, and what it knows of its request. `is_over`: nothing comes
    any more; `completion` is set then, unless it failed."""

    def __init__(self, channel: Channel):
        self._channel = channel
        self.is_over = False
        self.completion: Completion | None = None

    def listen(self, listener: Callable[[], None] | None) -> None:
        """Call it, on the caller's loop, whenever something has come, from a step once. Nobody who waits is
        woken then."""
        self._channel.listener = listener

    def take(self) -> list[RequestOutput]:
        """Outputs that have come, without their texts, TAKEN_AT_ONCE at most: `token_ids` are what they are
        made of. [] when there are none now, and at the end, which `is_over` says. Raises as the iteration
        of a Stream does, behind what came before."""
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
        """Outputs that have come and that nobody read."""
        return len(self._channel.items)

    @property
    def reasoning(self) -> ReasoningTokens:
        """Where the answer's reasoning ends. Known when it is `accepted`."""
        return self._channel.reasoning

    @property
    def sampling(self) -> SamplingParams:
        return self._channel.options.sampling

    @property
    def envelope(self) -> bytes:
        """What the log keeps with it."""
        return self._channel.options.envelope

    @property
    def grammar(self) -> GrammarRequest | None:
        """The form of the answer. Known when it is `accepted`."""
        return self._channel.options.grammar

    @property
    def num_embeds(self) -> dict[str, int]:
        """Embeddings of the prompt's media by modality. Known when it is `accepted`."""
        return self._channel.num_embeds

    @property
    def request_id(self) -> str:
        """Known when it is `accepted`."""
        return self._channel.request_id

    @property
    def num_prompt_tokens(self) -> int:
        """Known when it is `accepted`."""
        return self._channel.num_prompt_tokens

    @property
    def accepted_request(self) -> AcceptedRequest:
        channel = self._channel
        asked = channel.options
        return AcceptedRequest(
            channel.request_id,
            asked.sampling,
            channel.reasoning,
            asked.grammar,
            channel.num_embeds,
            channel.num_prompt_tokens,
        )

    @property
    def is_accepted(self) -> bool:
        """Whether `accepted` returns at once."""
        return self._channel.accepted.is_set and self._channel.error is None

    async def accepted(self) -> None:
        """Wait until the request is in the log: from then on, if that is on a disk, it is answered
        whatever happens to this process. Raises what the stream would when it is refused."""
        await self._channel.accepted.wait()
        if self._channel.error is not None:
            raise self._channel.error


class Stream(ChannelReader):
    """News of one request, as an async iterator of RequestOutput. `completion` is set at the end.

    Leaving `async with`, `aclose()`, or dropping the stream cancels what is not finished. Raises
    InvalidRequest, InvalidMedia, QueueFull when the prompt is refused, ExecutorFailed and others
    when the whole engine failed.
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
        """What `take` gives, once something has come; [] at the end."""
        found: list[RequestOutput] = []
        while not found and not self.is_over:
            await self._channel.wait()
            found = self.take()
        return found

    async def completed(self) -> Completion:
        """Read to the end, without making texts on the way, and return the completion."""
        self.texts.pieces = False
        async for _ in self:
            pass
        assert self.completion is not None, "a stream without an error ends with its completion"
        return self.completion

    @property
    def is_refused(self) -> bool:
        """Whether it ended before it was in the log."""
        return self._channel.is_refused

    def leave(self) -> None:
        """Let the request run on though nobody reads it: the answer stays in the log, if there is one."""
        self.is_over, self._close = True, _nothing

    def delivered(self) -> None:
        """The answer, which it holds, is where it will not be lost, or needed by nobody: the log may forget
        it when it is whole."""
        self._release([self.release()])

    def release(self) -> HeldAnswer:
        """Return the answer for `AsyncEngine.release_answers`, which the caller calls for several at once."""
        self._channel.is_held = False
        return self.held_answer

    @property
    def held_answer(self) -> HeldAnswer:
        """By which `AsyncEngine.release_answers` knows it. Known when it is `accepted`."""
        return HeldAnswer(self._channel.request_id, self._channel.options.sampling.n)

    def cancel(self) -> None:
        """Give the request up; its last news still come."""
        self._close(self._channel)

    async def __aenter__(self) -> "Stream":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel the request if it still runs; nothing more comes."""
        self.is_over = True
        self._close(self._channel)

    def __del__(self) -> None:
        self._close(self._channel)
