"""Sends a load to a server from one thread with raw sockets, because this needs little CPU time."""

import json
import selectors
import socket
import time
from dataclasses import dataclass, field, replace

ASKED = "What is a triangle, and what is a star?"
_END = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Load:
    """A load of `requests` calls, at most `at_once` concurrently. Each answer has `tokens` tokens."""

    requests: int
    at_once: int
    tokens: int
    stream: bool
    more: tuple[tuple[str, object], ...] = ()  # Additional body fields.
    model: str | None = None
    # The first prompt's number. Each prompt contains its number, so all prompts differ.
    start: int = 0
    is_response: bool = False  # True: calls of /v1/responses instead of /v1/chat/completions.
    # Seconds between two polls of the sockets. With a pause, the server spends no time on waking the client.
    pause_s: float = 0.0

    def of(self, model: str | None) -> "Load":
        return replace(self, model=model)

    def messages(self, number: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"{number}. {ASKED}"}]

    @property
    def mark(self) -> bytes:
        """The bytes that precede the text in an event."""
        return b'"delta":"' if self.is_response else b'"content":"'

    def bytes_of(self, number: int) -> bytes:
        messages = self.messages(self.start + number)
        fields = {"temperature": 0, "stream": self.stream, **dict(self.more)}
        if self.is_response:
            path, fields = b"responses", {"input": messages, "max_output_tokens": self.tokens, **fields}
        else:
            path, fields = b"chat/completions", {"messages": messages, "max_tokens": self.tokens, **fields}
        if self.model is not None:
            fields["model"] = self.model
        body = json.dumps(fields).encode()
        head = b"POST /v1/%b HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n" % path
        return head + b"content-length: %d\r\n\r\n" % len(body) + body


@dataclass(slots=True)
class Answer:
    number: int
    sent_at: float
    first_at: float = 0.0  # The time when the first event with text arrived.
    data: bytearray = field(default_factory=bytearray)

    @property
    def is_whole(self) -> bool:
        if self.data.endswith(_END):
            return True
        end = self.data.find(b"\r\n\r\n", 0, 2048)
        length = self.data[: max(0, end)].lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        return bool(length) and len(self.data) >= end + 4 + int(length)


def load(port: int, asked: Load) -> list[Answer]:
    """Send the load to 127.0.0.1 and return the answers. Raises RuntimeError for an invalid answer."""
    ready, answers, sent = selectors.DefaultSelector(), [], 0
    for _ in range(min(asked.at_once, asked.requests)):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        answers.append(_send(connection, asked, sent))
        ready.register(connection, selectors.EVENT_READ, answers[-1])
        sent += 1
    while ready.get_map():
        time.sleep(asked.pause_s)
        for key, _ in ready.select():
            connection, answer = key.fileobj, key.data
            data = connection.recv(1 << 18)
            answer.data += data
            if not answer.first_at and asked.mark in data.replace(asked.mark + b'"', b""):
                answer.first_at = time.perf_counter()
            if not data or not answer.data.startswith(b"HTTP/1.1 200"[: len(answer.data)]):
                raise RuntimeError(f"no answer: {bytes(answer.data[-2000:])!r}")
            if not answer.is_whole:
                continue
            ready.unregister(connection)
            if sent == asked.requests:
                connection.close()
                continue
            answers.append(_send(connection, asked, sent))
            ready.register(connection, selectors.EVENT_READ, answers[-1])
            sent += 1
    return answers


def _send(connection: socket.socket, asked: Load, number: int) -> Answer:
    answer = Answer(number, time.perf_counter())
    connection.sendall(asked.bytes_of(number))
    return answer
