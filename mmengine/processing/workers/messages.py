"""The messages between an engine and the processes that decode media, over a socket.

A message has a length (4 bytes) and a msgpack struct. The raw bytes of files or pixels may follow the
message. Pixels with more than MAX_INLINE bytes are sent as the descriptor of an anonymous file. The engine
maps this file without copying.
"""

import fcntl
import mmap
import os
import socket
import struct
import time
from typing import Literal

import msgspec

from mmengine.errors import ErrorCode

MAX_HEADER = 2**20
MAX_INLINE = 2**18  # Maximum size in bytes of pixels that follow a message.
MAX_PIXEL_BYTES = 2**30
_LENGTH = struct.Struct("<I")
_CHUNK = 2**20


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """The first message to a decoder process, which answers READY when it can decode."""

    module: str
    settings: bytes
    memory_bytes: int


class Job(msgspec.Struct, frozen=True, array_like=True):
    """An image or video to decode. The item's files follow the message, as paths (`is_path`) or contents.
    `sizes`: the number of bytes sent for each file.
    """

    modality: str
    sizes: tuple[int, ...]
    is_path: tuple[bool, ...]
    is_list: bool
    options: dict[str, bool | int | float]
    where: str
    fps: float | None
    indices: tuple[int, ...] | None
    total: int | None
    cpu_s: int  # Limit on processor time, in seconds.


class Done(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Decoded pixels, uint8 with the shape `shape`. The pixels follow the message (`inline`), or the message
    carries a file descriptor.
    """

    shape: tuple[int, int]
    grid: tuple[int, int, int]
    timestamps: tuple[float, ...]
    inline: bool
    duration: float
    tiles: tuple[int, int]
    interval: float | None = None


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Says that an item was not decoded. `text`, `code` and `path` come from the error."""

    kind: Literal["media", "request", "memory", "bug"]
    text: str
    code: ErrorCode | None = None
    path: tuple[str | int, ...] = ()


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


READY = Ready()
Answer = Done | Refused | Ready
_encoder = msgspec.msgpack.Encoder()
read_hello = msgspec.msgpack.Decoder(Hello).decode
read_job = msgspec.msgpack.Decoder(Job).decode
read_answer: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class Wire:
    """A connection between an engine and a decoder process.

    `ends_at`: the time.monotonic() value after which calls raise TimeoutError, or None. If the other process
    has ended, calls raise EOFError or OSError.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self.ends_at: float | None = None

    def _arm(self) -> None:
        if self.ends_at is None:
            self._socket.settimeout(None)
            return
        left = self.ends_at - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)

    def send(self, message: msgspec.Struct, descriptor: int | None = None) -> None:
        body = _encoder.encode(message)
        head = _LENGTH.pack(len(body))
        self._arm()
        if descriptor is not None:
            socket.send_fds(self._socket, [head[:1]], [descriptor])
            head = head[1:]
        self._socket.sendall(head + body)

    def send_bytes(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        for start in range(0, len(view), _CHUNK):
            self._arm()
            self._socket.sendall(view[start : start + _CHUNK])

    def receive(self) -> tuple[bytes, int | None]:
        """Return a message's encoded struct and descriptor (or None). The caller closes the descriptor."""
        self._arm()
        first, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
        descriptor = descriptors[0] if descriptors else None
        try:
            if not first:
                raise EOFError
            length = _LENGTH.unpack(first + self.receive_bytes(3))[0]
            if length > MAX_HEADER:
                raise OSError(f"a message has {length} bytes; the limit is {MAX_HEADER}")
            return bytes(self.receive_bytes(length)), descriptor
        except BaseException:
            if descriptor is not None:
                os.close(descriptor)
            raise

    def receive_bytes(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            self._arm()
            count = self._socket.recv_into(view, min(len(view), _CHUNK))
            if not count:
                raise EOFError
            view = view[count:]
        return data

    def close(self) -> None:
        self._socket.close()


def write_file(data: memoryview) -> int:
    """Write `data` to a new anonymous file and return its descriptor. The caller closes the descriptor."""
    descriptor = os.memfd_create("mmengine-pixels", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_file(descriptor: int, size: int) -> mmap.mmap:
    """Return a private mapping of a file that another process wrote.

    Before mapping, seals the file against changes. Raises OSError if the file has another size or cannot be
    sealed.
    """
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    if os.fstat(descriptor).st_size != size:
        raise OSError("the pixels' size does not match the answer's header")
    return mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
