"""Declares the request and response bodies of /v1/sessions, and converts appended content and questions to
chat bodies.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from mmengine.errors import ErrorCode, FieldPath
from mmengine.serve.requests.sessions import IDLE_S, SessionFacts
from mmengine.server.chat.parsed_request import Json
from mmengine.server.http.body_fields import Field, Fields
from mmengine.server.http.errors import ApiError, decode_body

# Maximum number of answer tokens if the call sets no limit. A session reserves space for the answer.
DEFAULT_ANSWER = 256
SHORTEST_IDLE_S = 0.1  # A shorter time would be rounded to 0, which means no time limit.
Index = Annotated[int, Meta(ge=0)]
Content = str | list[Json]


class SessionBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A body for a call that opens a session.

    `length`: maximum number of tokens. Beyond `length`, older content is dropped, and at most `keep` tokens
    remain. `anchor`: content at the beginning that is never dropped. `idle_s`: seconds without a call after
    which the session is closed.
    """

    model: str | None = None
    system: str = ""
    length: Annotated[int, Meta(ge=0)] = 0
    keep: Annotated[int, Meta(ge=0)] = 0
    idle_s: Annotated[float, Meta(ge=SHORTEST_IDLE_S)] = IDLE_S
    anchor: Content | None = None
    cache_salt: str = ""
    mm_processor_kwargs: Json = {}
    chat_template_kwargs: Json = {}


class AppendBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A body for a call that appends content. `index`: the number of requests in the session before this
    call. A repeated call with the same index appends nothing.
    """

    content: Content
    index: Index | None = None


class AskBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body for a question. Chat fields are allowed, too, except the fields in REFUSED_IN_SESSIONS."""

    content: Content
    index: Index | None = None


class FrameBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body with a video frame. `image`: a data: URL."""

    image: str
    seconds: Annotated[float, Meta(ge=0)]
    index: Index | None = None


_OPENED = "set this field when the session is opened, at /v1/sessions"
_TOOLS = "a session calls no tools; use /v1/chat/completions"
_WRITES = "each question and each answer is a turn of its own"
# Chat fields that the session itself determines, or does not support.
REFUSED_IN_SESSIONS = Fields(
    (
        Field("messages", "refused", "the session has the messages; send content"),
        Field("n", "refused", "a session has one answer at a time", (1,)),
        Field("tools", "refused", _TOOLS, ([],)),
        Field("tool_choice", "refused", _TOOLS, ("none",)),
        Field("parallel_tool_calls", "refused", _TOOLS, (True, False)),
        Field("chat_template_kwargs", "refused", _OPENED, ({},)),
        Field("mm_processor_kwargs", "refused", _OPENED, ({},)),
        Field("cache_salt", "refused", _OPENED, ("",)),
        Field("continue_final_message", "refused", _WRITES, (False,)),
        Field("add_generation_prompt", "refused", _WRITES, (True,)),
        Field(
            "request_id",
            "refused",
            "a session chooses the ids of its requests; send the header X-Request-Id instead",
            ("",),
        ),
    )
)


class SessionObject(msgspec.Struct, frozen=True, kw_only=True):
    """A session in the API's responses. `requests`: the number of requests so far, which is the next call's
    index. `cached_tokens`: how many tokens of the session up to and including this call's content were
    cached; None if the call computed nothing. `frames_held`: the number of video frames that wait until the
    encoder can process several frames together.
    """

    id: str
    object: str = "session"
    created: int = 0
    model: str = ""
    requests: int = 0
    tokens: int = 0
    media: int = 0
    kept_tokens: int = 0  # Number of tokens in the session's KV blocks.
    length: int = 0
    cached_tokens: int | None = None
    frames_held: int = 0


class SessionObjects(msgspec.Struct, frozen=True):
    data: list[SessionObject]
    object: str = "list"


class SessionDeleted(msgspec.Struct, frozen=True):
    id: str
    object: str = "session.deleted"
    deleted: bool = True


class StoredSession(msgspec.Struct, frozen=True):
    """A session's owner and options in the log."""

    owner: str = ""
    created: int = 0
    model: str = ""
    media: Json = {}


decode_session = msgspec.json.Decoder(SessionBody).decode
decode_frame = msgspec.json.Decoder(FrameBody).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_ask = msgspec.json.Decoder(AskBody).decode
_decode_append = msgspec.json.Decoder(AppendBody).decode
_BUDGETS = ("max_tokens", "max_completion_tokens")


def as_chat_body(data: bytes, *, asks: bool) -> tuple[bytes, int | None]:
    """Convert the body of …/append or …/ask to a /v1/chat/completions body with a single message. Return the
    chat body and the call's `index`. `asks`: whether the route is …/ask. Raises ApiError.
    """
    given: AppendBody | AskBody | None = None if asks else decode_body(data, _decode_append)
    fields = decode_body(data, _decode_fields)
    REFUSED_IN_SESSIONS.check_given(fields, ignore_unknown=True)
    if "content" not in fields:
        raise ApiError(
            ErrorCode.INVALID_VALUE, "content is missing: a text, or parts of a message", FieldPath("content")
        )
    given = given or decode_body(data, _decode_ask)
    content = fields.pop("content")
    fields.pop("index", None)
    body: dict[str, object] = dict(fields)
    if not any(name in fields and bytes(fields[name]) != b"null" for name in _BUDGETS):
        body["max_tokens"] = DEFAULT_ANSWER
    body["messages"] = [{"role": "user", "content": content}]
    return msgspec.json.encode(body), given.index


def content_as_chat_body(content: Content) -> bytes:
    return msgspec.json.encode({"messages": [{"role": "user", "content": content}]})


def stored_session_of(facts: SessionFacts) -> StoredSession:
    """Return the stored owner and options. For a session that was not opened through the API, the owner
    matches no API key.
    """
    try:
        return msgspec.json.decode(facts.settings.envelope, type=StoredSession)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return StoredSession(owner="\0")


def object_of(
    facts: SessionFacts, name: str, cached_tokens: int | None = None, frames_held: int = 0
) -> SessionObject:
    kept = stored_session_of(facts)
    return SessionObject(
        id=name,
        created=kept.created,
        model=kept.model,
        requests=facts.num_requests,
        tokens=facts.num_tokens,
        media=facts.num_media,
        kept_tokens=facts.num_leased_tokens,
        length=facts.settings.length,
        cached_tokens=cached_tokens,
        frames_held=frames_held,
    )
