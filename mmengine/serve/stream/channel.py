"""From the engine's thread to the callers of an AsyncEngine, on their event loops."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

import numpy as np

from mmengine.errors import MMEngineError
from mmengine.request import MediaItem
from mmengine.serve.prompt.options import Options
from mmengine.serve.stream.one_shot_event import OneShotEvent
from mmengine.serve.text.output_text import OutputText
from mmengine.serve.text.reasoning import NO_REASONING, Reasoning, ReasoningTokens
from mmengine.serve.text.request_output import RequestOutput

LISTENERS_AT_ONCE = 32  # that are called before the event loop looks at its sockets again


class Channel:
    """From the engine's thread to one caller. All but `closed` belongs to the caller's loop, once it runs."""

    def __init__(self, options: Options, texts: OutputText, is_held: bool = False, *, is_count: bool = False):
        self.options, self.is_held = options, is_held
        self.is_count = is_count  # its prompt is counted, and not answered
        self.texts = texts
        self.begun = time.monotonic()
        self.loop = asyncio.get_running_loop()
        self.items: deque[RequestOutput | MMEngineError | None] = deque()  # that nobody took; None is the end
        self.listener: Callable[[], None] | None = None
        self._arrived: asyncio.Event | None = None  # made where somebody waits: most listen
        self.accepted = OneShotEvent()  # on the disk, or refused with `error`
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
        self.is_refused = not self.accepted.is_set
        self.accepted.set()
        self.items.append(error)

    def wake(self) -> None:
        """Tell who listens, or who waits."""
        if self.listener is not None:
            self.listener()
        elif self._arrived is not None:
            self._arrived.set()

    async def wait(self) -> None:
        """Until something has come."""
        while not self.items:
            arrived = self._arrived = self._arrived or asyncio.Event()
            arrived.clear()
            await arrived.wait()


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


def tell_accepted(channels: Iterable[Channel]) -> None:
    """From another thread: their requests are on the disk. One call for each event loop, as in `deliver`."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Channel]] = {}
    for channel in channels:
        by_loop.setdefault(channel.loop, []).append(channel)
    for loop, some in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(_set_accepted, some)


def _set_accepted(channels: list[Channel]) -> None:
    for channel in channels:
        channel.accepted.set()


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
