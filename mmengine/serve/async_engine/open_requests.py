"""Tracks AsyncEngine's open requests, from submission to the last output or error."""

import threading
from collections.abc import Iterator

from mmengine.errors import InvalidRequest, MMEngineError, QueueFull
from mmengine.serve.engine.engine import Engine
from mmengine.serve.stream.channel import Channel, deliver, tell_accepted
from mmengine.serve.text.request_output import RequestOutput, engine_failed


class OpenRequests:
    """All open requests' channels, at most `limit`. A channel carries outputs to a caller's stream.

    Once `failure` or `is_closing` is set, no further request can be added.

    `running` maps request ids in the engine to channels. Only the engine's thread may change `running`, or
    call `end_with` and the methods below it. Any thread may call the methods above it.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.running: dict[str, Channel] = {}
        self.failure: MMEngineError | None = None
        self.is_closing = False
        self._lock = threading.Lock()  # guards _channels, is_closing and failure
        self._channels: set[Channel] = set()
        self._unwritten: list[Channel] = []  # channels of requests that are not in the log yet

    def __len__(self) -> int:
        return len(self._channels)

    def __contains__(self, channel: Channel) -> bool:
        return channel in self._channels

    def __iter__(self) -> Iterator[Channel]:
        with self._lock:
            return iter(list(self._channels))

    def check_failure(self) -> None:
        """Raise `failure` if the engine has failed."""
        if self.failure is not None:
            raise engine_failed(self.failure)

    def check_alive(self) -> None:
        """Raise `failure` if the engine has failed, or InvalidRequest if the engine is closed."""
        self.check_failure()
        if self.is_closing:
            raise InvalidRequest("the engine is closed")

    def add(self, channel: Channel) -> None:
        """Add a new request.

        Raises QueueFull, InvalidRequest for a closed engine, or the engine's failure.
        """
        with self._lock:
            self.check_alive()
            if len(self._channels) >= self.limit:
                raise QueueFull(f"{self.limit} requests are open, which is the limit: try again later")
            self._channels.add(channel)

    def add_recovered(self, channel: Channel) -> None:
        """Add a request that the previous process left in the log. The limit does not apply."""
        with self._lock:
            self.check_failure()
            self._channels.add(channel)

    def close(self) -> None:
        """Refuse new requests from now on."""
        with self._lock:
            self.is_closing = True

    def fail(self, error: MMEngineError) -> None:
        """Record the engine's first failure and end all requests with `error`."""
        with self._lock:
            self.failure = self.failure or error
            channels = list(self._channels)
        for channel in channels:
            self.end(channel, engine_failed(error))

    def forget(self, channel: Channel) -> None:
        """Remove the request, which no longer counts towards `limit`."""
        with self._lock:
            self._channels.discard(channel)

    def end(self, channel: Channel, error: MMEngineError | None) -> None:
        """Remove the request and end its stream, with `error` if given."""
        self.forget(channel)
        try:
            channel.loop.call_soon_threadsafe(channel.end, error)
        except RuntimeError:
            return  # the caller's loop is closed

    # The methods below run on the engine's thread.

    def end_with(self, channel: Channel, outputs: list[RequestOutput]) -> None:
        """Remove a request that never reached the engine, and end its stream with these outputs."""
        self.forget(channel)
        deliver((channel, output) for output in outputs)

    def begin(self, channel: Channel, request_id: str) -> None:
        """Record that the engine has queued the channel's request under this id.

        The request counts as accepted only when a step has written it to the log, see `acknowledge`.
        """
        channel.request_id = request_id
        self.running[request_id] = channel
        self._unwritten.append(channel)

    def deliver(self, outputs: list[RequestOutput], engine: Engine) -> None:
        """Pass outputs to their callers. Cancels requests whose caller's event loop is closed."""
        finished = [output.request_id for output in outputs if output.completion is not None]
        for request_id in finished:  # removed first, so that a caller can immediately submit another request
            self.forget(self.running[request_id])
        for channel in deliver((self.running[output.request_id], output) for output in outputs):
            channel.closed = True
            engine.cancel(channel.request_id)
        for request_id in finished:
            if not self.running.pop(request_id).is_held:
                engine.requests.delivered(request_id)

    def acknowledge(self, engine: Engine) -> None:
        """Mark requests as accepted if their events are now in the log on disk."""
        waiting, self._unwritten = self._unwritten, []
        written: list[Channel] = []
        for channel in waiting:
            (written if engine.is_on_disk(channel.request_id) else self._unwritten).append(channel)
        tell_accepted(written)
