"""Continues requests that AsyncEngine finds in its log after a restart or a hung step."""

import asyncio
import threading
from contextlib import suppress
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np

from mmengine.errors import InvalidRequest, RequestFailed
from mmengine.serve.async_engine.engine_thread import EngineThread
from mmengine.serve.async_engine.open_requests import OpenRequests
from mmengine.serve.engine.engine import Engine
from mmengine.serve.prompt.options import Options
from mmengine.serve.requests.recovery import RecoveredRequest, find_recovered
from mmengine.serve.stream.channel import Channel
from mmengine.serve.stream.request_stream import HeldAnswer
from mmengine.serve.text.output_text import OutputText
from mmengine.serve.text.request_output import final_outputs

AGAIN = "the engine hung before it queued the request: send the request again"
_SYNC_LIMIT_S = 10.0  # maximum time that `settled` waits for a step, in case the engine has ended


class Recovery:
    """Attaches callers to requests that the log contains.

    Any thread may call the methods, except where a comment names the thread.
    """

    def __init__(self, thread: EngineThread, open_requests: OpenRequests) -> None:
        self._thread, self._open = thread, open_requests
        self._lock = threading.Lock()
        self._waiting, unclaimed = find_recovered(thread.engine.requests.resumed)
        for core_id in unclaimed:  # no caller can claim these answers, so the log would keep them forever
            thread.engine.requests.drop_resumed(core_id)

    def waiting(self) -> list[RecoveredRequest]:
        """Return the previous process's requests to which no caller is attached yet."""
        with self._lock:
            return list(self._waiting.values())

    def attach(self, request_id: str, *, hold: bool) -> Channel:
        """Return a channel that receives the request's output from the first token. Raises InvalidRequest."""
        engine = self._thread.engine
        self._open.check_failure()
        recovered = self._claim(request_id)
        sampling = msgspec.structs.replace(recovered.queued.sampling, n=recovered.num_choices)
        options = Options(sampling, request_id, grammar=recovered.queued.grammar, envelope=recovered.envelope)
        texts = OutputText(engine.processor.tokenizer, sampling)
        texts.grammar = recovered.queued.grammar
        channel = Channel(options, texts, hold)
        prompt = np.frombuffer(recovered.queued.prompt, np.int32)
        channel.take_prompt(prompt, recovered.queued.media, engine.reasoning)
        channel.accepted.set()  # the log has the request already
        self._open.add_recovered(channel)
        self._thread.put(lambda: self._attach(channel, recovered))
        return channel

    def give_up(self, request_id: str) -> None:
        """Cancel a running request, or drop an ended request's answer. Raises InvalidRequest."""
        recovered = self._claim(request_id)
        drop = partial(self._drop, request_id, recovered.num_choices)
        self._thread.put(drop)

    def _claim(self, request_id: str) -> RecoveredRequest:
        with self._lock:
            if request_id not in self._waiting:
                raise InvalidRequest(
                    f"no request {request_id!r} of the previous process waits to be attached"
                )
            return self._waiting.pop(request_id)

    def release(self, answers: list[HeldAnswer]) -> None:
        """Allow the log to delete these answers, which the callers have stored."""
        self._thread.put(lambda: self._release(answers))

    async def settled(self) -> None:
        """Wait until the log has recorded all earlier calls to `release`, or the engine has failed."""
        # Wait for two calls on the engine's thread: the step between the calls writes the releases to the
        # log.
        for _ in range(2):
            done = asyncio.Event()
            self._thread.put(partial(_set, asyncio.get_running_loop(), done))
            with suppress(TimeoutError):
                async with asyncio.timeout(_SYNC_LIMIT_S):
                    await done.wait()

    # The method below runs on the watchdog's thread while the engine's thread hangs.

    def resume_streams(self, stuck: Engine) -> None:
        """Continue the open streams after a hang. The new engine resumes their requests from the log."""
        engine = self._thread.engine
        engine.sessions.continue_turns_of(stuck.sessions)
        for request_id, channel in list(self._open.running.items()):
            requests, num_choices = engine.requests, channel.options.sampling.n
            if requests.can_resume(request_id, num_choices):
                completion = requests.resume(request_id, num_choices, stream=True)
                if completion is not None:
                    self._open.deliver(final_outputs(completion)[-1:], engine)
            elif channel.options.place is None:  # no step had written the request to the log
                options = replace(channel.options.after(channel.age_s), request_id=request_id)
                engine.submit_prepared(stuck.requests.prepared(request_id), options)
            else:
                requests.detach(request_id)
                del self._open.running[request_id]  # the session will reuse the id for its next request
                self._open.end(channel, RequestFailed(AGAIN))

    # The methods below run on the engine's thread.

    def _attach(self, channel: Channel, recovered: RecoveredRequest) -> None:
        engine = self._thread.engine
        channel.request_id = recovered.request_id
        self._open.running[channel.request_id] = channel
        outputs = engine.requests.resume_with_outputs(recovered.request_id, recovered.num_choices)
        self._open.deliver(outputs, engine)
        if channel.closed and channel.request_id in self._open.running:
            engine.cancel(channel.request_id)

    def _drop(self, request_id: str, num_choices: int) -> None:
        self._thread.engine.requests.drop_resumed(request_id, num_choices)

    def _release(self, answers: list[HeldAnswer]) -> None:
        requests = self._thread.engine.requests
        for answer in answers:
            requests.delivered(answer.request_id)
            if requests.resumed:  # after a hang, this process's answers may be among the resumed answers
                requests.drop_resumed(answer.request_id, answer.num_choices)


def _set(loop: asyncio.AbstractEventLoop, done: asyncio.Event) -> None:
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(done.set)
