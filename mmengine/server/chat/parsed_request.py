"""Defines the parsed request, to which the calls of all APIs are converted, and its envelope, which is stored
in the log. Also reads sampling parameters, answer formats and pixel limits from bodies.
"""

import math
import time
from collections.abc import Mapping
from functools import partial
from typing import Literal, NamedTuple

import msgspec

from mmengine.errors import FIELD, HERE, ErrorCode, FieldPath, InvalidRequest, shown
from mmengine.request import MAX_LOGPROBS, MAX_SEED, SamplingParams
from mmengine.serve.prompt.options import make_sampling
from mmengine.serve.prompt.prompt import Prompt
from mmengine.serve.prompt.tools import ToolCallSpec
from mmengine.serve.prompt.vllm_options import as_form
from mmengine.server.chat.answer_boxes import BoxPlan, BoxPlanner
from mmengine.server.chat.bodies import Body
from mmengine.server.chat.response_echo import ResponseEcho
from mmengine.server.http.body_fields import Fields
from mmengine.server.http.errors import ApiError, Json, api_error, decode_body
from mmengine.server.http.field_names import FieldNames
from mmengine.server.http.media_payloads import UploadReference
from mmengine.structured_output.request.fields import LARGE

UsageFrames = Literal["none", "last", "always"]  # Which frames of a stream contain usage.
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_PIXELS = ("min_pixels", "max_pixels", "total_min_pixels", "total_pixels")
_SIDES = ("resized_height", "resized_width")
_SAMPLED = ("top_p", "top_k", "min_p")
_SAME = (
    *("temperature", "top_p", "presence_penalty", "frequency_penalty", "n"),
    *("min_p", "repetition_penalty", "stop_token_ids", "min_tokens", "ignore_eos", "repetition_detection"),
)


class Envelope(msgspec.Struct, frozen=True, omit_defaults=True):
    """Call data that the log stores with the request, so that the answer can be rendered from the log.

    `owner`: the beginning of the API key's digest. A request's id in the log begins with the owner. New
    versions may only add fields with a default, because older logs must stay readable.
    """

    api: str
    created: int  # Unix time in seconds.
    model: str  # The served name in the call.
    owner: str = ""  # "" without API keys.
    key: str = ""  # The Idempotency-Key.
    digest: bytes = b""  # Digest of the route and the body; identifies a repeated call.
    is_stream: bool = False
    usage_frames: UsageFrames = "none"
    place: int = 0  # Index of the prompt in the call.
    num_prompts: int = 1
    traceparent: str = ""
    show_reasoning: bool = True
    responses: ResponseEcho | None = None  # Only for the Responses API.
    custom_id: str = ""  # The client's id for a line in a batch file.
    boxes: BoxPlan | None = None  # Only if the response format has `boxes`.
    is_obfuscated: bool = False  # Whether a stream's events have the field `obfuscation`.


class AnswerFormat(NamedTuple):
    """The answer's format, as arguments for the engine.

    `response_format` and `grammar` are never both set. `place`: the path of the body's field that sets the
    format.
    """

    response_format: Json | None = None
    grammar: Json | None = None
    place: FieldPath = HERE
    # The tools. If tools are set, the format applies only to answers without tool calls.
    calls: ToolCallSpec | None = None
    has_boxes: bool = False  # Whether the client wants the boxes in pixels.

    def __bool__(self) -> bool:
        return any(each is not None for each in (self.response_format, self.grammar, self.calls))


NO_FORMAT = AnswerFormat()


class ParsedRequest(msgspec.Struct, frozen=True):
    """A validated call.

    `ignored`: names of the unknown fields that were ignored. `field_names`: maps the field names of a chat
    body to the field names of the client's API. `media`: maps SHA-256 digests in hex to the media that a
    Responses API call contains as data, for the response store; cleared when the engine has the media.
    """

    prompts: list[Prompt]
    sampling: SamplingParams
    request_id: str
    envelope: Envelope
    stream: bool = False
    usage_frames: UsageFrames = "none"
    logprobs: bool = False
    echo_texts: list[str] = []  # Prompt texts that precede the answers (echo).
    is_prompt_only: bool = False  # The client wants only the prompt, so generated tokens are dropped.
    answer_format: AnswerFormat = NO_FORMAT
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    deadline_s: float = 0.0
    ignored: list[str] = []
    params: frozenset[str] = frozenset()  # Fields of the body that errors may name.
    show_reasoning: bool = True
    thinking_token_budget: int | None = None
    field_names: FieldNames | None = None
    media: dict[str, bytes] = {}
    # References to uploaded files whose bytes are not yet in the prompts.
    uploads: list[UploadReference] = []
    # Set if the call requests boxes and the prompt does not contain the image's bytes yet.
    box_planner: BoxPlanner | None = None
    adapter: str = ""  # Name of the adapter, "" for the base model.

    @property
    def needs_media(self) -> bool:
        """Whether bytes for the prompts or the boxes must still be read."""
        return bool(self.uploads) or self.box_planner is not None


class SamplingDefaults:
    """Default sampling parameters. The defaults come from the checkpoint's generation config or from OpenAI's
    API.
    """

    def __init__(self, generation: Mapping[str, object], kind: str):
        found = {name: generation[name] for name in _DEFAULTS if name in generation} if kind == "auto" else {}
        if kind == "auto" and generation.get("do_sample") is False:
            found = {name: value for name, value in found.items() if name not in _SAMPLED}
            found["temperature"] = 0.0
        self.values = {"temperature": 1.0, **found}


def read_sampling(
    body: Body, defaults: SamplingDefaults, max_tokens: int, logprobs: int | None, fields: Fields
) -> SamplingParams:
    """Return a body's sampling parameters. Raises ApiError."""
    values: dict[str, object] = {**defaults.values, "max_tokens": max_tokens, "logprobs": logprobs}
    for name in _SAME:
        if (value := getattr(body, name)) is not None:
            values[name] = value
    if body.top_k is not None:
        values["top_k"] = max(body.top_k, 0) if body.top_k >= -1 else body.top_k
    if body.seed is not None:
        values["seed"] = body.seed & MAX_SEED
    if body.logit_bias is not None:
        values["logit_bias"] = body.logit_bias
    if body.top_p == 0:  # OpenAI's API allows 0, which means that only the most likely token can be sampled.
        values |= {"temperature": 0.0, "top_p": 1.0}
    values["stop"] = stop = (
        (body.stop,) if body.stop and isinstance(body.stop, str) else tuple(body.stop or ())
    )
    if "" in stop:
        text = f"{FIELD} has an empty text, which would end every answer; leave the empty text out"
        raise ApiError(ErrorCode.INVALID_VALUE, text, FieldPath("stop"))
    try:
        return make_sampling(values)
    except InvalidRequest as error:
        raise api_error(error, fields.names) from None


def read_stream_options(body: Body) -> tuple[bool, UsageFrames]:
    """Return whether the answer is streamed, and which frames contain usage. Raises ApiError."""
    stream, options = bool(body.stream), body.stream_options
    if options is not None and not stream:
        raise ApiError(ErrorCode.INVALID_VALUE, f"{FIELD} requires stream=true", FieldPath("stream_options"))
    if options is None or not options.include_usage:
        if options is not None and options.continuous_usage_stats:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"{FIELD} requires include_usage=true",
                FieldPath("stream_options", "continuous_usage_stats"),
            )
        return stream, "none"
    return stream, "always" if options.continuous_usage_stats else "last"


def read_answer_format(body: Body, max_bytes: int) -> AnswerFormat:
    """Return a body's answer format. `max_bytes`: limit for the JSON text of the format. Raises ApiError."""
    answer_format: Json | None = None
    has_boxes = False
    for name in ("response_format", "structured_outputs"):
        given: dict[str, msgspec.Raw] | None = getattr(body, name)
        if given is not None and sum(map(len, given.values())) > max_bytes:
            text = f"{FIELD} has more than {max_bytes:,} bytes (max_schema_bytes); send a smaller schema"
            raise ApiError(ErrorCode.INVALID_VALUE, text, name)
    if body.response_format is not None:
        answer_format = decode_body(body.response_format, partial(_decoded, held="json_schema"))
        has_boxes = _flag("boxes", answer_format)
        if answer_format == {"type": "text"} and not has_boxes:
            answer_format = None
    structured: Json = {}
    if body.structured_outputs is not None:
        structured = decode_body(body.structured_outputs, partial(_decoded, schema="json"))
    if not structured:
        place = FieldPath("response_format")
        if has_json_schema(answer_format):
            place = place / "json_schema" / "schema"
        return (
            NO_FORMAT if answer_format is None else AnswerFormat(answer_format, None, place, None, has_boxes)
        )
    if answer_format is not None:
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            f"{FIELD} and response_format exclude each other; set one of them",
            FieldPath("structured_outputs"),
        )
    try:
        place = FieldPath("structured_outputs", next(iter(structured)))
        return AnswerFormat(*as_form({"structured_outputs": structured}), place)
    except InvalidRequest as error:
        raise ApiError(ErrorCode.INVALID_STRUCTURED_OUTPUTS, error.text, error.path) from None


def _flag(name: str, response_format: Json) -> bool:
    """Remove the boolean field `name` from a response format, and return its value (default: False). Raises
    ApiError.
    """
    value = response_format.pop(name, False)
    if not isinstance(value, bool):
        text = f"{FIELD} must be true or false, not {shown(value)}"
        raise ApiError(ErrorCode.INVALID_VALUE, text, FieldPath("response_format", name))
    return value


def build_request(
    api: str,
    body: Body,
    prompts: list[Prompt],
    sampling: SamplingParams,
    answer_format: AnswerFormat,
    request_id: str,
    ignored: list[str],
    fields: Fields,
) -> ParsedRequest:
    """Return the request for a chat or completion body. `request_id` is used unless the body has a
    request_id. Raises ApiError.
    """
    stream, usage_frames = read_stream_options(body)
    envelope = Envelope(
        api,
        int(time.time()),
        body.model or "",
        is_stream=stream,
        usage_frames=usage_frames,
        is_obfuscated=body.stream_options is not None and bool(body.stream_options.include_obfuscation),
    )
    return ParsedRequest(
        prompts,
        sampling,
        body.request_id or request_id,
        envelope,
        stream,
        usage_frames,
        answer_format=answer_format,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        deadline_s=body.deadline_s or 0.0,
        ignored=ignored,
        params=fields.names,
    )


def _decoded(given: Mapping[str, msgspec.Raw], held: str = "", schema: str = "") -> Json:
    """Decode the values of an object, and omit nulls.

    `schema`: name of a field whose value stays encoded if it is a large object. `held`: name of an object
    whose field "schema" also stays encoded if it is a large object. Decoding 1 MB of small objects would hold
    the interpreter lock for 10 ms.
    """
    values: Json = {}
    for name, raw in given.items():
        is_object = bytes(memoryview(raw)[:1]) == b"{"
        if name == schema and is_object and len(raw) > LARGE:
            values[name] = bytes(raw)
        elif name == held and is_object:
            inner = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
            values[name] = _decoded(inner, schema="schema")
        else:
            values[name] = msgspec.json.decode(raw)
    return without_nulls(values)


def has_json_schema(answer_format: Json | None) -> bool:
    return answer_format is not None and answer_format.get("type") == "json_schema"


def without_nulls(given: Mapping[str, object]) -> Json:
    return {name: value for name, value in given.items() if value is not None}


def item_options(given: Mapping[str, object] | None, max_pixels: int) -> Json:
    """Return the media options for all media of a prompt, clamped to the server's limits. Raises ApiError."""
    options = without_nulls(given or {})
    for name in ("local_files", "video_metadata", "images_kwargs", "videos_kwargs", "size", "urls"):
        if name in options:
            raise ApiError(
                ErrorCode.UNSUPPORTED_FIELD,
                f"{FIELD} is not supported; set min_pixels and max_pixels instead",
                FieldPath("mm_processor_kwargs", name),
            )
    return {**clamp_pixels(FieldPath("mm_processor_kwargs"), options, max_pixels), "local_files": False}


def clamp_pixels(where: FieldPath, options: Json, max_pixels: int) -> Json:
    """Change `options` so that no image or video frame exceeds `max_pixels`, and return `options`.

    Pixel counts are clamped. An explicit size beyond the limit raises ApiError. The processor checks all
    other options.
    """
    for name in _PIXELS:
        value = options.get(name)
        if isinstance(value, (int, float)) and value > max_pixels:  # The number 1e9 in JSON is a float.
            options[name] = max_pixels
    edge = options.get("longest_edge")
    if isinstance(edge, (int, float)) and edge * edge > max_pixels:
        options["longest_edge"] = math.isqrt(max_pixels)
    if options.get("do_resize") is False:
        text = f"{FIELD}=false is not supported; set max_pixels instead"
        raise ApiError(ErrorCode.UNSUPPORTED_FIELD, text, where / "do_resize")
    height, width = (options.get(name) for name in _SIDES)
    if (height is None) != (width is None):
        raise ApiError(
            ErrorCode.INVALID_VALUE, f"{FIELD}: set both resized_height and resized_width, or neither", where
        )
    if isinstance(height, (int, float)) and isinstance(width, (int, float)) and height * width > max_pixels:
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            f"{FIELD} times resized_width exceeds the limit of {max_pixels} pixels (max_pixels)",
            where / "resized_height",
        )
    return options


def check_logprobs(name: str, value: int | None) -> None:
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        raise ApiError(ErrorCode.INVALID_VALUE, f"{FIELD} must be 0 to {MAX_LOGPROBS}, not {value}", name)
