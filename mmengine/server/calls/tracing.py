"""Writes an OpenTelemetry span for each call, with child spans for preparation, queue, prefill and decode.

When a request ends, the engine reports the request's times (`mmengine.serve.requests.request_times`), and the
child spans are written. OpenTelemetry's modules are loaded only if tracing is enabled.
"""

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial

import msgspec
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, format_span_id, format_trace_id
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from mmengine.errors import ErrorCode
from mmengine.serve.async_engine.served_engine import ServedEngine
from mmengine.serve.prompt.prompt import core_ids
from mmengine.serve.requests.request_times import Times
from mmengine.server.chat.answer_ids import answer_id
from mmengine.server.chat.parsed_request import ParsedRequest
from mmengine.server.chat.response_builder import ResponseBuilder
from mmengine.server.chat.submission import prompt_request_id
from mmengine.server.http.errors import ApiError, ClientLeft, api_error
from mmengine.version import __version__

# Maximum number of requests without reported times. The oldest requests are dropped first.
MAX_TRACED = 2**14
_OPERATIONS = {"completion": "text_completion"}
_SAMPLING = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed", "max_tokens")
Value = str | int | float | bool | list[str]


class Tracing:
    """Writes spans to `provider`. Belongs to the event loop that creates it."""

    def __init__(self, provider: trace.TracerProvider, engine: ServedEngine):
        self._provider = provider
        self._tracer = provider.get_tracer("mmengine", __version__)
        # Request id in the log -> context of the call's span.
        self._parents: dict[str, Context] = {}
        self._loop = asyncio.get_running_loop()
        engine.tell_times(self._heard)

    def begin(self, parsed_request: ParsedRequest, num_prompts: int) -> "CallSpan":
        """Start the span for a parsed call, before its requests are submitted."""
        envelope, sampling = parsed_request.envelope, parsed_request.sampling
        operation = _OPERATIONS.get(envelope.api, "chat")
        carrier = {"traceparent": envelope.traceparent} if envelope.traceparent else {}
        span = self._tracer.start_span(
            f"{operation} {envelope.model}",
            TraceContextTextMapPropagator().extract(carrier),
            SpanKind.SERVER,
        )
        traced = CallSpan(span)
        if not span.is_recording():
            return traced
        several = msgspec.structs.replace(envelope, num_prompts=num_prompts)
        names = [prompt_request_id(several, parsed_request.request_id, place) for place in range(num_prompts)]
        given = {f"gen_ai.request.{name}": getattr(sampling, name) for name in _SAMPLING}
        found: dict[str, Value | None] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "mmengine",
            "gen_ai.request.model": envelope.model,
            **given,
            "gen_ai.request.choice.count": sampling.n if sampling.n > 1 else None,
            "gen_ai.request.stop_sequences": list(sampling.stop) or None,
            "gen_ai.request.stream": parsed_request.stream,
            "mmengine.api": envelope.api,
            "mmengine.request_id": names[0],
        }
        span.set_attributes({name: value for name, value in found.items() if value is not None})
        parent = trace.set_span_in_context(span)
        for name in names:
            self._parents |= dict.fromkeys(core_ids(name, sampling.n), parent)
        while len(self._parents) > MAX_TRACED:
            del self._parents[next(iter(self._parents))]
        return traced

    def _heard(self, request_id: str, times: Times) -> None:
        """Receive a finished request's times. Runs on the engine's thread."""
        if request_id in self._parents:
            with suppress(RuntimeError):  # Raised if the loop is closed.
                self._loop.call_soon_threadsafe(partial(self._tell, request_id, times))

    def _tell(self, request_id: str, times: Times) -> None:
        """Write a finished request's child spans."""
        if (parent := self._parents.pop(request_id, None)) is None:
            return
        offset = time.time_ns() - time.monotonic_ns()
        begun, queued, admitted, first, last, over = times
        stretches = (
            ("preparation", begun, queued),
            ("queue", queued, admitted or over),
            ("prefill", admitted, first or over),
            ("decode", first, last),
        )
        for name, start, end in stretches:
            if start and end >= start:
                ns = [offset + int(at * 1e9) for at in (start, end)]
                span = self._tracer.start_span(name, parent, start_time=ns[0])
                span.set_attribute("mmengine.request_id", request_id)
                span.end(ns[1])

    def close(self) -> None:
        """Send the remaining spans to the collector. May take several seconds."""
        if isinstance(self._provider, TracerProvider):
            self._provider.shutdown()


class CallSpan:
    """A call's span."""

    def __init__(self, span: Span):
        self._span = span

    @property
    def headers(self) -> Mapping[str, str]:
        """The W3C trace context headers for the response."""
        context = self._span.get_span_context()
        trace_id, span_id = format_trace_id(context.trace_id), format_span_id(context.span_id)
        return {"traceparent": f"00-{trace_id}-{span_id}-{int(context.trace_flags):02x}"}

    def record_error(self, error: BaseException) -> None:
        """End the span for a call that failed before its response began."""
        if self._span.is_recording():
            left = isinstance(error, (ClientLeft, asyncio.CancelledError))
            found = ApiError(ErrorCode.CLIENT_LEFT, "the client left") if left else api_error(error)
            self._span.set_attribute("error.type", found.body.code or str(found.status))
            if found.status >= 500:
                self._span.set_status(Status(StatusCode.ERROR, found.body.message))
        self._span.end()

    def record_answer(self, builder: ResponseBuilder, how: str) -> None:
        """End the span for a call whose response began. `how`: "whole" for a complete answer, otherwise the
        reason for the stream's end.
        """
        if self._span.is_recording():
            if how != "whole":
                self._span.set_attribute("error.type", how)
            self._span.set_attributes(_told_of(builder))
        self._span.end()


def _told_of(builder: ResponseBuilder) -> dict[str, Value]:
    """Return the span attributes for an answer, which may be incomplete."""
    completions = builder.completions
    if not completions:
        return {}
    choices = [choice for each in completions for choice in each.choices]
    return {
        "gen_ai.response.id": answer_id(builder.request.envelope.api, builder.request.request_id),
        "gen_ai.response.model": builder.request.envelope.model,
        "gen_ai.response.finish_reasons": [choice.finish_reason for choice in choices],
        "gen_ai.usage.input_tokens": sum(len(each.prompt_token_ids) for each in completions),
        "gen_ai.usage.output_tokens": sum(len(choice.token_ids) for choice in choices),
        "gen_ai.usage.cache_read.input_tokens": sum(each.num_cached_tokens for each in completions),
    }


def over_otlp(endpoint: str, engine: ServedEngine) -> Tracing:
    """Return a Tracing that sends spans to the OTLP collector at this URL in the background."""
    # Imported only here, because a program with its own tracer provider needs no exporter.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    provider = TracerProvider(resource=Resource.create({"service.name": "mmengine"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracing(provider, engine)
