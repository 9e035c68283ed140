"""Submits calls to the engine, and builds the engine requests' ids and options. A call with several prompts
becomes several engine requests.
"""

from collections.abc import Mapping

import msgspec

from mmengine.serve.async_engine.served_engine import ServedEngine
from mmengine.serve.prompt.options import SubmitOptions
from mmengine.serve.requests.recovery import UnclaimedRequest
from mmengine.serve.stream.request_stream import Stream
from mmengine.server.chat.parsed_request import Envelope, ParsedRequest

_encode = msgspec.json.Encoder().encode


def log_request_id(owner: str, name: str) -> str:
    """Return a call's id in the log and in the store. The id begins with the owner, so that ids from
    different API keys never collide.
    """
    return f"{owner}:{name}" if owner else name


def prompt_request_id(envelope: Envelope, request_id: str, place: int) -> str:
    """Return the request id for the prompt with index `place`."""
    name = f"{request_id}-{place}" if envelope.num_prompts > 1 else request_id
    return log_request_id(envelope.owner, name)


def submit(
    engine: ServedEngine,
    parsed_request: ParsedRequest,
    *,
    hold: bool = False,
    recovered: Mapping[int, UnclaimedRequest] | None = None,
) -> list[Stream]:
    """Submit a request for each prompt in the call, and return the requests' streams.

    `hold`: see `AsyncEngine.stream` in serve/async_engine. `recovered`: a prompt's index -> the prompt's
    request in the previous process. Such requests are continued. Raises InvalidRequest and QueueFull. On any
    error, cancels the requests that were already submitted.
    """
    streams: list[Stream] = []
    envelope, several = parsed_request.envelope, len(parsed_request.prompts)
    try:
        for place, prompt in enumerate(parsed_request.prompts):
            if recovered is not None and place in recovered:
                streams.append(engine.attach(recovered[place].request_id, hold=hold))
                continue
            if several > 1:
                envelope = msgspec.structs.replace(envelope, num_prompts=several, place=place)
            options = submit_options(
                parsed_request, prompt_request_id(envelope, parsed_request.request_id, place)
            )
            options["envelope"] = _encode(envelope)
            streams.append(engine.stream(prompt, parsed_request.sampling, hold=hold, **options))
    except BaseException:
        for stream in streams:
            stream.cancel()
            stream.delivered()
        raise
    parsed_request.prompts.clear()  # The prompts' images take much memory.
    parsed_request.media.clear()
    return streams


def submit_options(parsed_request: ParsedRequest, request_id: str) -> SubmitOptions:
    """Return the engine's options for the call."""
    options = SubmitOptions(
        request_id=request_id,
        priority=parsed_request.priority,
        cache_salt=parsed_request.cache_salt,
        tenant=parsed_request.tenant,
        deadline_s=parsed_request.deadline_s,
        thinking_token_budget=parsed_request.thinking_token_budget,
    )
    if parsed_request.adapter:
        options["adapter"] = parsed_request.adapter
    if parsed_request.answer_format.response_format is not None:
        options["response_format"] = parsed_request.answer_format.response_format
    if parsed_request.answer_format.grammar is not None:
        options["grammar"] = parsed_request.answer_format.grammar
    if parsed_request.answer_format.calls is not None:
        options["calls"] = parsed_request.answer_format.calls
    return options
