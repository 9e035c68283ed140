"""Sends a streamed chat completion call on its own connection, and records when the events arrive."""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import urlsplit

import h11

from mmengine.errors import ConfigError, in_one_line

MAX_EVENT_BYTES = 2**20  # Maximum size of a stream event.
_READ = 2**16


class Target(NamedTuple):
    """The server to which calls are sent. `path`: the path of the chat completions route."""

    host: str
    port: int
    path: str
    tls: ssl.SSLContext | None
    key: str

    @classmethod
    def of(cls, url: str, key: str) -> "Target":
        """Return the target for a base URL that ends with /v1. Raises ConfigError."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"--url is {url!r}; it must begin with http:// or https://, as in http://127.0.0.1:8000/v1"
            )
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        port = parts.port or (443 if tls else 80)
        return cls(parts.hostname, port, f"{parts.path.rstrip('/')}/chat/completions", tls, key)


@dataclass(slots=True)
class Call:
    """A call's result. All times are seconds on the monotonic clock.

    `sent`: when the call was sent. `over`: when the call ended. `at`: the arrival times of the events with
    output. `num_prompt`, `num_tokens`: the number of prompt and output tokens. `error`: the reason why the
    answer is incomplete, or "".
    """

    sent: float = 0.0
    over: float = 0.0
    at: list[float] = field(default_factory=list)
    num_prompt: int = 0
    num_tokens: int = 0
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.at[0] - self.sent

    @property
    def tpot_s(self) -> float:
        """Return the mean seconds per token after the first token. Returns 0 for an answer with a single
        token.
        """
        return (self.at[-1] - self.at[0]) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0


async def send_call(target: Target, body: bytes, timeout_s: float) -> Call:
    """Send a call and return the result. Errors are stored in the result's `error`; only cancellation is
    raised.
    """
    call = Call(sent=time.monotonic())
    try:
        async with asyncio.timeout(timeout_s):
            await _answer(target, body, call)
    except TimeoutError:
        call.error = f"not finished within {timeout_s:g} s"
    except (OSError, h11.RemoteProtocolError, ValueError) as error:
        call.error = in_one_line(error, 120) or type(error).__name__
    call.over = time.monotonic()
    if not call.error and not call.at:
        call.error = "an empty answer"
    return call


async def _answer(target: Target, body: bytes, call: Call) -> None:
    reader, writer = await asyncio.open_connection(target.host, target.port, ssl=target.tls)
    try:
        connection = h11.Connection(h11.CLIENT)
        headers = [
            ("host", f"{target.host}:{target.port}"),
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
            *([("authorization", f"Bearer {target.key}")] if target.key else []),
        ]
        head = h11.Request(method="POST", target=target.path, headers=headers)
        writer.write((connection.send(head) or b"") + (connection.send(h11.Data(data=body)) or b""))
        await writer.drain()
        await _read(connection, reader, call)
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def _read(connection: h11.Connection, reader: asyncio.StreamReader, call: Call) -> None:
    status, held = 0, b""
    async for event in _events(connection, reader):
        if isinstance(event, h11.Response):
            status = event.status_code
        if not isinstance(event, h11.Data):
            continue
        now = time.monotonic()
        *whole, held = (held + bytes(event.data)).split(b"\n\n")
        if len(held) > MAX_EVENT_BYTES:
            raise ValueError(f"an event has more than {MAX_EVENT_BYTES} bytes")
        for each in whole if status == 200 else ():
            if each.startswith(b"data: ") and each != b"data: [DONE]":
                _take(json.loads(each[6:]), now, call)
    if status != 200:
        call.error = f"status {status}"


async def _events(
    connection: h11.Connection, reader: asyncio.StreamReader
) -> AsyncIterator[h11.Response | h11.Data]:
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(_READ))
        elif isinstance(event, (h11.EndOfMessage, h11.ConnectionClosed)):
            return
        elif isinstance(event, (h11.Response, h11.Data)):
            yield event


def _take(said: dict[str, object], now: float, call: Call) -> None:
    if "error" in said:
        call.error = in_one_line(ValueError(str(said["error"])), 120)
    usage, choices = said.get("usage"), said.get("choices")
    if isinstance(usage, dict):
        call.num_prompt, call.num_tokens = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
    for choice in choices if isinstance(choices, list) else ():
        delta = choice.get("delta") or {}
        if any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls")):
            call.at.append(now)
