"""Handlers for /v1/batches. A batch is a file with requests, which run beside live calls and survive a server
restart.
"""

import asyncio
import re
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from mmengine.errors import ErrorCode, FieldPath, MMEngineError
from mmengine.server.answers.request_readers import LINE_ENDPOINTS
from mmengine.server.batches.file_routes import expires_after
from mmengine.server.batches.pooled_lines import POOLED_ENDPOINTS
from mmengine.server.batches.runner import BatchRunner
from mmengine.server.calls.call_identity import (
    IDEMPOTENCY_KEY,
    Key,
    digest_of,
    key_in_use,
    key_of,
    key_reused,
    tries_again,
)
from mmengine.server.chat.parsed_request import Json
from mmengine.server.chat.uploaded_images import no_file
from mmengine.server.http.admission import OWNER, Admission
from mmengine.server.http.errors import ApiError, api_error, decode_body
from mmengine.server.http.pagination import page
from mmengine.server.storage.batches import Batch
from mmengine.server.storage.storage import Storage

MAX_METADATA = 16  # Maximum number of entries in metadata.
MAX_WINDOW_S = 14 * 86400
MAX_PAGE = 100  # Maximum number of batches in a list.
_SHOWN = 20  # Number of batches in a list if the call sets no limit.
_WINDOW = re.compile(r"([1-9][0-9]{0,7})([smhd])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_AT = (
    *("in_progress_at", "finalizing_at", "completed_at", "failed_at"),
    *("expired_at", "cancelling_at", "cancelled_at"),
)


class ExpiresAfter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    anchor: str
    seconds: int


class BatchBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: (
        Annotated[
            dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
            Meta(max_length=MAX_METADATA),
        ]
        | None
    ) = None
    output_expires_after: ExpiresAfter | None = None


_decode = msgspec.json.Decoder(BatchBody).decode


class BatchRoutes:
    """Handlers for /v1/batches. `reattach_s`: seconds in which a retried call gets the batch from its first
    try.
    """

    def __init__(self, storage: Storage, runner: BatchRunner, admission: Admission, reattach_s: float):
        self._storage, self._runner, self._admission = storage, runner, admission
        self._reattach_s = reattach_s
        self._creating: set[Key] = set()

    async def create(self, request: Request) -> ASGIApp:
        owner = request.scope[OWNER]
        if (why := self._admission.draining()) is not None:
            raise why
        key = key_of(request)
        place = owner, IDEMPOTENCY_KEY, key
        with self._admission.reserve(owner) as reservation:
            data = b"".join(await self._admission.bodies.read(request.scope, request.receive, reservation))
            body, digest = await asyncio.to_thread(
                lambda: (decode_body(data, _decode), digest_of(request, data))
            )
        if place in self._creating:
            raise key_in_use(place)
        batch = self._created(request, owner, key, digest)
        if batch is None:
            batch = self._new_batch(body, owner, key, digest)
            if key:
                self._creating.add(place)
            try:
                await self._runner.create(batch)
            except MMEngineError as error:
                raise api_error(error) from None
            finally:
                self._creating.discard(place)
        elif batch.digest != digest:
            raise key_reused(place)
        return _json(shown_batch(batch))

    def _created(self, request: Request, owner: str, key: str, digest: bytes) -> Batch | None:
        """Return the batch that an earlier try of the same call created, or None.

        The Idempotency-Key identifies the call. Without a key, the call's digest identifies the call, but
        only if a header marks the call as a retry and the batch is at most `reattach_s` seconds old.
        """
        batches = self._storage.batches
        if key:
            return batches.created_by(owner, key)
        since = self._storage.clock() - self._reattach_s
        return batches.created_alike(owner, digest, since) if tries_again(request) else None

    def _new_batch(self, body: BatchBody, owner: str, key: str, digest: bytes) -> Batch:
        """Check a body's fields, and return a new batch. Raises ApiError."""
        file = self._storage.files.get(body.input_file_id, owner)
        if file is None:
            raise no_file(body.input_file_id, "input_file_id")
        if file.purpose != "batch":
            text = f"the file's purpose is {file.purpose}; upload the file with the purpose batch"
            raise ApiError(ErrorCode.INVALID_VALUE, text, FieldPath("input_file_id"))
        if body.endpoint not in (known := (*LINE_ENDPOINTS, *POOLED_ENDPOINTS)):
            text = f"endpoint must be one of {', '.join(known)}"
            raise ApiError(ErrorCode.INVALID_VALUE, text, FieldPath("endpoint"))
        expires, expires_s = body.output_expires_after, 0
        if expires is not None:
            expires_s = expires_after(expires.anchor, expires.seconds, FieldPath("output_expires_after"))
        now = int(self._storage.clock())
        return Batch(
            batch_id=self._storage.batches.new_id(),
            owner=owner,
            endpoint=body.endpoint,
            input_file_id=file.file_id,
            completion_window=body.completion_window,
            created=now,
            expires_at=now + _seconds(body.completion_window),
            metadata=body.metadata,
            output_expires_s=expires_s,
            key=key,
            digest=digest,
        )

    async def list_batches(self, request: Request) -> ASGIApp:
        owner, batches = request.scope[OWNER], self._storage.batches
        return _json(
            page(
                request,
                batches.of_owner(owner),
                lambda it: it.batch_id,
                shown_batch,
                max_limit=MAX_PAGE,
                default_limit=_SHOWN,
                position_of=lambda name: batches.places.of(name, owner),
            )
        )

    async def get(self, request: Request) -> ASGIApp:
        return _json(shown_batch(self._batch(request)))

    async def cancel(self, request: Request) -> ASGIApp:
        batch = self._batch(request)
        try:
            await self._runner.cancel(batch.batch_id)
        except MMEngineError as error:
            raise api_error(error) from None
        return _json(shown_batch(self._batch(request)))

    def _batch(self, request: Request) -> Batch:
        name = request.path_params["batch_id"]
        batch = self._storage.batches.get(name, request.scope[OWNER])
        if batch is None:
            raise ApiError(
                ErrorCode.BATCH_NOT_FOUND, f"there is no batch {name[:64]!r}", FieldPath("batch_id")
            )
        return batch


def shown_batch(batch: Batch) -> Json:
    times: Mapping[str, int | None] = {name: batch.at.get(name) for name in _AT}
    errors = [
        {"code": each.code, "message": each.message, "line": each.line, "param": each.param}
        for each in batch.errors
    ]
    counts = batch.counts
    return {
        "id": batch.batch_id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id or None,
        "error_file_id": batch.error_file_id or None,
        "created_at": batch.created,
        "expires_at": batch.expires_at,
        **times,
        "request_counts": {"total": counts.total, "completed": counts.completed, "failed": counts.failed},
        "metadata": batch.metadata,
    }


def _seconds(window: str) -> int:
    """Return a completion window in seconds. Raises ApiError for an invalid window."""
    found = _WINDOW.fullmatch(window)
    seconds = int(found[1]) * _UNITS[found[2]] if found is not None else 0
    if not 1 <= seconds <= MAX_WINDOW_S:
        text = "completion_window must be at most 14 days, in a form such as 24h, 30m or 90s"
        raise ApiError(ErrorCode.INVALID_VALUE, text, FieldPath("completion_window"))
    return seconds


def _json(value: Json) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
