"""What an AsyncEngine does with requests in its log: of the process before, and of an engine that hung."""

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Protocol

import msgspec
import numpy as np

from mmengine.errors import InvalidRequest, MMEngineError, RequestFailed
from mmengine.serve.engine.engine import Engine
from mmengine.serve.prompt.options import Options
from mmengine.serve.requests.recovered_requests import Left
from mmengine.serve.stream.channel import Channel, tell_accepted
from mmengine.serve.stream.request_stream import Held, Stream
from mmengine.serve.text.output_text import AnswerTexts
from mmengine.serve.text.request_output import RequestOutput, ended, engine_failed, in_pieces

AGAIN = "the engine hung before it took this; send it again"
_SETTLED_S = 10.0  # that is waited for an engine, which may have ended


class AsyncLeft(Protocol):
    """Part of AsyncEngine."""

    _engine: Engine
    _commands: queue.SimpleQueue[Callable[[], None]]
    _lock: threading.Lock
    _open: set[Channel]
    _left: dict[str, Left]
    _running: dict[str, Channel]
    _failure: MMEngineError | None
    _unwritten: list[Channel]

    _has_log: bool

    @property
    def keeps_held(self) -> bool:
        """Whether what is asked to `hold` outlives this process."""
        return self._has_log

    def _close_channel(self, channel: Channel) -> None: ...

    def _deliver(self, outputs: list[RequestOutput]) -> None: ...

    def _cancel(self, channel: Channel) -> None: ...

    def _end(self, channel: Channel, error: MMEngineError | None) -> None: ...

    def left(self) -> list[Left]:
        """Requests of the process before that nobody took up yet: they run on, or have ended."""
        with self._lock:
            return list(self._left.values())

    def attach(self, request_id: str, *, hold: bool = False) -> Stream:
        """Take up a request of the process before: its news from the first token of its answer on, those so
        far at once. `hold` as for `stream`. Raises InvalidRequest for one that is not among the `left`."""
        with self._lock:
            if self._failure is not None:
                raise engine_failed(self._failure)
            left = self._taken(request_id)
            sampling = msgspec.structs.replace(left.queued.sampling, n=left.num_choices)
            options = Options(sampling, request_id, grammar=left.queued.grammar, envelope=left.envelope)
            texts = AnswerTexts(self._engine.processor.tokenizer, sampling)
            texts.grammar = left.queued.grammar
            channel = Channel(options, texts, hold)
            prompt = np.frombuffer(left.queued.prompt, np.int32)
            channel.take_prompt(prompt, left.queued.media, self._engine.reasoning)
            channel.accepted.set()  # the log has it already
            self._open.add(channel)
        self._commands.put(lambda: self._attach(channel, left))
        return Stream(channel, self._close_channel, self.let_go)

    def give_up(self, request_id: str) -> None:
        """Nobody will take up a request of the process before: it is cancelled, or, where it has ended, its
        answer let go. Raises InvalidRequest as `attach` does."""
        with self._lock:
            left = self._taken(request_id)
        self._commands.put(lambda: self._engine.requests.drop_resumed(request_id, left.num_choices))

    def _taken(self, request_id: str) -> Left:
        if request_id not in self._left:
            raise InvalidRequest(f"no request {request_id!r} of the process before waits to be taken up")
        return self._left.pop(request_id)

    def let_go(self, answers: list[Held]) -> None:
        """These answers, of streams that held them, are where they will not be lost."""
        self._commands.put(lambda: self._let_go(answers))

    async def settled(self) -> None:
        """Wait until the log has what was let go before, unless the engine failed."""
        for _ in range(2):  # the engine takes commands before a step, and writes in it what they change
            done = asyncio.Event()
            self._commands.put(partial(_tell, asyncio.get_running_loop(), done))
            with suppress(TimeoutError):
                async with asyncio.timeout(_SETTLED_S):
                    await done.wait()

    # The watchdog's thread, while the engine's is stuck

    def _take_up(self, stuck: Engine) -> None:
        """Let the streams go on with what the log has of their requests."""
        self._engine.sessions.go_on_from(stuck.sessions)
        for request_id, channel in list(self._running.items()):
            requests, num_choices = self._engine.requests, channel.options.sampling.n
            if requests.can_take_up(request_id, num_choices):
                completion = requests.take_up(request_id, num_choices, stream=True)
                if completion is not None:
                    self._deliver(ended(completion)[-1:])
            elif channel.options.place is None:  # no step had seen the request yet
                options = replace(channel.options.after(channel.age_s), request_id=request_id)
                self._engine.submit_prepared(stuck.requests.prepared(request_id), options)
            else:
                requests.run_on(request_id)
                del self._running[request_id]  # its session gives the id to the next request
                self._end(channel, RequestFailed(AGAIN))

    # The engine's thread

    def _attach(self, channel: Channel, left: Left) -> None:
        channel.request_id = left.request_id
        self._running[channel.request_id] = channel
        news = self._engine.requests.take_up_whole(left.request_id, left.num_choices)
        self._deliver([piece for each in news for piece in in_pieces(each)])
        if channel.closed:
            self._cancel(channel)

    def _acknowledge(self, engine: Engine) -> None:
        """Tell the callers whose requests a step wrote down."""
        waiting, self._unwritten = self._unwritten, []
        written: list[Channel] = []
        for channel in waiting:
            (written if engine.is_on_disk(channel.request_id) else self._unwritten).append(channel)
        tell_accepted(written)

    def _let_go(self, answers: list[Held]) -> None:
        """After a hang the engine may have them as those of the process before."""
        requests = self._engine.requests
        for answer in answers:
            requests.delivered(answer.request_id)
            if requests.resumed:
                requests.drop_resumed(answer.request_id, answer.num_choices)


def _tell(loop: asyncio.AbstractEventLoop, done: asyncio.Event) -> None:
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(done.set)
