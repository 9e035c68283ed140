"""Accepts requests from AsyncEngine's callers, starts the preparation of their prompts, and submits the
requests to the engine.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from mmengine.errors import ErrorCode, MMEngineError, RequestFailed
from mmengine.events.vocabulary import DEADLINE
from mmengine.models.plugin import Prepared
from mmengine.processing.workers.attempt import GIVEN_UP, AttemptOver
from mmengine.serve.async_engine.engine_thread import EngineThread
from mmengine.serve.async_engine.open_requests import OpenRequests
from mmengine.serve.async_engine.preparation import Preparation, PreparingRequest
from mmengine.serve.prompt.prompt import Prompt
from mmengine.serve.requests.session_media import Load
from mmengine.serve.stream.channel import Channel
from mmengine.serve.text.request_output import engine_failed, final_outputs, unstarted_completion
from mmengine.serve.text.response_format import ResponseFormat
from mmengine.structured_output.request.fields import Normalizer


class Admission:
    """Prepares each request's prompt on worker threads, then submits the request on the engine's thread.

    A request whose preparation fails ends with an error. `work_out` normalizes large schemas in other
    processes. `timeout_s` limits each preparation. Any thread may call `add` and `close`; only the engine's
    thread may call the other methods and use `preparing`.
    """

    def __init__(
        self,
        thread: EngineThread,
        open_requests: OpenRequests,
        num_media_workers: int,
        work_out: Normalizer | None,
        timeout_s: float,
    ) -> None:
        self._thread, self._open, self._timeout_s = thread, open_requests, timeout_s
        self.preparation = Preparation(lambda: thread.engine, num_media_workers, self._prepared, work_out)
        self.preparing: dict[Channel, PreparingRequest] = {}

    def add(self, channel: Channel, prompt: Prompt, form: Callable[[], ResponseFormat] | None) -> None:
        """Add a request and begin to prepare its prompt. Raises the same errors as OpenRequests.add."""
        self._open.add(channel)
        request = PreparingRequest(channel, prompt, form, self._timeout_s)
        self._thread.put(lambda: self.preparing.update({channel: request}))
        if request.limit_s is not None:
            expire = partial(self._thread.put, partial(self._expire, channel))
            channel.timer = channel.loop.call_later(request.limit_s, expire)
        self.preparation.begin(request)

    def close(self) -> None:
        """Wait until the preparation threads have ended."""
        self.preparation.close()

    def _prepared(self, request: PreparingRequest, result: Prepared | Exception) -> None:
        """Queue the prepared prompt, or the error, for the engine's thread.

        Called on a preparation thread.
        """

        def take() -> None:
            if loads := self._older_media(request, result):
                assert not isinstance(result, Exception)
                self.preparation.load(request, result, loads)
            else:
                self._submit(request, result)

        self._thread.put(take)

    # The methods below run on the engine's thread.

    def cancel(self, channel: Channel) -> None:
        """Give up a request that is being prepared, or cancel a running request."""
        request = self.preparing.pop(channel, None)
        if request is not None:
            self._give_up(request)
            self._open.end(channel, RequestFailed(GIVEN_UP))
        elif channel.request_id in self._open.running:
            self._thread.engine.cancel(channel.request_id)

    def give_up_all(self) -> None:
        """Stop all preparations. The caller must then end the requests."""
        for request in list(self.preparing.values()):
            self._give_up(request)

    def _older_media(self, request: PreparingRequest, result: Prepared | Exception) -> Sequence[Load]:
        """Return loaders for the session's older media items that must be decoded again.

        Preparation threads run the loaders, because decoding during a step would delay all requests.
        """
        place = request.channel.options.place
        is_loaded = request.loaded is not None or request.channel not in self.preparing
        if place is None or isinstance(result, Exception) or is_loaded:
            return []
        with suppress(Exception):  # the submission raises the same error
            return self._thread.engine.sessions.to_load(result, place, request.channel.options)
        return []

    def _submit(self, request: PreparingRequest, result: Prepared | Exception) -> None:
        channel, engine = request.channel, self._thread.engine
        try:
            if self.preparing.pop(channel, None) is None:
                return  # the request was cancelled during its preparation
            if isinstance(result, AttemptOver):
                self._end_late(request)
            elif isinstance(result, Exception):
                raise result
            elif channel.is_count:
                self._open.end(channel, None)
            else:
                request_id = engine.submit_prepared(result, request.options)
                # The engine has put the session's tokens before the prompt.
                if channel.options.place is not None:
                    whole = engine.requests.prepared(request_id)
                    channel.num_prompt_tokens = len(whole.prompt_token_ids)
                self._open.begin(channel, request_id)
        except MMEngineError as error:
            self._open.end(channel, error)
        except Exception as error:  # a processor's bug ends only this request, not the engine
            self._open.end(channel, engine_failed(error))
        finally:
            self.preparation.release(channel)

    def _expire(self, channel: Channel) -> None:
        """End a request whose preparation has reached its time limit."""
        request = self.preparing.pop(channel, None)
        if request is not None:
            self._give_up(request)
            self._end_late(request)

    def _give_up(self, request: PreparingRequest) -> None:
        self.preparation.give_up(request)
        self.preparation.release(request.channel)

    def _end_late(self, request: PreparingRequest) -> None:
        """End a request whose preparation reached its time limit.

        If the request's deadline has passed, the caller gets a completion with the reason DEADLINE. Otherwise
        the request ends with an error.
        """
        channel = request.channel
        if not request.is_late:
            self._open.end(channel, request.too_slow())
            return
        outputs = final_outputs(
            unstarted_completion(
                channel.options.request_id, channel.options.sampling.n, DEADLINE, ErrorCode.DEADLINE_EXCEEDED
            )
        )
        self._open.end_with(channel, outputs)
