"""Stores compiled libraries in the user's cache folder, keyed by sources, flags and CPU kind.

A cached library is loaded without a compiler. Loading a library executes its code. For safety, no other user
may have write access to the cache folder or to the folders above (mmengine.strict_modes). A file next to each
library holds the library's SHA-256 digest. A library that does not match its digest is compiled again.
"""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mmengine.native import compile
from mmengine.native.compile import all_flags, find_compiler, header_files, source_files, wheel_flags
from mmengine.native.errors import NativeKernelsError
from mmengine.strict_modes import BadModes, open_strict

FOLDER = "MMENGINE_CACHE"
RETRY_AFTER_S = 86400.0
LOCK_WAIT_S = 600.0  # maximum time to wait for another process that compiles


@dataclass(frozen=True, slots=True)
class CacheFolder:
    """An open cache folder. Files are read and written relative to the descriptor `fd`. `path` is for the
    compiler and for messages.
    """

    path: Path
    fd: int  # never closed: the paths of loaded libraries go through this descriptor

    def read(self, name: str) -> bytes:
        with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self.fd), "rb") as file:
            return file.read()

    def write(self, name: str, data: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with open(os.open(name, flags, 0o600, dir_fd=self.fd), "wb") as file:
            file.write(data)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def loadable(self, name: str) -> str:
        """Return a path to the file through `fd`. The returned path stays valid even if another folder
        replaces the folder at `self.path`.
        """
        return f"/proc/self/fd/{self.fd}/{name}"


def cache_folder() -> CacheFolder:
    """Open the cache folder, and create it if it is missing. Raises NativeKernelsError if the folder cannot
    be used.
    """
    base = os.environ.get(FOLDER) or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "mmengine")
    path = Path(base) / "native"
    try:
        path = path.expanduser()
        return CacheFolder(path, open_strict(path, make=True))
    except BadModes as problem:
        raise NativeKernelsError(
            f"the cache folder {path} is not safe for executable code: {problem}, or {_advice()}"
        ) from None
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise NativeKernelsError(
            f"the cache folder {path} cannot be created ({reason}); {_advice()}"
        ) from None


def library_name(isa: str, openmp: Path | None) -> str:
    """Return the file name of the library. The name depends on the sources, flags and OpenMP runtime, but not
    on the compiler.
    """
    return _file_name(isa, [isa, all_flags(isa, openmp), openmp.name if openmp else None])


def wheel_library_name(isa: str) -> str:
    """Return the file name under which a wheel stores the library for the current sources."""
    return _file_name(isa, [isa, wheel_flags(isa)])


def _file_name(isa: str, facts: list[object]) -> str:
    digest = hashlib.sha256(json.dumps(facts).encode())
    for path in [*source_files(), *header_files()]:
        digest.update(f"\0{path.relative_to(compile.SOURCES)}\0".encode() + path.read_bytes())
    return f"kernels-{isa}-{digest.hexdigest()[:24]}.so"


def ensure_compiled(folder: CacheFolder, name: str, compile_to: Callable[[str, Path], None]) -> None:
    """Ensure that the library `name` exists in `folder` with a matching digest.

    If the library is missing, calls `compile_to(compiler, path)`. A lock prevents simultaneous compilation in
    several processes. A compiler that failed with these sources is not tried again for a day. Raises
    NativeKernelsError.
    """
    if _has_valid_digest(folder, name):
        return
    try:
        with _lock(folder, _sibling(name, ".lock")):
            if not _has_valid_digest(folder, name):
                made = _sibling(name, f".{os.getpid()}.tmp")
                try:
                    _compile(folder, name, made, compile_to)
                    folder.write(_sibling(name, ".sha256"), _digest(folder, made))
                    # Write the digest before the rename, because a library without a digest is not loaded.
                    os.rename(made, name, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
                finally:
                    folder.remove(made)
    except OSError as error:
        reason = error.strerror or error
        raise NativeKernelsError(f"{folder.path} cannot be written to ({reason}); {_advice()}") from None
    if not _has_valid_digest(folder, name):
        raise NativeKernelsError(f"{folder.path / name} changed after it was compiled; {_advice()}")


def _compile(folder: CacheFolder, name: str, made: str, compile_to: Callable[[str, Path], None]) -> None:
    compiler = find_compiler()
    marker = _sibling(name, ".failed")
    identity = f"{compiler} {os.stat(compiler).st_mtime_ns}"
    reason = _failure(folder, marker, identity)
    if reason:
        raise NativeKernelsError(f"{reason} (not tried again today; to try, delete {folder.path / marker})")
    try:
        compile_to(compiler, folder.path / made)
    except NativeKernelsError as problem:
        folder.write(marker, json.dumps([identity, str(problem)]).encode())
        raise
    folder.remove(marker)


def _failure(folder: CacheFolder, marker: str, identity: str) -> str:
    """Return why this compiler failed within the last day, or "" if there was no failure."""
    try:
        if time.time() - os.stat(marker, dir_fd=folder.fd).st_mtime > RETRY_AFTER_S:
            return ""
        who, reason = json.loads(folder.read(marker))
    except (OSError, ValueError, TypeError):
        return ""
    return str(reason) if who == identity else ""


def _advice() -> str:
    return f"name another folder with {FOLDER}"


def _sibling(name: str, suffix: str) -> str:
    return f"{name.removesuffix('.so')}{suffix}"


def _digest(folder: CacheFolder, name: str) -> bytes:
    return hashlib.sha256(folder.read(name)).hexdigest().encode()


def _has_valid_digest(folder: CacheFolder, name: str) -> bool:
    try:
        return folder.read(_sibling(name, ".sha256")) == _digest(folder, name)
    except OSError:
        return False


@contextmanager
def _lock(folder: CacheFolder, name: str) -> Iterator[None]:
    until = time.monotonic() + LOCK_WAIT_S
    with open(os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=folder.fd), "wb") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise NativeKernelsError(
                        f"another process has held {folder.path / name} for {LOCK_WAIT_S:.0f} s; end it and "
                        "try again"
                    ) from None
                time.sleep(0.05)
        yield
