"""Passes outputs from the engine's thread to callers on their event loops."""

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

LISTENERS_AT_ONCE = 32  # number of channels to wake before the event loop polls its sockets again


class Channel:
    """Queues a request's outputs for its caller. Outside the caller's event loop, only `closed` may be
    used.
    """

    def __init__(self, options: Options, texts: OutputText, is_held: bool = False, *, is_count: bool = False):
        self.options, self.is_held = options, is_held
        self.is_count = is_count  # whether the call only counts the prompt's tokens
        self.texts = texts
        self.begun = time.monotonic()
        self.loop = asyncio.get_running_loop()
        # unread items; None marks the end
        self.items: deque[RequestOutput | MMEngineError | None] = deque()
        self.listener: Callable[[], None] | None = None
        # Created when a caller first waits. Most callers use `listener` instead.
        self._arrived: asyncio.Event | None = None
        # Set when the log has the request, or when the request was refused with `error`.
        self.accepted = OneShotEvent()
        self.error: MMEngineError | None = None
        self.is_refused = False
        self.timer: asyncio.TimerHandle | None = None  # cancels the preparation at its time limit
        self.request_id = ""  # set when the engine has the request
        self.closed = False
        # Facts about the prompt, set after its preparation:
        self.reasoning: ReasoningTokens = NO_REASONING
        self.num_embeds: dict[str, int] = {}  # number of embeddings by modality
        self.num_prompt_tokens = 0

    def take_prompt(self, token_ids: np.ndarray, media: Iterable[MediaItem], reasoning: Reasoning) -> None:
        """Record facts about the prepared prompt (int32 [n]).

        Raises the same errors as `Reasoning.tokens`.
        """
        self.reasoning = reasoning.tokens(self.options, token_ids)
        self.num_prompt_tokens = len(token_ids)
        for item in media:
            self.num_embeds[item.modality] = self.num_embeds.get(item.modality, 0) + item.num_embeds

    @property
    def age_s(self) -> float:
        """Seconds since the caller submitted the request. The deadline counts from the same moment."""
        return time.monotonic() - self.begun

    def end(self, error: MMEngineError | None) -> None:
        """End the stream. Called on the caller's loop."""
        self._put_end(error)
        self.wake()

    def put(self, output: RequestOutput) -> None:
        """Add an output without waking the caller. Called on the caller's loop."""
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
        """Call the listener if there is one, or wake a waiting caller."""
        if self.listener is not None:
            self.listener()
        elif self._arrived is not None:
            self._arrived.set()

    async def wait(self) -> None:
        """Wait until there is an unread item."""
        while not self.items:
            arrived = self._arrived = self._arrived or asyncio.Event()
            arrived.clear()
            await arrived.wait()


def deliver(outputs: Iterable[tuple[Channel, RequestOutput]]) -> list[Channel]:
    """Pass outputs from the engine's thread to their channels. Each event loop wakes up only once. Returns
    the channels with a closed event loop.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Channel, RequestOutput]]] = {}
    for channel, output in outputs:
        by_loop.setdefault(channel.loop, []).append((channel, output))
    lost: list[Channel] = []
    for loop, some in by_loop.items():
        try:
            loop.call_soon_threadsafe(put_all, some)
        except RuntimeError:
            lost += [channel for channel, _ in some]
    return lost


def tell_accepted(channels: Iterable[Channel]) -> None:
    """Tell callers that the log has their requests. Called on the engine's thread. Each event loop wakes up
    only once.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[Channel]] = {}
    for channel in channels:
        by_loop.setdefault(channel.loop, []).append(channel)
    for loop, some in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(_set_accepted, some)


def _set_accepted(channels: list[Channel]) -> None:
    for channel in channels:
        channel.accepted.set()


def put_all(outputs: Iterable[tuple[Channel, RequestOutput]]) -> None:
    """Add outputs to channels on this event loop and wake each channel once."""
    channels: dict[Channel, None] = {}
    for channel, output in outputs:
        channel.put(output)
        channels[channel] = None
    _wake_all(list(channels))


def _wake_all(channels: list[Channel]) -> None:
    for channel in channels[:LISTENERS_AT_ONCE]:
        channel.wake()
    if rest := channels[LISTENERS_AT_ONCE:]:
        rest[0].loop.call_soon(_wake_all, rest)
