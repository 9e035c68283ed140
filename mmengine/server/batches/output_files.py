"""Writes a batch's output file and error file. Only these two files record which lines have been answered."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from mmengine.events.file_system import open_file, sync_folder
from mmengine.serve.batch.progress import AnswerFile, RequestIndex
from mmengine.server.batches.lines import expired_line
from mmengine.server.storage.batches import Batch, Counts
from mmengine.server.storage.files import Files, StoredFile

OUTPUT, ERRORS = "output", "errors"
_TOGETHER = 1000  # Maximum number of lines per write and sync.


class Answer(NamedTuple):
    """An output line to write. `place`: the index of the input line. `is_good`: True for the output file,
    False for the error file.
    """

    place: int
    line: bytes
    is_good: bool


class BatchFiles:
    """A batch's output file and error file, open for appending.

    All methods block. The constructor raises OSError, and InvalidRequest if a file contains lines of another
    batch.
    """

    def __init__(self, files: Files, batch: Batch, requests: RequestIndex):
        self._batch, self._requests = batch, requests
        self._paths = {kind: files.path(batch.file_id(kind)) for kind in (OUTPUT, ERRORS)}
        self._files: dict[str, AnswerFile] = {}
        try:
            for kind, path in self._paths.items():
                os.close(open_file(path, os.O_RDWR | os.O_CREAT))
                self._files[kind] = AnswerFile(path, requests, fresh=False)
            sync_folder(files.folder)
        except BaseException:
            self.close()
            raise
        self._num_failed = len(self._files[ERRORS].answered)
        self.answered = self._files[OUTPUT].answered | self._files[ERRORS].answered

    @property
    def counts(self) -> Counts:
        return Counts(len(self._requests), len(self.answered) - self._num_failed, self._num_failed)

    def write(self, answers: Sequence[Answer]) -> None:
        """Append the answers that the files do not contain yet, and sync the files. After an OSError, the
        method may be called again with the same answers.
        """
        for answer in answers:
            if answer.place not in self.answered:
                self._files[OUTPUT if answer.is_good else ERRORS].write(answer.line, "one")
                self.answered.add(answer.place)
                self._num_failed += not answer.is_good
        for file in self._files.values():
            file.delivered(now=True)

    def expire(self, name_of: Callable[[int], str]) -> None:
        """Write an expiry error for every request without an answer. `name_of`: line number -> the request's
        id.
        """
        missing = self._missing(name_of)
        while some := list(islice(missing, _TOGETHER)):
            self.write(some)

    def _missing(self, name_of: Callable[[int], str]) -> Iterator[Answer]:
        for place, (number, custom_id) in enumerate(
            zip(self._requests.numbers, self._requests.custom_ids, strict=True)
        ):
            if place not in self.answered:
                yield Answer(place, expired_line(name_of(number), custom_id or ""), False)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def finish(self, now: int) -> list[StoredFile]:
        """Close the files, delete the empty files, and return the remaining files as stored files."""
        self.close()
        found = []
        for kind, path in self._paths.items():
            num_bytes = path.stat().st_size if path.exists() else 0
            if num_bytes:
                found.append(self._stored(kind, path, num_bytes, now))
            else:
                with suppress(FileNotFoundError):
                    path.unlink()
        return found

    def _stored(self, kind: str, path: Path, num_bytes: int, now: int) -> StoredFile:
        batch = self._batch
        expires_at = now + batch.output_expires_s if batch.output_expires_s else 0
        name = f"{batch.batch_id}_{kind}.jsonl"
        return StoredFile(path.name, batch.owner, num_bytes, now, name, "batch_output", expires_at)
