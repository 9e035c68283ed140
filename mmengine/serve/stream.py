"""One request of an AsyncEngine, from the side of its caller."""

from collections.abc import Callable, Sequence

from mmengine.request import GrammarRequest, SamplingParams
from mmengine.serve.answers import Completion, RequestOutput
from mmengine.serve.channel import Channel
from mmengine.serve.reasoning import ReasoningTokens

TAKEN_AT_ONCE = 128  # outputs, or tokens, that are taken of a stream before others have their turn


def _nothing(channel: Channel) -> None:
    pass


class Stream:
    """News of one request, as an async iterator of RequestOutput. `completion` is set at the end.

    Leaving `async with`, `aclose()`, or dropping the stream cancels what is not finished. Raises
    InvalidRequest, InvalidMedia, QueueFull when the prompt is refused, ExecutorFailed and others
    when the whole engine failed.
    """

    def __init__(
        self, channel: Channel, close: Callable[[Channel], None], let_go: Callable[[list[Channel]], None]
    ):
        self._channel, self.texts = channel, channel.texts
        self._close, self._let_go = close, let_go
        self.is_over = False
        self.completion: Completion | None = None

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

    def listen(self, listener: Callable[[], None] | None) -> None:
        """Call it, on the caller's loop, whenever something has come, from a step once. Nobody who waits is
        woken then."""
        self._channel.listener = listener

    def take(self) -> list[RequestOutput]:
        """Outputs that have come, without their texts, TAKEN_AT_ONCE at most: `token_ids` are what they are
        made of. [] when there are none now, and at the end, which `is_over` says. Raises as the iteration
        does, behind what came before."""
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

    async def news(self) -> list[RequestOutput]:
        """What `take` gives, once something has come; [] at the end."""
        found: list[RequestOutput] = []
        while not found and not self.is_over:
            await self._channel.wait()
            found = self.take()
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
    def is_accepted(self) -> bool:
        """Whether `accepted` returns at once."""
        return self._channel.accepted.is_set and self._channel.error is None

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
        all_delivered([self])

    def cancel(self) -> None:
        """Give the request up; its last news still come."""
        self._close(self._channel)

    async def accepted(self) -> None:
        """Wait until the request is in the log: from then on, if that is on a disk, it is answered
        whatever happens to this process. Raises what the stream would when it is refused."""
        await self._channel.accepted.wait()
        if self._channel.error is not None:
            raise self._channel.error

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


def all_delivered(streams: Sequence[Stream]) -> None:
    """What `Stream.delivered` says, of several of one engine: it is woken once."""
    channels = [stream._channel for stream in streams]
    for channel in channels:
        channel.is_held = False
    if streams:
        streams[0]._let_go(channels)
