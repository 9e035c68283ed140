"""Tests that calls end with an error when the log can no longer be written, and succeed when the log is
back.
"""

import errno
import http.client
import json
import threading

import pytest

from mmengine.events import log_place
from mmengine.events.log import LogWriter
from mmengine.serve.requests import health
from mmengine.server.http import admission
from tests.server.openai_answers import events_of
from tests.server.running import LONG_CONTEXT, Lasting, served, wait_for

LONG = {"messages": [{"role": "user", "content": "a" * 100}]}


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server with endless answers that detects the loss of its log quickly."""
    monkeypatch.setattr(log_place, "LOOK_S", 0.0)
    monkeypatch.setattr(health, "STUCK_S", 0.2)
    monkeypatch.setattr(admission, "WATCH_S", 0.02)
    options = {"log": tmp_path / "log"}
    with served(executor_class=Lasting, config=LONG_CONTEXT, engine_options=options) as one:
        yield one


class Call(threading.Thread):
    """A call in a thread. `begin` waits until the request runs; `end` returns the status and the body."""

    def __init__(self, server, path, body, headers=None):
        super().__init__()
        self.server, self.given = server, (path, body, headers)

    def run(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=20)
        path, body, headers = self.given
        connection.request("POST", path, json.dumps(body), headers or {})
        response = connection.getresponse()
        self.found = response.status, response.read().decode()
        connection.close()

    def begin(self, number):
        self.start()
        wait_for(lambda: len(self.server.engine._open.running) == number or not self.is_alive())
        assert self.is_alive(), self.found
        return self

    def end(self):
        self.join(20)
        return self.found


def in_flight(server):
    calls = [
        ("/v1/chat/completions", LONG, None),
        ("/v1/chat/completions", {**LONG, "stream": True}, None),
        ("/v1/chat/completions", LONG, {"idempotency-key": "mine"}),
        ("/v1/messages", {**LONG, "max_tokens": 20_000}, {"anthropic-version": "2023-06-01"}),
    ]
    return [Call(server, *given).begin(number) for number, given in enumerate(calls, 1)]


def check_errors(calls, why):
    whole, stream, keyed, message = (call.end() for call in calls)
    for status, body in (whole, keyed):
        assert status == 503 and json.loads(body)["error"]["code"] == "not_ready" and why in body
    assert message[0] == 529 and why in message[1]
    assert stream[0] == 200
    last = json.loads(events_of(stream[1])[-2])["error"]
    assert why in last["message"] and last["message"].endswith("is cancelled: send it again")
    assert "repeat the call to get the answer" in keyed[1]


def check_recovered(server):
    server.executor.may_end.set()
    wait_for(lambda: server.call("/health/ready")[0] == 200)
    status, _, found = server.call("/v1/chat/completions", LONG, {"idempotency-key": "mine"})
    assert status == 200 and found["choices"][0]["message"]["content"].startswith("A" * 100)
    wait_for(lambda: not server.engine.stats().num_running)


def test_a_moved_log_ends_calls_with_an_error(server, tmp_path):
    calls = in_flight(server)
    (tmp_path / "log").rename(tmp_path / "elsewhere")
    check_errors(calls, "was removed, moved or unmounted")
    status, _, found = server.call("/health/ready")
    assert status == 503 and "was removed, moved or unmounted" in found["reasons"][0]
    status, _, found = server.chat("more")
    assert (status, found["error"]["code"]) == (503, "not_ready")
    (tmp_path / "elsewhere").rename(tmp_path / "log")
    check_recovered(server)


def test_an_idle_server_notices_a_removed_log(server, tmp_path):
    assert server.call("/health/ready")[0] == 200
    (tmp_path / "log").rename(tmp_path / "elsewhere")
    assert server.call("/health/ready")[0] == 503
    (tmp_path / "elsewhere").rename(tmp_path / "log")
    assert server.call("/health/ready")[0] == 200


def test_a_full_disk_ends_calls_with_an_error(server, monkeypatch):
    calls = in_flight(server)
    with monkeypatch.context() as broken:
        broken.setattr(LogWriter, "_write", full)
        check_errors(calls, "No space left")
    check_recovered(server)


def full(self, data):
    raise OSError(errno.ENOSPC, "No space left on device")
