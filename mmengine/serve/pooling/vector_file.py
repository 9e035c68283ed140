"""Writes vectors to a JSON lines file, to a .npy file, or to standard output."""

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from mmengine.errors import InvalidRequest, MMEngineError

Result = np.ndarray | MMEngineError  # A vector (float32 [d]), or the error of an input that failed.


class VectorWriter(ABC):
    """Writes each input's result once, in any order. `written`: indices of finished inputs."""

    def __init__(self) -> None:
        self.written: set[int] = set()
        self.num_errors = 0

    def write(self, index: int, result: Result) -> None:
        self.written.add(index)
        self.num_errors += isinstance(result, MMEngineError)
        self._put(index, result)

    @abstractmethod
    def _put(self, index: int, result: Result) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


def open_vectors(path: Path | None, ids: Sequence[str]) -> VectorWriter:
    """Return a writer to `path`, or to standard output if `path` is None.

    `ids` has each input's id. Raises InvalidRequest if the file's extension is not .jsonl or .npy, or if the
    file has vectors for other inputs.
    """
    if path is None:
        return _Lines(sys.stdout.fileno(), ids)
    if path.suffix == ".npy":
        return _Matrix(path, ids)
    if path.suffix == ".jsonl":
        return _LinesFile(path, ids)
    raise InvalidRequest(f"--out {path} must end in .jsonl or .npy")


class _Lines(VectorWriter):
    """Writes JSON lines with `custom_id`, and `embedding` or `error`."""

    def __init__(self, descriptor: int, ids: Sequence[str]) -> None:
        super().__init__()
        self._descriptor, self._ids = descriptor, ids

    def _put(self, index: int, result: Result) -> None:
        line: dict[str, object] = {"custom_id": self._ids[index]}
        if isinstance(result, MMEngineError):
            line["error"] = {"code": result.code.value if result.code else None, "message": str(result)}
        else:
            line["embedding"] = result.tolist()
        rest = memoryview(msgspec.json.encode(line) + b"\n")
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    def close(self) -> None:
        """Do nothing: standard output stays open."""


class _LinesFile(_Lines):
    """Continues a JSON lines file.

    Results in the file are kept, except errors and an incomplete last line.
    """

    def __init__(self, path: Path, ids: Sequence[str]) -> None:
        super().__init__(-1, ids)
        kept, places = list[bytes](), {name: index for index, name in enumerate(ids)}
        written = path.read_bytes() if path.exists() else b""
        for number, line in enumerate(written.split(b"\n")[:-1], 1):
            try:
                value = msgspec.json.decode(line, type=dict[str, object])
                index = places[str(value["custom_id"])]
            except (msgspec.DecodeError, KeyError):
                raise InvalidRequest(
                    f"{path}: line {number} has no vector for these inputs; name another file with --out"
                ) from None
            if "embedding" in value:
                self.written.add(index)
                kept.append(line + b"\n")
        new = path.with_name(path.name + ".new")
        new.write_bytes(b"".join(kept))
        new.replace(path)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)

    def close(self) -> None:
        os.close(self._descriptor)


class _Matrix(VectorWriter):
    """Collects all vectors, then writes them as a .npy file (float32 [inputs, d])."""

    def __init__(self, path: Path, ids: Sequence[str]) -> None:
        super().__init__()
        self._path, self._rows = path, [np.zeros(0, np.float32) for _ in ids]

    def _put(self, index: int, result: Result) -> None:
        if isinstance(result, MMEngineError):
            raise result
        self._rows[index] = result

    def close(self) -> None:
        if len(self.written) == len(self._rows):
            new = self._path.with_name(self._path.name + ".new")
            with new.open("wb") as file:
                np.save(file, np.stack(self._rows))
            new.replace(self._path)
