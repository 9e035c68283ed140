"""What an engine and its decoder processes say to one another, over a socket between the two.

A message is four bytes of length, a msgpack struct, and the raw bytes that the struct counts. Pixels beyond
MAX_INLINE come as the descriptor of an anonymous file, which the engine maps and never copies.
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
MAX_INLINE = 2**18  # bytes of pixels that are sent: below it a mapping of its own costs more than the copy
MAX_PIXEL_BYTES = 2**30
_LENGTH = struct.Struct("<I")
_CHUNK = 2**20


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """The first message to a worker. It answers with READY when it is able to decode."""

    module: str
    settings: bytes
    memory_bytes: int


class Job(msgspec.Struct, frozen=True, array_like=True):
    """One image or video; behind it come `sizes` bytes of each file. A file that is given by its path has
    the size of that."""

    modality: str
    sizes: tuple[int, ...]
    is_path: tuple[bool, ...]
    is_list: bool
    options: dict[str, bool | int | float]
    where: str
    fps: float | None
    indices: tuple[int, ...] | None
    cpu_s: int  # processor time that it may take


class Done(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Pixels uint8 of `shape`: behind the message, or in the file whose descriptor came with it."""

    shape: tuple[int, int]
    grid: tuple[int, int, int]
    timestamps: tuple[float, ...]
    inline: bool
    duration: float
    tiles: tuple[int, int]


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An item that was not decoded. `text`, `code` and `path` are those of the error."""

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
    """One end of the socket. `ends_at`, of time.monotonic(): when sends and receives give up; None: never.
    They raise TimeoutError then, and EOFError or another OSError where the other end is gone."""

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
        """A message's struct, and the descriptor that came with it, which the caller closes."""
        self._arm()
        first, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
        descriptor = descriptors[0] if descriptors else None
        try:
            if not first:
                raise EOFError
            length = _LENGTH.unpack(first + self.receive_bytes(3))[0]
            if length > MAX_HEADER:
                raise OSError("a message of that length is none")
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
    """The descriptor of a new anonymous file that holds `data`; the caller closes it."""
    descriptor = os.memfd_create("mmengine-pixels", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_file(descriptor: int, size: int) -> mmap.mmap:
    """The contents of a file that another process wrote, private to this one. It is sealed first, so that
    nobody can change or shorten it any more. Raises OSError where it has another size or cannot be sealed."""
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    if os.fstat(descriptor).st_size != size:
        raise OSError("the pixels have another size than was said")
    return mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
