"""A process that decodes untrusted images and videos: `python -m mmengine.processing.workers.worker FD`.

`process.py` starts this process and passes it a socket to the engine. The process has limits on memory and
processor time. A hostile item can therefore harm only this process. The process ends when the engine closes
the socket.
"""

import importlib
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Literal

from mmengine.errors import InvalidMedia, InvalidRequest
from mmengine.models.media_decoding import DecodedMedia, Encoded, EncodedMedia, FrameTimes, MediaDecoder
from mmengine.processing.workers.messages import (
    MAX_INLINE,
    MAX_PIXEL_BYTES,
    READY,
    Done,
    Hello,
    Job,
    Refused,
    Wire,
    read_hello,
    read_job,
    write_file,
)

MAX_FILES = 64  # Maximum number of open descriptors.
# While the model uses all cores, a decoder with this niceness gets a quarter of a core. With niceness 19, a
# decoder gets a fiftieth of a core, and the time between tokens is no better.
NICENESS = 5
MAX_ERROR_CHARS = 2000  # Maximum length of a decoder's error text.


def main(descriptor: int) -> None:
    # Ctrl-C is for the engine. When the engine ends, this process ends too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _step_back()
    wire = Wire(socket.socket(fileno=descriptor))
    try:
        hello = read_hello(wire.receive()[0])
        decode: MediaDecoder = importlib.import_module(hello.module).decoder(hello.settings)
        _limit(hello)
        wire.send(READY)
        while True:
            job = read_job(wire.receive()[0])
            if not _answer(wire, job, decode):
                return
    except (EOFError, OSError):
        return  # The engine has ended or has closed the socket.


def _step_back() -> None:
    """Give priority to processes that compute tokens, both on the CPUs and when memory runs out."""
    os.nice(NICENESS)
    with suppress(OSError):  # Some systems do not have this file.
        Path("/proc/self/oom_score_adj").write_text("1000")


def _limit(hello: Hello) -> None:
    """Limit the growth in private memory, the size of written files, and the number of descriptors. Forbid
    core files.
    """
    with suppress(OSError, ValueError):
        used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        _set_limit(resource.RLIMIT_DATA, used + hello.memory_bytes)
    _set_limit(resource.RLIMIT_FSIZE, MAX_PIXEL_BYTES)
    _set_limit(resource.RLIMIT_NOFILE, MAX_FILES)
    _set_limit(resource.RLIMIT_CORE, 0)


def _set_limit(which: int, value: int) -> None:
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def _answer(wire: Wire, job: Job, decode: MediaDecoder) -> bool:
    """Decode an item, and send the result or the refusal. Returns whether this process can take another job.
    After an item exhausted the memory, the result is False, because the heap may be fragmented.
    """
    _limit_time(job.cpu_s)
    try:
        found = decode(_received(wire, job))
    except (EOFError, OSError):
        raise
    except BaseException as error:
        refusal = _refusal(error)
        wire.send(refusal)
        return refusal.kind != "memory"
    _send(wire, found)
    return True


def _limit_time(cpu_s: int) -> None:
    """Limit the processor time from now on. The limit ends a busy process even if the engine was killed."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    limit = int(usage.ru_utime + usage.ru_stime) + 1 + cpu_s
    resource.setrlimit(
        resource.RLIMIT_CPU, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard)
    )


def _received(wire: Wire, job: Job) -> EncodedMedia:
    files: list[Encoded] = []
    for size, is_path in zip(job.sizes, job.is_path, strict=True):
        data = bytes(wire.receive_bytes(size))
        files.append(Path(os.fsdecode(data)) if is_path else data)
    data_of = tuple(files) if job.is_list else files[0]
    times = FrameTimes(job.fps, job.indices, job.total)
    times_given = None if times == FrameTimes() else times
    return EncodedMedia(job.modality, data_of, job.options, job.where, times_given)


def _refusal(error: BaseException) -> Refused:
    if _for_memory(error):
        return Refused("memory", "")
    if isinstance(error, InvalidRequest):
        kind: Literal["media", "request"] = "media" if isinstance(error, InvalidMedia) else "request"
        return Refused(kind, error.text[:MAX_ERROR_CHARS], error.code, tuple(error.path))
    return Refused("bug", f"{type(error).__name__}: {str(error)[:MAX_ERROR_CHARS]}")


def _for_memory(error: BaseException | None) -> bool:
    """Return whether memory ran out, according to the error or its context. Parsers may replace a MemoryError
    by an error about a damaged file.
    """
    while error is not None:
        if isinstance(error, MemoryError):
            return True
        error = error.__context__
    return False


def _done(found: DecodedMedia, *, is_inline: bool) -> Done:
    return Done(
        shape=(found.patches.shape[0], found.patches.shape[1]),
        grid=found.grid,
        timestamps=found.timestamps,
        inline=is_inline,
        duration=found.duration,
        tiles=found.tiles,
        interval=found.interval,
    )


def _send(wire: Wire, found: DecodedMedia) -> None:
    rows = found.patches
    pixels = rows.reshape(-1).data
    if rows.nbytes <= MAX_INLINE or not hasattr(os, "memfd_create"):
        wire.send(_done(found, is_inline=True))
        wire.send_bytes(pixels)
        return
    descriptor = write_file(pixels)
    try:
        wire.send(_done(found, is_inline=False), descriptor)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main(int(sys.argv[1]))
