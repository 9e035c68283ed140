"""Controls a decoder process from the engine: starts the process, sends items to it, and ends it."""

import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

import msgspec
import numpy as np

from mmengine.errors import InvalidMedia, InvalidRequest, RequestFailed
from mmengine.models.media_decoding import DecodedMedia, DecoderRecipe, Encoded, EncodedMedia, FrameTimes
from mmengine.processing.workers import worker
from mmengine.processing.workers.messages import (
    MAX_PIXEL_BYTES,
    Done,
    Hello,
    Job,
    Ready,
    Refused,
    Wire,
    map_file,
    read_answer,
)

START_LIMIT_S = 60.0  # Maximum time in seconds for the start of a worker process.
# Environment variables that a worker inherits. Python and its libraries need these variables to start.
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONHOME", "TMPDIR", "TZ")


class DecoderLost(Exception):
    """Raised if the process has ended or sent an invalid answer. `signal_number`: the signal that ended the
    process, or 0.
    """

    def __init__(self, text: str, signal_number: int = 0):
        super().__init__(text)
        self.signal_number = signal_number


class DecoderProcess:
    """A decoder process. The constructor starts the process, and raises DecoderLost if the start fails. Only
    one thread at a time may call `decode`. Any thread may call `kill`.
    """

    def __init__(self, recipe: DecoderRecipe, memory_bytes: int) -> None:
        ours, theirs = socket.socketpair()
        self.memory_bytes, self._done = memory_bytes, recipe.done
        self.usable = True  # Whether the process can decode another item.
        self._wire = Wire(ours)
        with theirs:
            command = [sys.executable, "-P", "-m", worker.__name__, str(theirs.fileno())]
            self._process = subprocess.Popen(
                command,
                env=_environment(),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # Hides the warnings that decoders print about files.
            )
        try:
            self._wire.ends_at = time.monotonic() + START_LIMIT_S
            self._wire.send(Hello(recipe.module, recipe.settings, memory_bytes))
            body, _ = self._wire.receive()
            if not isinstance(read_answer.decode(body), Ready):
                raise DecoderLost("it did not report ready")
        except (EOFError, OSError, msgspec.MsgspecError, DecoderLost):
            self.close()
            raise DecoderLost(f"it did not start ({self._how_it_ended()})") from None

    @property
    def pid(self) -> int:
        return self._process.pid

    def decode(self, media: EncodedMedia, ends_at: float, cpu_s: int) -> DecodedMedia:
        """Decode an item. Raises InvalidMedia, InvalidRequest, RequestFailed and DecoderLost. After
        `ends_at`, raises TimeoutError.
        """
        self._wire.ends_at, self.usable = ends_at, False
        try:
            self._send(media, cpu_s)
            body, descriptor = self._wire.receive()
            try:
                answer = read_answer.decode(body)
                if isinstance(answer, Done):
                    found = self._decoded(answer, descriptor)
                    self.usable = True
                    return found
            finally:
                if descriptor is not None:
                    os.close(descriptor)
        except TimeoutError:
            raise
        except (EOFError, OSError, msgspec.MsgspecError):
            self._end(mercy_s=0.5)
            raise DecoderLost(self._how_it_ended(), -(self._process.returncode or 0)) from None
        if not isinstance(answer, Refused):
            raise DecoderLost("it sent no answer")
        self.usable = answer.kind != "memory"
        raise self._error(answer, media.where)

    def _send(self, media: EncodedMedia, cpu_s: int) -> None:
        is_list = isinstance(media.data, tuple)
        files: tuple[Encoded, ...] = media.data if isinstance(media.data, tuple) else (media.data,)
        raw = [file if isinstance(file, bytes) else os.fsencode(file) for file in files]
        fps, indices, total = media.times or FrameTimes()
        self._wire.send(
            Job(
                media.modality,
                tuple(map(len, raw)),
                tuple(not isinstance(file, bytes) for file in files),
                is_list,
                dict(media.options),
                media.where,
                fps,
                indices,
                total,
                cpu_s,
            )
        )
        for data in raw:
            self._wire.send_bytes(data)

    def _decoded(self, answer: Done, descriptor: int | None) -> DecodedMedia:
        rows, width = answer.shape
        size = rows * width
        if not 0 < size <= MAX_PIXEL_BYTES or rows <= 0 or answer.inline != (descriptor is None):
            raise OSError("the pixels do not match the answer's header")
        pixels: bytearray | mmap.mmap
        pixels = self._wire.receive_bytes(size) if descriptor is None else map_file(descriptor, size)
        patches = np.frombuffer(pixels, np.uint8).reshape(answer.shape)
        return DecodedMedia(
            patches, answer.grid, answer.timestamps, answer.duration, answer.tiles, answer.interval
        )

    def _error(self, answer: Refused, where: str) -> Exception:
        match answer.kind:
            case "media":
                return InvalidMedia(answer.text, code=answer.code, path=answer.path)
            case "request":
                return InvalidRequest(answer.text, code=answer.code, path=answer.path)
            case "memory":
                return InvalidMedia(
                    f"{where} needs more than {self.memory_bytes // 2**20} MiB to be {self._done} "
                    "(media_process_bytes); send a smaller one"
                )
            case _:
                return RequestFailed(f"{where}: its decoder failed ({answer.text})")

    def _how_it_ended(self) -> str:
        code = self._process.returncode
        if code is None or code >= 0:
            return f"exit code {code}"
        name = signal.Signals(-code).name
        return f"{name}, most likely out of memory" if -code == signal.SIGKILL else name

    def kill(self) -> None:
        """Kill the process immediately. Any thread may call this. A waiting caller gets DecoderLost."""
        self._process.kill()

    def _end(self, mercy_s: float = 0.0) -> None:
        """End the process. `mercy_s`: seconds to wait before the kill. A process that ends by itself in this
        time keeps its own exit code.
        """
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(mercy_s)
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self._end()
        self._wire.close()


def _environment() -> dict[str, str]:
    """Return a minimal environment, so that an attacker who controls a decoder finds no secrets."""
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    paths = os.pathsep.join(path for path in sys.path if path)
    return {**kept, **one, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
