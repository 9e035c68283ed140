"""Handlers for /v1/files. The routes handle both uploaded files and files that batches wrote."""

import asyncio
import time
from collections import Counter

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.types import ASGIApp

from mmengine.errors import FIELD, ErrorCode, FieldPath, MMEngineError, QueueFull
from mmengine.server.chat.parsed_request import Json
from mmengine.server.chat.uploaded_images import IMAGE_PURPOSES, no_file
from mmengine.server.http.admission import OWNER, Admission
from mmengine.server.http.errors import ApiError, ClientLeft, api_error
from mmengine.server.http.pagination import page
from mmengine.server.storage.files import MAX_SHOWN, StoredFile
from mmengine.server.storage.storage import Storage
from mmengine.server.storage.uploads import Upload

MAX_UPLOADS = 16  # Maximum number of concurrent uploads of all API keys together.
PURPOSES = ("batch", *IMAGE_PURPOSES)
MIN_EXPIRES_S, MAX_EXPIRES_S = 3600, 30 * 86400  # OpenAI's limits.
_PIECE = 2**20  # Bytes of the body that must arrive in every period of body_timeout_s.
_SHOWN = 1000  # Number of files in a list if the call sets no limit.


class FileRoutes:
    def __init__(self, storage: Storage, admission: Admission, body_timeout_s: float):
        self._files, self._batches = storage.files, storage.batches
        self._admission, self._timeout_s = admission, body_timeout_s
        self._uploads: Counter[str] = Counter()  # Maps an owner to the number of its uploads in progress.

    async def create(self, request: Request) -> ASGIApp:
        if (why := self._admission.draining()) is not None:
            raise why
        owner = request.scope[OWNER]
        most = MAX_UPLOADS // 2 if self._admission.has_several_keys else MAX_UPLOADS
        if self._uploads[owner] >= most or self._uploads.total() >= MAX_UPLOADS:
            raise ApiError(
                ErrorCode.UPLOADS_FULL,
                f"at most {most} uploads may run for an API key, and {MAX_UPLOADS} in all; try again later",
                headers={"retry-after": "1", "connection": "close"},
            )
        self._uploads[owner] += 1
        try:
            return _json(shown_file(await self._upload(request)))
        finally:
            self._uploads[owner] -= 1
            if not self._uploads[owner]:
                del self._uploads[owner]

    async def _upload(self, request: Request) -> StoredFile:
        owner, loop, files = request.scope[OWNER], asyncio.get_running_loop(), self._files
        upload: Upload | None = None
        try:
            incoming = files.incoming(owner)
            upload = Upload(request.headers.get("content-type", ""), incoming)
            await self._receive(request, upload)
            upload.check()
            purpose, expires_s = _read_fields(upload.fields)
            await loop.run_in_executor(files.threads, incoming.finish)
            file = await files.add(incoming, upload.filename or "", purpose, expires_s)
            incoming.release()
            return file
        except BaseException as error:
            if upload is not None:
                await asyncio.shield(loop.run_in_executor(files.threads, upload.incoming.discard))
            raise _upload_error(error) from None

    async def _receive(self, request: Request, upload: Upload) -> None:
        """Write the body to disk. Raises ApiError if the body arrives more slowly than _PIECE bytes per
        body_timeout_s.
        """
        loop, begun, num_bytes = asyncio.get_running_loop(), time.monotonic(), 0
        while True:
            left_s = begun + self._timeout_s * (1 + num_bytes // _PIECE) - time.monotonic()
            try:
                message = await asyncio.wait_for(request.receive(), max(left_s, 0.001))
            except TimeoutError:
                raise ApiError(
                    ErrorCode.BODY_TIMEOUT,
                    f"fewer than {_PIECE} bytes of the file arrived within {self._timeout_s:g} seconds "
                    "(body_timeout_s)",
                    headers={"connection": "close"},
                ) from None
            if message["type"] == "http.disconnect":
                raise ClientLeft
            body = message.get("body", b"")
            num_bytes += len(body)
            await loop.run_in_executor(self._files.threads, upload.feed, body)
            if not message.get("more_body", False):
                return

    async def list_files(self, request: Request) -> ASGIApp:
        purpose = request.query_params.get("purpose")
        owner = request.scope[OWNER]

        def made() -> bytes:
            found = [file for file in self._files.of_owner(owner) if purpose in (None, "", file.purpose)]
            return msgspec.json.encode(
                page(
                    request,
                    found,
                    lambda it: it.file_id,
                    shown_file,
                    max_limit=MAX_SHOWN,
                    default_limit=_SHOWN,
                    position_of=lambda name: self._files.places.of(name, owner),
                )
            )

        return Response(await asyncio.to_thread(made), media_type="application/json")

    async def get(self, request: Request) -> ASGIApp:
        return _json(shown_file(self._file(request)))

    async def content(self, request: Request) -> ASGIApp:
        file = self._file(request)
        return FileResponse(
            self._files.path(file.file_id), media_type="application/octet-stream", filename=file.filename
        )

    async def delete(self, request: Request) -> ASGIApp:
        file = self._file(request)
        if file.file_id in self._batches.inputs():
            raise ApiError(
                ErrorCode.FILE_IN_USE,
                "a running batch reads this file; cancel the batch first",
                FieldPath("file_id"),
            )
        try:
            await self._files.delete(file.file_id, file.owner)
        except MMEngineError as error:
            raise api_error(error) from None
        return _json({"id": file.file_id, "object": "file", "deleted": True})

    def _file(self, request: Request) -> StoredFile:
        name = request.path_params["file_id"]
        file = self._files.get(name, request.scope[OWNER])
        if file is None:
            raise no_file(name)
        return file


def shown_file(file: StoredFile) -> Json:
    return {
        "id": file.file_id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created,
        "expires_at": file.expires_at or None,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def _read_fields(fields: dict[str, str]) -> tuple[str, int]:
    """Return an upload's purpose, and the seconds until the file expires (0: never). Raises ApiError."""
    purpose = fields.get("purpose", "")
    if purpose not in PURPOSES:
        raise ApiError(
            ErrorCode.INVALID_VALUE, f"purpose must be one of {', '.join(PURPOSES)}", FieldPath("purpose")
        )
    anchor, seconds = (fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    if anchor is None and seconds is None:
        return purpose, 0
    number = int(seconds) if seconds and seconds.isascii() and seconds.isdigit() else None
    return purpose, expires_after(anchor, number)


EXPIRES_AFTER = FieldPath("expires_after")


def expires_after(anchor: str | None, seconds: int | None, where: FieldPath = EXPIRES_AFTER) -> int:
    """Return the number of seconds after which a file expires. `where`: the field's path for error
    messages. Raises ApiError.
    """
    if anchor != "created_at":
        raise ApiError(ErrorCode.INVALID_VALUE, f"{FIELD} must be created_at", where / "anchor")
    if seconds is None or not MIN_EXPIRES_S <= seconds <= MAX_EXPIRES_S:
        text = f"{FIELD} must be {MIN_EXPIRES_S} to {MAX_EXPIRES_S}"
        raise ApiError(ErrorCode.INVALID_VALUE, text, where / "seconds")
    return seconds


def _upload_error(error: BaseException) -> BaseException:
    """Return the error for the client. After a failed upload, the server closes the connection."""
    if isinstance(error, (ApiError, ClientLeft)) or not isinstance(error, MMEngineError):
        return error
    found = api_error(error)
    code = ErrorCode.FILES_FULL if isinstance(error, QueueFull) else error.code
    path = "" if found.status == 503 else "file"
    return ApiError(code, str(error), path, headers={**found.headers, "connection": "close"})


def _json(value: Json) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
