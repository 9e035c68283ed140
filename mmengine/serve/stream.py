"""One request of an AsyncEngine, from the side of its caller."""

import asyncio
import time
from collections.abc import Callable, Iterable

from mmengine.errors import MMEngineError
from mmengine.serve.answers import Completion, RequestOutput
from mmengine.serve.options import Options
from mmengine.serve.reasoning import NO_REASONING, ReasoningTokens
from mmengine.serve.texts import AnswerTexts
from mmengine.structured_output.request.tool_calls import ToolCalls, calls_of


class Channel:
    """From the engine's thread to one caller. `queue` belongs to the caller's loop."""

    def __init__(self, options: Options, texts: AnswerTexts):
        self.options = options
        self.texts = texts
        self.begun = time.monotonic()
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[RequestOutput | MMEngineError | None] = asyncio.Queue()
        self.accepted = asyncio.Event()  # on the disk, or refused with `error`
        self.error: MMEngineError | None = None
        self.timer: asyncio.TimerHandle | None = None  # ends its preparation
        self.request_id = ""  # set when the engine took the request
        self.closed = False
        # Of its prompt, known when it was prepared:
        self.reasoning: ReasoningTokens = NO_REASONING
        self.num_embeds: dict[str, int] = {}  # embeddings by modality

    @property
    def age_s(self) -> float:
        """Since it was asked for, from where its deadline counts."""
        return time.monotonic() - self.begun

    def end(self, error: MMEngineError | None) -> None:
        """On the caller's loop: nothing comes any more."""
        if self.timer is not None:
            self.timer.cancel()
        self.error = error
        self.accepted.set()
        self.queue.put_nowait(error)


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
    """On the loop of all these channels."""
    for channel, output in news:
        channel.queue.put_nowait(output)


class Stream:
    """News of one request, as an async iterator of RequestOutput. `completion` is set at the end.

    Leaving `async with`, `aclose()`, or dropping the stream cancels what is not finished. Raises
    InvalidRequest, InvalidMedia, QueueFull when the prompt is refused, ExecutorFailed and others
    when the whole engine failed.
    """

    def __init__(self, channel: Channel, close: Callable[[Channel], None]):
        self._channel, self.texts = channel, channel.texts
        self._close = close
        self._over = False
        self.completion: Completion | None = None

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> RequestOutput:
        if self._over:
            raise StopAsyncIteration
        item = await self._channel.queue.get()
        if isinstance(item, RequestOutput):
            item = self.texts.fill(item)  # here, while the engine's thread computes
            self.completion = item.completion or self.completion
            return item
        self._over = True
        if item is None:
            raise StopAsyncIteration
        raise item

    async def news(self) -> list[RequestOutput]:
        """All outputs that have come, at least one, without their texts: `token_ids` are what they are made
        of. [] at the end. Raises as the iteration does, behind what came before."""
        queue = self._channel.queue
        found: list[RequestOutput] = []
        while not self._over and not (found and queue.empty()):
            item = await queue.get()
            if isinstance(item, RequestOutput):
                found.append(item)
                self.completion = item.completion or self.completion
            elif found:
                queue.put_nowait(item)  # the last that comes: for the next call
                break
            else:
                self._over = True
                if item is not None:
                    raise item
        return found

    @property
    def backlog(self) -> int:
        """Outputs that have come and that nobody read."""
        return self._channel.queue.qsize()

    @property
    def reasoning(self) -> ReasoningTokens:
        """Where the answer's reasoning ends. Known when it is `accepted`."""
        return self._channel.reasoning

    @property
    def calls(self) -> ToolCalls | None:
        """The form of calls of tools that it may hold; None: there are no tools. Known when it is
        `accepted`."""
        return calls_of(self._channel.options.grammar)

    @property
    def num_embeds(self) -> dict[str, int]:
        """Embeddings of the prompt's media by modality. Known when it is `accepted`."""
        return self._channel.num_embeds

    @property
    def is_accepted(self) -> bool:
        """Whether `accepted` returns at once."""
        return self._channel.accepted.is_set() and self._channel.error is None

    def leave(self) -> None:
        """Let the request run on though nobody reads it: the answer stays in the log, if there is one."""
        self._over, self._close = True, _nothing

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
        self._over = True
        self._close(self._channel)

    def __del__(self) -> None:
        self._close(self._channel)
