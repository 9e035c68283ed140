"""Reads files below a media folder. No path leads out of the media folder: links are not followed, and each
folder is opened relative to its parent's descriptor.
"""

import os
import stat
import weakref
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from mmengine.errors import ConfigError
from mmengine.processing.fetch.file_types import HEAD_BYTES, is_media
from mmengine.processing.fetch.refusals import refused

MAX_PATH_CHARS = 4096  # Maximum length of a path or a `file:` URL in an untrusted message.
MAX_DEPTH = 64  # Maximum number of folders between the media folder and a file.
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a pipe must not wait for a writer. Pipes are refused after opening.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class LocalFiles:
    """A media folder. `root` itself may be a symbolic link. Raises ConfigError if `root` is not a folder."""

    def __init__(self, root: Path) -> None:
        self._named = PurePosixPath(os.path.abspath(root))
        try:
            self._real = PurePosixPath(root.resolve(strict=True))
            self._root = os.open(self._real, _FOLDER)
        except OSError as error:
            raise ConfigError(f"the media folder {root} cannot be used: {error.strerror}") from None
        weakref.finalize(self, os.close, self._root)

    def read(self, name: str, max_bytes: int) -> bytes:
        """Read a regular file below the root. `name`: a path or a `file:` URL.

        Links are not followed. Raises FetchRefused. The error text is the same for a missing file and a file
        outside the root, so that clients cannot find out which files exist.
        """
        parts = self._parts(name)
        try:
            with ExitStack() as opened:
                folder = self._root
                for part in parts[:-1]:
                    folder = _open(part, _FOLDER, folder, opened)
                file = _open(parts[-1], _FILE, folder, opened)
                found = os.fstat(file)
                if not stat.S_ISREG(found.st_mode):
                    raise refused("file")
                data = _contents(file, found.st_size, max_bytes)
        except (OSError, UnicodeError):
            raise refused("file") from None
        if not is_media(data[:HEAD_BYTES]):
            raise refused("type")
        return data

    def _parts(self, name: str) -> tuple[str, ...]:
        text = name
        if name[:5].lower() == "file:":
            try:
                split = urlsplit(name)
            except ValueError:
                raise refused("file") from None
            host = split.netloc if split.netloc != "localhost" else ""
            # In file://name, the host is the first part of a path below the root.
            text = unquote(host + split.path)
        if len(text) > MAX_PATH_CHARS or "\0" in text:
            raise refused("file")
        path = PurePosixPath(text)
        if path.is_absolute():
            root = next((each for each in (self._named, self._real) if path.is_relative_to(each)), None)
            if root is None:
                raise refused("file")
            path = path.relative_to(root)
        if not path.parts or len(path.parts) > MAX_DEPTH or ".." in path.parts:
            raise refused("file")
        return path.parts


def _open(name: str, flags: int, folder: int, opened: ExitStack) -> int:
    descriptor = os.open(name, flags, dir_fd=folder)
    opened.callback(os.close, descriptor)
    return descriptor


def _contents(file: int, size: int, max_bytes: int) -> bytes:
    if size > max_bytes:
        raise refused("size", f"more than {max_bytes} bytes")
    data = bytearray()
    while len(data) <= max_bytes and (piece := os.read(file, min(2**20, max_bytes + 1 - len(data)))):
        data += piece
    if len(data) > max_bytes:  # The file grew while it was read.
        raise refused("size", f"more than {max_bytes} bytes")
    return bytes(data)
