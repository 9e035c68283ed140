"""Renders the Responses API's response object and usage, for response bodies, events and stored responses."""

import msgspec

from mmengine.server.chat.answer_ids import PREFIXES
from mmengine.server.chat.chat_frames import Usage
from mmengine.server.chat.parsed_request import Envelope
from mmengine.server.chat.response_echo import ResponseEcho
from mmengine.server.http.errors import ApiError

ID_PREFIX = PREFIXES["responses"]
NULL = b"null"
_MEDIA_CODES = ("invalid_media", "media_not_fetched")
_encode = msgspec.json.encode


class ResponseObject:
    """Renders a request's response object. The constructor takes the request id and the envelope, which is
    the HTTP call's data in the log. The method `of` takes the answer.
    """

    def __init__(self, request_id: str, envelope: Envelope):
        echo = envelope.responses or ResponseEcho()
        properties = {
            "id": f"{ID_PREFIX}{request_id}",
            "object": "response",
            "created_at": envelope.created,
            "model": envelope.model,
            "background": echo.background,
            "instructions": echo.instructions,
            "max_output_tokens": echo.max_output_tokens,
            "max_tool_calls": echo.max_tool_calls,
            "metadata": echo.metadata,
            "parallel_tool_calls": echo.parallel_tool_calls,
            "previous_response_id": echo.previous_response_id,
            "prompt_cache_key": echo.prompt_cache_key,
            "reasoning": echo.reasoning,
            "safety_identifier": echo.safety_identifier,
            "service_tier": "default",
            "store": echo.store,
            "temperature": echo.temperature,
            "text": echo.text,
            "tool_choice": echo.tool_choice,
            "tools": echo.tools,
            "top_logprobs": echo.top_logprobs,
            "top_p": echo.top_p,
            "truncation": "disabled",
            **({"user": echo.user} if echo.user is not None else {}),
        }
        self._head = _encode(properties)[:-1]

    def of(
        self,
        status: str,
        *,
        output: bytes = b"[]",
        usage: bytes = NULL,
        error: bytes = NULL,
        incomplete: bytes = NULL,
        more: bytes = b"",
    ) -> bytes:
        """Return the response object as JSON. `status`: queued, in_progress, cancelled, completed, incomplete
        or failed. All arguments except `status` are JSON. `more`: further properties, each preceded by a
        comma.
        """
        return b'%b,"status":"%b","error":%b,"incomplete_details":%b,"output":%b,"usage":%b%b}' % (
            self._head,
            status.encode(),
            error,
            incomplete,
            output,
            usage,
            more,
        )

    def failed(self, error: ApiError) -> bytes:
        """Return a failed request's response object."""
        return self.of("failed", error=_encode({"code": _code(error), "message": error.body.message}))


def _code(error: ApiError) -> str:
    """Map the error to a code in OpenAI's fixed list of codes."""
    if error.status == 429:
        return "rate_limit_exceeded"
    if error.body.code in _MEDIA_CODES:
        return "invalid_image"
    return "invalid_prompt" if error.status == 400 else "server_error"


def usage_json(usage: Usage) -> bytes:
    """Convert a chat completion's usage to the names of the Responses API. Return the usage as JSON."""
    prompt, completion = usage["prompt_tokens_details"], usage["completion_tokens_details"]
    assert isinstance(prompt, dict) and isinstance(completion, dict)
    return _encode(
        {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": prompt["cached_tokens"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": completion["reasoning_tokens"]},
            "total_tokens": usage["total_tokens"],
        }
    )
