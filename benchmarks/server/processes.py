"""Starts servers in separate processes, and measures their tokens per second."""

import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from benchmarks.server.clients import Answer, Load, load
from mmengine.models.loader import resolve_folder
from mmengine.models.plugin import Tokenizer
from mmengine.models.registry import plugin_for

PATIENCE_S = 120.0  # Maximum seconds for a server to load.


class NoAnswer(Exception):
    """A server does not start, or does not answer."""


class Running(NamedTuple):
    """A running server. `pid`: the started process, which may have children."""

    port: int
    pid: int

    @property
    def cpu_s(self) -> float:
        """The CPU seconds of the process and its descendants so far. Linux counts ticks of 10 ms."""
        parents, ticks = {}, {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # The process has just ended.
                words = stat.read_text().rpartition(")")[2].split()
                pid = int(stat.parent.name)
                parents[pid], ticks[pid] = int(words[1]), int(words[11]) + int(words[12])
        mine = {self.pid}
        while more := {pid for pid, parent in parents.items() if parent in mine} - mine:
            mine |= more
        return sum(ticks[pid] for pid in mine) / os.sysconf("SC_CLK_TCK")


@contextmanager
def ours(folder: Path | None) -> Iterator[int]:
    """Run `mmengine serve` without request logs and yield its port."""
    with serving(folder) as server:
        yield server.port


@contextmanager
def serving(folder: Path | None, log: Path | None = None, traces: str = "") -> Iterator[Running]:
    """Run `mmengine serve` without request logs, and yield the server. `log`: the event log's folder, or
    None. `traces`: the URL of a span collector, or "".
    """
    model = [] if folder is None else ["--model", str(folder)]
    kept = [] if log is None else ["--log", str(log)]
    words = [
        str(Path(sys.executable).with_name("mmengine")),
        "serve",
        *model,
        *kept,
        *(["--otlp-traces-endpoint", traces] if traces else []),
        "--device",
        "cpu",
        "--no-request-log",
    ]
    with _running(words, "/health/ready") as server:
        yield server


@contextmanager
def theirs(python: str, folder: Path, words: Sequence[str]) -> Iterator[int]:
    """Run `transformers serve` and yield its port. Raises NoAnswer."""
    program = "from transformers.cli.transformers import main; main()"
    command = [python, "-c", program, "serve", str(folder), "--device", "cpu", *words]
    with _running(command, "/health") as server:
        yield server.port


@contextmanager
def _running(command: list[str], health: str) -> Iterator[Running]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)], stdout=said, stderr=subprocess.STDOUT
        )
        try:
            _await(process, port, health, said)
            yield Running(port, process.pid)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _await(process: subprocess.Popen, port: int, health: str, said) -> None:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", health)
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.2)
    said.seek(0)
    lines = said.read().strip().splitlines() or ["no output"]
    told = next((line for line in lines if "requires" in line), lines[-1])
    raise NoAnswer(f"the server does not start: {told[:200]}")


def tokens_a_second(port: int, asked: Load, model: str | None = None) -> tuple[float, list[str]]:
    """Run the load. Return the tokens per second, and the texts in the requests' order. A tokenizer counts
    the texts' tokens. Raises NoAnswer.
    """
    begun = time.perf_counter()
    try:
        answers = load(port, asked.of(model))
    except (RuntimeError, OSError) as error:
        raise NoAnswer(f"the server does not answer: {str(error)[:200]}") from None
    seconds = time.perf_counter() - begun
    texts = [_text(answer) for answer in sorted(answers, key=lambda each: each.number)]
    return sum(len(_tokenizer().encode(text)) for text in texts) / seconds, texts


def _text(answer: Answer) -> str:
    said = []
    for line in _unchunked(bytes(answer.data)).splitlines():
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            raise NoAnswer(f"an error: {str(event['error'])[:200]}")
        said += [choice["delta"].get("content") or "" for choice in event["choices"]]
    return "".join(said)


def _unchunked(data: bytes) -> bytes:
    body, pieces = data.partition(b"\r\n\r\n")[2], []
    while body:
        size, _, body = body.partition(b"\r\n")
        pieces.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]
    return b"".join(pieces)


@cache
def _tokenizer() -> Tokenizer:
    folder = resolve_folder(None)
    return plugin_for(folder).load_processor(folder).tokenizer
