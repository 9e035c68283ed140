"""Reads uploaded images into prompts. Messages refer to an uploaded image by the id of its file."""

import asyncio
from collections.abc import Callable

from mmengine.errors import FIELD, ErrorCode, FieldPath, MMEngineError
from mmengine.server.chat.parsed_request import ParsedRequest
from mmengine.server.http.errors import ApiError, api_error
from mmengine.server.storage.files import Files, StoredFile

IMAGE_PURPOSES = ("vision", "user_data")


def no_file(name: str, path: str | FieldPath = "file_id") -> ApiError:
    return ApiError(ErrorCode.FILE_NOT_FOUND, f"there is no file {name[:64]!r}", path)


class UploadedImages:
    """Reads uploaded images into prompts.

    `files`: the stored files, or None for a server without a log. `max_bytes`: maximum size of an image.
    `max_files`: maximum number of uploaded images in a call.
    """

    def __init__(self, files: Files | None, max_bytes: int, max_files: int):
        self._files, self._max_bytes, self._max_files = files, max_bytes, max_files

    async def fill(
        self, parsed_request: ParsedRequest, add: Callable[[int], None] = lambda count: None
    ) -> None:
        """Read the request's uploaded images into its prompts.

        `add` is called with the total number of bytes before any file is read. `add` may raise ApiError.
        Raises ApiError for a file that is missing or unsuitable.
        """
        if not parsed_request.uploads:
            return
        if self._files is None:
            where = parsed_request.uploads[0].where
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"{FIELD} names an uploaded file, and this server stores no files: start it with --log",
                where,
            )
        if len(parsed_request.uploads) > self._max_files:
            text = f"a call may name at most {self._max_files} uploaded files (max_media_urls)"
            raise ApiError(ErrorCode.INVALID_VALUE, text, parsed_request.uploads[self._max_files].where)
        owner = parsed_request.envelope.owner
        found = {
            each.file_id: self._image(self._files, each.file_id, owner, each.where)
            for each in parsed_request.uploads
        }
        add(sum(file.num_bytes for file in found.values()))
        loop = asyncio.get_running_loop()
        for name, file in found.items():
            try:
                data = await loop.run_in_executor(self._files.threads, self._files.read, file)
            except MMEngineError as error:
                raise api_error(error) from None
            for each in parsed_request.uploads:
                if each.file_id == name:
                    each.part["url"] = data
        parsed_request.uploads.clear()

    def _image(self, files: Files, file_id: str, owner: str, where: FieldPath) -> StoredFile:
        file = files.get(file_id, owner)
        if file is None:
            raise no_file(file_id, where)
        if file.purpose not in IMAGE_PURPOSES:
            text = f"{FIELD}: the file was uploaded for {file.purpose}; upload it for {IMAGE_PURPOSES[0]}"
            raise ApiError(ErrorCode.INVALID_VALUE, text, where)
        if file.num_bytes > self._max_bytes:
            text = f"{FIELD}: the file has more than {self._max_bytes} bytes (max_media_bytes)"
            raise ApiError(ErrorCode.INVALID_VALUE, text, where)
        return file
