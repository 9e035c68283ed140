"""Tests the thread that accepts connections. It answers health probes even if the event loop is stuck."""

import asyncio
import http.client
import json
import re
import socket
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from mmengine.serve.async_engine import async_engine
from mmengine.server.lifecycle import acceptor, web_server
from mmengine.server.lifecycle.heartbeat import STUCK_S
from mmengine.server.transport import quick_sockets
from tests.server.running import NAMES, served, wait_for


@pytest.fixture(scope="module")
def server():
    with served(cors_origins=["https://page.example"]) as one:
        yield one


@contextmanager
def blocked(server):
    begun, goes_on = threading.Event(), threading.Event()
    server.loop.call_soon_threadsafe(lambda: (begun.set(), goes_on.wait(20)))
    assert begun.wait(20)
    try:
        yield goes_on
    finally:
        goes_on.set()


def exchange(server, *pieces, pause_s=0.0):
    """Send the pieces of a request, and return all bytes of the answer."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        for piece in pieces:
            time.sleep(pause_s)
            connection.sendall(piece)
        found = b""
        while data := connection.recv(65536):
            found += data
        return found


def num_probes(server):
    """Return how many calls of /health/live the metrics count."""
    found = re.search(
        r'requests_total{code="200",method="GET",route="/health/live"} (\S+)', server.call("/metrics")[2]
    )
    return float(found[1]) if found else 0


def test_probes_are_answered_while_the_event_loop_is_blocked(server):
    num_before = num_probes(server)
    with blocked(server) as goes_on:
        others = []
        asking = threading.Thread(target=lambda: others.append(server.call("/version")))
        asking.start()
        for _ in range(3):
            status, headers, found = server.call("/health/live")
            assert (status, found, headers["cache-control"]) == (200, {"status": "alive"}, "no-store")
        assert not others and not goes_on.is_set()
    asking.join()
    assert others[0][0] == 200
    assert num_probes(server) == num_before + 3


def test_a_stuck_event_loop_is_not_alive(server, monkeypatch):
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + STUCK_S + 1)
    with blocked(server), monkeypatch.context() as changed:
        changed.setattr(web_server, "time", later)
        status, headers, found = server.call("/health/live")
    assert (status, found["error"]["code"]) == (503, "not_ready") and "retry-after" in headers
    assert "the engine has not responded for 3" in found["error"]["message"]
    wait_for(lambda: server.call("/health/live")[0] == 200)


def test_an_engine_that_is_stuck_in_a_step_is_not_alive(server, monkeypatch):
    assert server.call("/health/live")[0] == 200
    monkeypatch.setattr(async_engine, "STEP_FROZEN_S", -1.0)
    wait_for(lambda: server.call("/health/live")[0] == 503)
    monkeypatch.undo()
    wait_for(lambda: server.call("/health/live")[0] == 200)


@pytest.mark.parametrize("has_libc", [True, False])
def test_quick_calls_are_those_of_sockets(monkeypatch, has_libc):
    # quick_sockets calls libc without releasing the GIL, and must behave as Python's sockets do.
    if not has_libc:
        monkeypatch.setattr(quick_sockets, "_libc", None)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        bound.setblocking(False)
        with pytest.raises(BlockingIOError):
            quick_sockets.accept(bound)
        client = socket.create_connection(bound.getsockname())
        with client, quick_sockets.accept(bound) as connection:
            assert connection.getpeername() == client.getsockname() and not connection.get_inheritable()
            with pytest.raises(BlockingIOError):
                quick_sockets.peek(connection)
            client.sendall(b"a" * 5000)
            assert quick_sockets.peek(connection) == quick_sockets.peek(connection) == b"a" * 4096
            assert connection.recv(5000) == b"a" * 5000
            client.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == quick_sockets.peek(connection) == b""
    with pytest.raises(OSError, match="Bad file descriptor"):
        quick_sockets.peek(connection)


def test_other_requests_reach_the_event_loop(server, monkeypatch):
    close = b" HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
    live, lively = b"GET /health/live", b"GET /health/lively"
    assert exchange(server, lively + close).startswith(b"HTTP/1.1 404")
    assert exchange(server, b"HEAD /health/live" + close).startswith(b"HTTP/1.1 200")
    assert exchange(server, b"\x16\x03\x01 no http").startswith(b"HTTP/1.1 400")
    # Only the event loop's answers have a date header. Here the first six bytes do not identify a probe.
    assert b"date:" in exchange(server, live[:6], live[6:] + close, pause_s=0.05)
    assert b"date:" not in exchange(server, live + close[:12], close[12:], pause_s=0.05)
    from_page = live + close.replace(b"host", b"Origin: https://page.example\r\nhost")
    assert b"access-control-allow-origin" in exchange(server, from_page)
    monkeypatch.setattr(acceptor, "FIRST_BYTES_S", 0.0)
    assert b"date:" in exchange(server, live + close, pause_s=0.05)


def test_connections_stay_open_for_more_calls(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.connect()
    own = connection.sock
    for path in ("/v1/models", "/health/live", "/version"):
        connection.request("GET", path)
        assert connection.getresponse().read() and connection.sock is own
    connection.close()


def test_a_health_port_without_a_supervisor(server):
    async def main():
        health = socket.create_server(("127.0.0.1", 0))
        health.setblocking(False)
        bound = socket.create_server(("127.0.0.1", 0))
        bound.setblocking(False)
        one = web_server.web_server(server.app, server.settings, health)
        port = health.getsockname()[1]
        serving = asyncio.create_task(one.serve(sockets=[bound]))
        found = await asyncio.to_thread(asked, port)
        one.should_exit = True
        await serving
        return found

    def asked(port):
        wait_for(lambda: is_open(port))
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("GET", "/health/ready")
        return json.loads(connection.getresponse().read())

    def is_open(port):
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    draining = server.app.admission.is_draining
    try:
        assert asyncio.run(main()) == {"status": "ready", "reasons": []}
    finally:
        server.app.admission.is_draining = draining
    assert server.names == NAMES
