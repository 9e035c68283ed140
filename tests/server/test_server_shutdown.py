"""Tests shutdown: streams finish within drain_s, and the next server with the same log finishes the other
requests.
"""

import http.client
import json
import socket
import subprocess
import sys
import threading

import pytest

from mmengine.core.resume import Resume
from mmengine.events import vocabulary as ev
from mmengine.replay.checked_log import CheckedLog
from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.server.http.errors import ApiError
from mmengine.server.lifecycle.process_end import drain_text
from tests.serve.serve_fakes import builder
from tests.server import running
from tests.server.running import SlowEcho, opened, served, wait_for

ASKED = {"messages": [{"role": "user", "content": "a" * 300}]}


class Leaving(SlowEcho):
    """A slow executor whose `close` does nothing."""

    pause_s = 0.02

    def close(self):
        pass


def ends(folder):
    """Return {request id: finish reason} for a log. The reason is None if the request is unfinished."""
    found = {}
    for record in CheckedLog(folder):
        if isinstance(record.event, ev.Queued):
            found[record.event.request_id] = None
        elif isinstance(record.event, ev.Finished):
            found[record.event.request_id] = record.event.reason
    return found


def all_of(connection):
    data = b""
    while piece := connection.recv(65536):
        data += piece
    return data


def test_streams_finish_at_shutdown(capfd):
    with served(executor_class=SlowEcho) as one:
        connection = opened(one)
        assert b"200 OK" in connection.recv(4096)
        one.stop()
        told = "mmengine: 1 stream is running; waiting up to 30 s; send a second signal to end now\n"
        assert told in capfd.readouterr().err
        told = "\nmmengine: 2 streams are running; waiting up to 5 s; press Ctrl-C again to end now\n"
        assert drain_text(2, 5.0, 2) == told
        assert one.app.admission.reasons()[0].startswith("the server is shutting down")
        wait_for(lambda: isinstance(one.app.admission.draining(), ApiError))
        rest = b""
        while data := connection.recv(65536):
            rest += data
        assert rest.rstrip(b"0\r\n").endswith(b"data: [DONE]")


@pytest.mark.parametrize("signals", [1, 2], ids=["the time is over", "a second signal"])
def test_unfinished_requests_are_finished_by_the_next_server(tmp_path, signals):
    log, answers = tmp_path / "log", []
    with served(
        executor_class=Leaving, drain_s=0 if signals == 1 else 600, engine_options={"log": log}
    ) as one:
        connection = opened(one, request_id="stream")
        assert b"200 OK" in connection.recv(4096)
        body = {**ASKED, "request_id": "whole", "n": 2}
        whole = threading.Thread(target=lambda: answers.append(one.call("/v1/chat/completions", body)))
        whole.start()
        wait_for(lambda: one.engine._engine.stats().num_running == 3)
        for _ in range(signals):
            one.stop()
        rest = all_of(connection)
        whole.join()
        one._thread.join(200)
        # The second signal ends the wait of drain_s (600 s).
        assert not one._thread.is_alive()
    fate = "stays in the log, and the next server with this log finishes the request"
    assert json.loads(rest.split(b"data: ")[-2])["error"] == {
        "message": f"the server is shutting down; request stream {fate}",
        "type": "server_error",
        "param": None,
        "code": "shutting_down",
    }
    assert b"data: [DONE]" in rest
    status, headers, found = answers[0]
    assert (status, headers["x-request-id"], int(headers["retry-after"]) >= 5) == (503, "whole", True)
    assert found["error"]["message"] == f"the server is shutting down; request whole {fate}"
    assert ends(log) == {"stream": None, "whole/0": None, "whole/1": None}

    engine = AsyncEngine(builder=builder(executor_class=Leaving), log=log, resume=Resume())
    with served(engine) as one:
        one.executor.pause_s = 0
        wait_for(lambda: not one.engine._engine.has_work)
    assert ends(log) == {"stream": "length", "whole/0": "length", "whole/1": "length"}


def test_without_a_log_shutdown_cancels_requests():
    with served(executor_class=Leaving, drain_s=0) as one:
        connection = opened(one, request_id="mine")
        assert b"200 OK" in connection.recv(4096)
        one.stop()
        rest = all_of(connection)
    text = "the server is shutting down; request mine is cancelled, because there is no log: send it again"
    assert json.loads(rest.split(b"data: ")[-2])["error"]["message"] == text


def test_a_disconnect_during_shutdown_cancels_the_request(tmp_path):
    log = {"engine_options": {"log": tmp_path / "log"}}
    with served(executor_class=Leaving, drain_s=20, reattach_s=0, **log) as one:
        connection = opened(one, request_id="mine")
        assert b"200 OK" in connection.recv(4096)
        one.stop()
        connection.close()
        wait_for(lambda: not one.engine._open.running)
    assert ends(tmp_path / "log") == {"mine": "abort"}


def test_a_body_during_shutdown_is_refused():
    with served(drain_s=0) as one:
        connection = socket.create_connection(("127.0.0.1", one.port))
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n{")
        wait_for(lambda: one.app.admission.bodies.num_bytes)
        one.stop()
        rest = all_of(connection)
    assert rest.startswith(b"HTTP/1.1 503 ") and b'"code":"shutting_down"' in rest


def test_clients_during_shutdown_are_answered_by_the_next_server(monkeypatch):
    """The next server listens on the same socket, so no connection is refused or reset."""
    answers = []

    def ask():
        for _ in range(3):
            answers.append(post(bound.getsockname()[1])[0])

    def post(port):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("POST", "/v1/chat/completions", json.dumps({**ASKED, "max_tokens": 1}))
        response = connection.getresponse()
        return response.status, response.read()

    with socket.create_server(("127.0.0.1", 0)) as bound:
        monkeypatch.setattr(running, "listen", lambda settings: bound.dup())
        with served() as first:
            assert post(first.port)[0] == 200
            first.stop()
            asking = threading.Thread(target=ask)
            asking.start()
            first._thread.join(20)
        with served():
            asking.join(20)
    assert answers == [200, 200, 200]


def test_new_calls_during_shutdown_are_refused():
    with served(executor_class=Leaving) as one:
        connections = opened(one), socket.create_connection(("127.0.0.1", one.port))
        assert b"200 OK" in connections[0].recv(4096)
        one.app.admission.is_draining = True
        body = json.dumps(ASKED).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n"
        connections[1].sendall(head % len(body) + body)
        answer = connections[1].recv(4096)
        answer += connections[1].recv(4096) if answer.endswith(b"\r\n\r\n") else b""
        assert answer.startswith(b"HTTP/1.1 503 ") and b'"code":"shutting_down"' in answer
        status, headers, found = one.call("/health/ready")
        assert status == 503 and found["reasons"][0].startswith("the server is shutting down")
        assert int(headers["retry-after"]) >= 5 and one.call("/health/live")[0] == 200
        for each in connections:
            each.close()


def test_the_first_signal_limits_the_shutdown():
    """The first signal starts the shutdown's time limit. A second signal does not restart the limit."""
    ends = []
    with served() as one:
        one.server.on_exit = lambda: ends.append("limited")
        one.stop()
        one.stop()
    assert ends == ["limited"]


def test_a_process_ends_although_a_thread_does_not():
    # `end_process_after` ends the process although a thread waits for ever.
    code = """
import threading
from mmengine.server.lifecycle.process_end import end_process_after
threading.Thread(target=threading.Event().wait).start()
end_process_after(0.05)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
