"""Creates the server-sent event stream for a streamed answer. When the stream ends, counts the end in the
metrics and releases the call's resources.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from mmengine.server.answers.headers import answer_headers
from mmengine.server.chat.parsed_request import ParsedRequest
from mmengine.server.chat.response_builder import ResponseBuilder
from mmengine.server.http.admission import Admission
from mmengine.server.http.errors import ApiError, api_error
from mmengine.server.http.metrics import HttpMetrics
from mmengine.server.settings import ServerSettings
from mmengine.server.transport.sse import EventStream

if TYPE_CHECKING:  # OpenTelemetry is an extra.
    from mmengine.server.calls.tracing import CallSpan


class EventStreams:
    """Creates the event stream for a response builder's answer."""

    def __init__(self, settings: ServerSettings, metrics: HttpMetrics, admission: Admission):
        self._settings, self._metrics, self._admission = settings, metrics, admission

    def of_call(
        self, builder: ResponseBuilder, parsed_request: ParsedRequest, owner: str, span: "CallSpan | None"
    ) -> EventStream:
        """Return the stream for an admitted call. The call counts as open until the stream ends."""

        def ended(how: str) -> None:
            self._admission.give(owner)
            if span is not None:
                span.record_answer(builder, how)
            self._metrics.stream_ended(how)

        return self._make(builder, parsed_request, ended, span)

    def of_stored_response(self, builder: ResponseBuilder, owner: str) -> EventStream:
        """Admit a call, and return the stream for a response that an earlier call created."""
        try:
            self._admission.take(owner)
        except ApiError:
            builder.close()
            raise
        return self.of_call(builder, builder.request, owner, None)

    def of_session(
        self, builder: ResponseBuilder, parsed_request: ParsedRequest, then: Callable[[], None]
    ) -> EventStream:
        """Return the stream for a session's answer. `then` is called when the stream ends."""

        def ended(how: str) -> None:
            then()
            self._metrics.stream_ended(how)

        return self._make(builder, parsed_request, ended)

    def _make(
        self,
        builder: ResponseBuilder,
        parsed_request: ParsedRequest,
        ended: Callable[[str], None],
        span: "CallSpan | None" = None,
    ) -> EventStream:
        self._metrics.streams.inc()
        settings = self._settings
        return EventStream(
            builder,
            builder.first(),
            answer_headers(parsed_request, builder.unenforced, span),
            ping_s=settings.ping_s,
            slow_reader_s=settings.slow_reader_s,
            max_backlog=settings.max_backlog,
            sent=self._metrics.count_events,
            to_api_error=self._to_api_error,
            ended=ended,
            interrupted=partial(self._interrupted, parsed_request.request_id, builder.can_reattach),
        )

    def _to_api_error(self, error: Exception) -> ApiError:
        found = api_error(error)
        self._metrics.count_error(found)
        return found

    def _interrupted(self, request_id: str, can_reattach: bool) -> tuple[str, ApiError] | None:
        """Return (label for the metrics, the client's error) if the server must end the stream early, else
        None. The server ends streams early during a shutdown, or if the log cannot be written.
        """
        if self._admission.is_draining:
            return "shutdown", self._admission.interrupted_error(request_id, can_reattach=can_reattach)
        stuck = self._admission.stuck_error(request_id, can_reattach=can_reattach)
        return None if stuck is None else ("error", self._to_api_error(stuck))
