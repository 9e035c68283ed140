"""Tests of the timeouts and the maximum number of connections."""

import http.client
import resource
import socket
import sys
import time
from contextlib import suppress

import pytest

from mmengine.server.lifecycle.lifecycle import run
from mmengine.server.transport import protocol
from mmengine.server.transport.open_files import most_connections
from tests.server.running import LONG_CONTEXT, Lasting, opened, served, wait_for

LOOK = b"GET /version HTTP/1.1\r\nhost: a\r\n\r\n"


def connected(server, sent=b""):
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.settimeout(10)
    connection.sendall(sent)
    return connection


def answered(connection, status=200):
    """Read an answer, and return whether it has a body and the status `status`."""
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    return bool(answer.read()) and answer.status == status


def is_closed(connection):
    try:
        return connection.recv(4096) == b""
    except ConnectionError:
        return True


def test_a_connection_without_a_request_is_closed():
    limits = {"keep_alive_s": 1, "body_timeout_s": 0.2}
    with served(executor_class=Lasting, config=LONG_CONTEXT, **limits) as one:
        refused = b"POST /v1/nothing HTTP/1.1\r\nhost: a\r\ncontent-length: 99\r\n\r\n"
        busy, silent = opened(one), [connected(one), connected(one, LOOK), connected(one, refused)]
        assert answered(silent[1]) and answered(silent[2], 404)
        silent[2].sendall(b"a")  # Part of a body that the server no longer reads.
        begun = [connected(one, LOOK[:30]), connected(one, LOOK), connected(one)]
        assert answered(begun[1])
        for _ in range(40):  # Single bytes do not extend the timeout.
            time.sleep(0.01)
            with suppress(ConnectionError):
                begun[1].sendall(b"G")
            with suppress(ConnectionError):
                begun[2].sendall(b"G")
        assert answered(begun[0], 408) and is_closed(begun[0])
        assert all(map(is_closed, silent))
        wait_for(lambda: len(one.server.server_state.connections) == 1)
        assert busy.recv(4096).startswith(b"HTTP/1.1 200 ") and not busy.close()


def test_too_many_connections_close_the_longest_idle(monkeypatch):
    monkeypatch.setattr(protocol, "most_connections", lambda: 3)
    with served(executor_class=Lasting, config=LONG_CONTEXT) as one:
        connections, running = one.server.server_state.connections, one.engine._open.running
        busy = [opened(one)]
        wait_for(lambda: len(running) == 1)
        first, second = connected(one, LOOK), connected(one)
        assert answered(first)
        wait_for(lambda: len(connections) == 3)
        first.sendall(LOOK)
        assert answered(first)
        third = connected(one, LOOK)
        assert answered(third) and is_closed(second)
        busy.append(opened(one))
        wait_for(lambda: len(running) == 2)
        assert is_closed(first)
        busy.append(opened(one))
        wait_for(lambda: len(running) == 3)
        assert is_closed(third) and is_closed(connected(one)), "all others have a request"
        for each in busy:
            assert each.recv(4096).startswith(b"HTTP/1.1 200 ")
            each.close()
        wait_for(lambda: not connections)
        assert one.call("/health/live")[0] == 200


@pytest.fixture
def limit():
    """Halve this process's soft limit for open files, and yield the hard limit."""
    before, interval = resource.getrlimit(resource.RLIMIT_NOFILE), sys.getswitchinterval()
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[0] // 2, before[1]))
    yield before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    sys.setswitchinterval(interval)


def test_a_server_raises_its_limit_of_open_files(limit):
    async def look():
        found.append(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        found.append(most_connections())

    found = []
    run(look())
    assert found == [limit, limit // 2]
