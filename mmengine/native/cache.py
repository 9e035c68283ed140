"""The compiled library in the user's cache folder: one for each content of the sources, set of flags
and kind of CPU. Where it is, no compiler is needed.

A file that is loaded is code that runs, so the folder must be the user's own and closed to others, and the
library's digest stands beside it: one that was cut short or changed is compiled again.
"""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mmengine.native.compile import all_flags, find_compiler, source_files
from mmengine.native.problem import NativeProblem

FOLDER = "MMENGINE_CACHE"
RETRY_AFTER_S = 86400.0
LOCK_WAIT_S = 600.0  # as long as another process may take to compile


def cache_folder() -> Path:
    """The folder, made if need be. Raises NativeProblem when it cannot be used."""
    base = os.environ.get(FOLDER) or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "mmengine")
    folder = Path(base).expanduser() / "native"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise NativeProblem(f"the cache folder {folder} cannot be made ({reason}); {_advice()}") from None
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise NativeProblem(f"the cache folder {folder} can be written by others; {_advice()}")
    return folder


def library_path(folder: Path, isa: str, openmp: Path | None) -> Path:
    """Where the library for these sources, flags and OpenMP runtime lies, whatever compiled it."""
    flags = all_flags(isa, openmp)
    facts = json.dumps([isa, flags, openmp.name if openmp else None])
    digest = hashlib.sha256(facts.encode())
    for path in sorted([*source_files(), *source_files()[0].parent.glob("*.h")]):
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return folder / f"kernels-{isa}-{digest.hexdigest()[:24]}.so"


def cached(path: Path, compile_to: Callable[[str, Path], None]) -> Path:
    """`path`, whole; `compile_to(compiler, path)` is called, by one process at a time, when it is not.
    A compiler that failed at these sources is not tried again for a day. NativeProblem."""
    if _is_whole(path):
        return path
    try:
        with _lock(path.with_suffix(".lock")):
            if not _is_whole(path):
                made = path.with_suffix(f".{os.getpid()}.tmp")
                try:
                    _compile(path, made, compile_to)
                    _digest_path(path).write_text(_digest(made), encoding="ascii")
                    made.replace(path)  # last: a library without its digest is no library
                finally:
                    made.unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise NativeProblem(f"{path.parent} cannot be written to ({reason}); {_advice()}") from None
    if not _is_whole(path):
        raise NativeProblem(f"{path} is not what was compiled; {_advice()}")
    return path


def _compile(path: Path, made: Path, compile_to: Callable[[str, Path], None]) -> None:
    compiler = find_compiler()
    marker = path.with_suffix(".failed")
    identity = f"{compiler} {os.stat(compiler).st_mtime_ns}"
    reason = _failure(marker, identity)
    if reason:
        raise NativeProblem(f"{reason} (not tried again today; to try, delete {marker})")
    try:
        compile_to(compiler, made)
    except NativeProblem as problem:
        marker.write_text(json.dumps([identity, str(problem)]), encoding="utf-8")
        raise
    marker.unlink(missing_ok=True)


def _failure(marker: Path, identity: str) -> str:
    """Why this compiler failed within the last day; empty if it did not."""
    try:
        if time.time() - marker.stat().st_mtime > RETRY_AFTER_S:
            return ""
        who, reason = json.loads(marker.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return ""
    return str(reason) if who == identity else ""


def _advice() -> str:
    return f"name another folder with {FOLDER}"


def _digest_path(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _is_whole(path: Path) -> bool:
    try:
        return _digest_path(path).read_text(encoding="ascii", errors="replace") == _digest(path)
    except OSError:
        return False


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    until = time.monotonic() + LOCK_WAIT_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise NativeProblem(
                        f"another process has held {path} for {LOCK_WAIT_S:.0f} s; end it and try again"
                    ) from None
                time.sleep(0.05)
        yield
