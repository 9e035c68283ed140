"""One request of an AsyncEngine, from the side of its caller."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from mmengine.errors import MMEngineError
from mmengine.request import GrammarRequest, MediaItem, SamplingParams
from mmengine.serve.answers import Completion, RequestOutput
from mmengine.serve.options import Options
from mmengine.serve.reasoning import NO_REASONING, Reasoning, ReasoningTokens
from mmengine.serve.texts import AnswerTexts

LISTENERS_AT_ONCE = 32  # that are called before the event loop looks at its sockets again
TAKEN_AT_ONCE = 128  # outputs, or tokens, that are taken of a stream before others have their turn


class Channel:
    """From the engine's thread to one caller. All but `closed` belongs to the caller's loop, once it runs."""

    def __init__(self, options: Options, texts: AnswerTexts, is_held: bool = False):
        self.options, self.is_held = options, is_held
        self.texts = texts
        self.begun = time.monotonic()
        self.loop = asyncio.get_running_loop()
        self.items: deque[RequestOutput | MMEngineError | None] = deque()  # that nobody took; None is the end
        self.listener: Callable[[], None] | None = None
        self._arrived = asyncio.Event()
        self.accepted = asyncio.Event()  # on the disk, or refused with `error`
        self.error: MMEngineError | None = None
        self.is_refused = False
        self.timer: asyncio.TimerHandle | None = None  # ends its preparation
        self.request_id = ""  # set when the engine took the request
        self.closed = False
        # Of its prompt, known when it was prepared:
        self.reasoning: ReasoningTokens = NO_REASONING
        self.num_embeds: dict[str, int] = {}  # embeddings by modality
        self.num_prompt_tokens = 0

    def take_prompt(self, token_ids: np.ndarray, media: Iterable[MediaItem], reasoning: Reasoning) -> None:
        """Note what is told of its prompt (int32 [n]), which is known now. Raises what `Reasoning.tokens`
        raises."""
        self.reasoning = reasoning.tokens(self.options, token_ids)
        self.num_prompt_tokens = len(token_ids)
        for item in media:
            self.num_embeds[item.modality] = self.num_embeds.get(item.modality, 0) + item.num_embeds

    @property
    def age_s(self) -> float:
        """Since it was asked for, from where its deadline counts."""
        return time.monotonic() - self.begun

    def end(self, error: MMEngineError | None) -> None:
        """On the caller's loop: nothing comes any more."""
        self._put_end(error)
        self.wake()

    def put(self, output: RequestOutput) -> None:
        """On the caller's loop; nobody hears of it before `wake`."""
        self.items.append(output)
        if output.completion is not None:
            self._put_end(None)

    def _put_end(self, error: MMEngineError | None) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self.error = error
        self.is_refused = not self.accepted.is_set()
        self.accepted.set()
        self.items.append(error)

    def wake(self) -> None:
        """Tell who listens, or who waits."""
        if self.listener is not None:
            self.listener()
        else:
            self._arrived.set()

    async def wait(self) -> None:
        """Until something has come."""
        while not self.items:
            self._arrived.clear()
            await self._arrived.wait()


def _nothing(channel: Channel) -> None:
    pass


def deliver(news: Iterable[tuple[Channel, RequestOutput]]) -> list[Channel]:
    """From another thread: hand over the news of a step, with one call for each event loop. Gives the
    channels whose loop is closed, so that nobody listens any more."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Channel, RequestOutput]]] = {}
    for channel, output in news:
        by_loop.setdefault(channel.loop, []).append((channel, output))
    lost: list[Channel] = []
    for loop, some in by_loop.items():
        try:
            loop.call_soon_threadsafe(put_all, some)
        except RuntimeError:
            lost += [channel for channel, _ in some]
    return lost


def put_all(news: Iterable[tuple[Channel, RequestOutput]]) -> None:
    """On the loop of all these channels: each hears once of all its news, and of its end behind them."""
    channels: dict[Channel, None] = {}
    for channel, output in news:
        channel.put(output)
        channels[channel] = None
    _wake_all(list(channels))


def _wake_all(channels: list[Channel]) -> None:
    for channel in channels[:LISTENERS_AT_ONCE]:
        channel.wake()
    if rest := channels[LISTENERS_AT_ONCE:]:
        rest[0].loop.call_soon(_wake_all, rest)


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
        return self._channel.accepted.is_set() and self._channel.error is None

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
