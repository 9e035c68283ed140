"""The stored responses of the Responses API, with their inputs. A later call can continue a stored response's
conversation. The store is a database next to the log. An envelope is a call's data in the log.
"""

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

import msgspec

from mmengine.errors import CorruptLog
from mmengine.serve.stream.stored_answer import StoredAnswer
from mmengine.server.calls.call_identity import ITS_ID, Key
from mmengine.server.chat.parsed_request import Envelope
from mmengine.server.chat.submission import log_request_id, prompt_request_id
from mmengine.server.storage.answer_store import AnswerRow, AnswerStore

# Bytes. A larger envelope's input is written to the store instead of the log.
LARGE_ENVELOPE = 2**18
# Bytes. An envelope with at most this many bytes of input is certainly below LARGE_ENVELOPE.
_SMALL_INPUT = LARGE_ENVELOPE // 2
_JSON_BYTES = 6  # Maximum number of JSON bytes per character, as in \u0000.
_encode, _pack = msgspec.json.encode, msgspec.msgpack.encode
_decode_envelope = msgspec.json.Decoder(Envelope).decode
_decode_whole = msgspec.msgpack.Decoder(StoredAnswer).decode


class StoredResponse(NamedTuple):
    """A stored response. `answer` is None while the response is unfinished."""

    request_id: str
    envelope: Envelope
    answer: StoredAnswer | None


class FinishedResponse(NamedTuple):
    """A finished response. `logged_envelope`: the encoded envelope from the log."""

    envelope: Envelope
    request_id: str
    logged_envelope: bytes
    answer: StoredAnswer


class StoredResponses:
    """The stored responses. A response is identified by its owner and request id. All methods may raise
    AnswerStore's errors.
    """

    def __init__(self, store: AnswerStore):
        self._store = store
        # Log ids of the responses that the previous process left unfinished.
        self.begun_before = store.begun_before

    def fits_log(self, envelope: Envelope, media: Mapping[str, bytes]) -> bool:
        """Whether the input certainly fits into the log, so that `begin` stores nothing."""
        if media:
            return False
        if (echo := envelope.responses) is None:
            return True
        texts = len(echo.instructions or "") * _JSON_BYTES
        others = len(echo.input) + len(echo.tools) + len(echo.text) + len(echo.tool_choice)
        return texts + others <= _SMALL_INPUT

    async def begin(self, envelope: Envelope, request_id: str, media: Mapping[str, bytes]) -> Envelope:
        """Store a response's input if it has media or is too large for the log. Return the envelope for the
        log.
        """
        if self.fits_log(envelope, media):
            return envelope
        data = _encode(envelope)
        if not media and len(data) <= LARGE_ENVELOPE:
            return envelope
        name = prompt_request_id(envelope, request_id, 0)
        await self._store.begin(name, envelope.owner, envelope.created, data, media, envelope.key)
        if len(data) <= LARGE_ENVELOPE:
            return envelope
        assert envelope.responses is not None
        logged_envelope = msgspec.structs.replace(envelope.responses, input=msgspec.Raw(b"[]"), is_begun=True)
        return msgspec.structs.replace(envelope, responses=logged_envelope)

    async def delete_refused(self, envelope: Envelope, request_id: str) -> None:
        """Delete a refused response's input."""
        await self._store.delete(prompt_request_id(envelope, request_id, 0), envelope.owner)

    async def put_all(self, some: Sequence[FinishedResponse]) -> None:
        """Store finished responses. Returns when the responses are durable on disk."""
        await self._store.put_all(lambda: [_as_kept(*each) for each in some])

    async def drop_unlogged(self, logged_ids: Container[str]) -> None:
        """Delete the previous process's unfinished responses whose ids are not in `logged_ids`, the log's
        request ids.
        """
        if names := [name for name in self.begun_before if name not in logged_ids]:
            await self._store.drop_unfinished(names)

    async def get(self, owner: str, request_id: str) -> StoredResponse | None:
        """Return the response, or None if the owner has no response with this id. Raises CorruptLog if the
        response cannot be decoded.
        """
        return _read(await self._store.get(log_request_id(owner, request_id), owner))

    async def of(self, key: Key) -> StoredResponse | None:
        """Return the response that an earlier call with this key created, or None."""
        owner, kind, name = key
        return await self.get(owner, name) if kind == ITS_ID else _read(await self._store.of_key(name, owner))

    async def delete(self, owner: str, request_id: str) -> bool:
        """Delete a response and return whether the response existed."""
        return await self._store.delete(log_request_id(owner, request_id), owner)

    async def media(self, sha: str) -> bytes | None:
        return await self._store.media(sha)


def _read(kept: AnswerRow | None) -> StoredResponse | None:
    if kept is None:
        return None
    request_id = kept.response_id.removeprefix(log_request_id(kept.owner, ""))
    try:
        answer = None if kept.answer is None else _decode_whole(kept.answer)
        return StoredResponse(request_id, _decode_envelope(kept.envelope), answer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptLog(f"response {request_id} in the store cannot be read: {error}") from None


def _as_kept(envelope: Envelope, request_id: str, logged_envelope: bytes, answer: StoredAnswer) -> AnswerRow:
    is_begun = envelope.responses is not None and envelope.responses.is_begun
    name = prompt_request_id(envelope, request_id, 0)
    mine = name, envelope.owner, envelope.created, logged_envelope, _pack(answer)
    return AnswerRow(*mine, key=envelope.key, keeps_envelope=is_begun)
