"""A call becomes requests of the engine, one for each prompt."""

from collections.abc import Mapping

import msgspec

from mmengine.serve.async_engine.served_engine import ServedEngine
from mmengine.serve.prompt.options import SubmitOptions
from mmengine.serve.requests.recovered_requests import UnclaimedRequest
from mmengine.serve.stream.request_stream import Stream
from mmengine.server.chat.parsed_request import Asked, Envelope

_encode = msgspec.json.Encoder().encode


def in_log(owner: str, name: str) -> str:
    """An id as the log and the store have it: behind its owner's, so that those of two keys never meet."""
    return f"{owner}:{name}" if owner else name


def log_id(envelope: Envelope, request_id: str, place: int) -> str:
    """By which the log knows the prompt at this place of a call."""
    name = f"{request_id}-{place}" if envelope.num_prompts > 1 else request_id
    return in_log(envelope.owner, name)


def ask(
    engine: ServedEngine,
    asked: Asked,
    *,
    hold: bool = False,
    left: Mapping[int, UnclaimedRequest] | None = None,
) -> list[Stream]:
    """A stream for each prompt; `hold` as for `AsyncEngine.stream`. `left`: those that the process before has
    begun, by their places, which go on. Raises InvalidRequest, QueueFull; nothing runs then."""
    streams: list[Stream] = []
    envelope, several = asked.envelope, len(asked.prompts)
    try:
        for place, prompt in enumerate(asked.prompts):
            if left is not None and place in left:
                streams.append(engine.attach(left[place].request_id, hold=hold))
                continue
            if several > 1:
                envelope = msgspec.structs.replace(envelope, num_prompts=several, place=place)
            options = options_of(asked, log_id(envelope, asked.request_id, place))
            options["envelope"] = _encode(envelope)
            streams.append(engine.stream(prompt, asked.sampling, hold=hold, **options))
    except BaseException:
        for stream in streams:
            stream.cancel()
            stream.delivered()
        raise
    asked.prompts.clear()  # images in it are large, and the engine has them
    asked.media.clear()
    return streams


def options_of(asked: Asked, request_id: str) -> SubmitOptions:
    options = SubmitOptions(
        request_id=request_id,
        priority=asked.priority,
        cache_salt=asked.cache_salt,
        deadline_s=asked.deadline_s,
        thinking_token_budget=asked.thinking_token_budget,
    )
    if asked.adapter:
        options["adapter"] = asked.adapter
    if asked.form.response_format is not None:
        options["response_format"] = asked.form.response_format
    if asked.form.grammar is not None:
        options["grammar"] = asked.form.grammar
    if asked.form.calls is not None:
        options["calls"] = asked.form.calls
    return options
