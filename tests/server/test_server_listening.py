"""Tests of inherited listening sockets, of the health port with bad clients, and of the systemd units."""

import configparser
import json
import os
import selectors
import signal
import socket
import time

import pytest
import typer

from mmengine.cli.main import app
from mmengine.errors import ConfigError
from mmengine.server.lifecycle import health_port
from mmengine.server.lifecycle import listening_socket as listening
from mmengine.server.lifecycle.health_port import MAX_HEAD_BYTES, MAX_PROBES, Health, HealthPort, answer_to
from mmengine.server.lifecycle.heartbeat import MAX_REASON_CHARS, Beat, HeartbeatReceiver, HeartbeatSender
from mmengine.server.settings import ServerSettings
from tests.server.guarded import ROOT, guarded

COMMANDS = typer.main.get_command(app).commands


def environment(**changed):
    return {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "a", "A": "b", **changed}


@pytest.fixture
def third(monkeypatch):
    """A function that sets FIRST_FD, the first descriptor that systemd passes."""

    def use(fd):
        monkeypatch.setattr(listening, "FIRST_FD", fd)

    return use


def test_a_systemd_socket_is_used_and_not_inherited(third):
    with socket.create_server(("127.0.0.1", 0)) as bound:
        where = bound.getsockname()
        fd = os.dup(bound.fileno())
    os.set_inheritable(fd, True)
    third(fd)
    given = environment()
    with listening.find_inherited_socket(given) as found:
        assert found.getsockname() == where and not found.get_inheritable() and not found.getblocking()
        assert given == {"A": "b"}
        with socket.create_connection(where):
            assert found.accept()[0].fileno() >= 0


@pytest.mark.parametrize(
    "changed", [{"LISTEN_PID": "1"}, {"LISTEN_PID": ""}, {"LISTEN_FDS": "0"}, {"LISTEN_FDS": "-1"}]
)
def test_sockets_for_another_process_are_ignored(changed):
    given = environment(**changed)
    assert listening.find_inherited_socket(given) is None and given == {"A": "b"}


def test_a_descriptor_that_does_not_listen_is_refused(third, tmp_path):
    with pytest.raises(ConfigError, match="systemd passed 2 sockets; the server uses one"):
        listening.find_inherited_socket(environment(LISTEN_FDS="2"))
    for made in (
        socket.socket(),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM),
    ):
        third(made.detach())
        with pytest.raises(ConfigError, match="is not a listening TCP socket"):
            listening.find_inherited_socket(environment())
        os.close(listening.FIRST_FD)
    with (tmp_path / "file").open("w") as file:
        third(file.fileno())
        with pytest.raises(ConfigError, match="is not a socket .Socket operation on non-socket"):
            listening.find_inherited_socket(environment())
    third(10_000)
    with pytest.raises(ConfigError, match="is not a socket .Bad file descriptor"):
        listening.find_inherited_socket(environment())


def test_clients_are_answered_across_a_full_restart(tmp_path):
    """The socket stays open during the restart, as under systemd."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
        with guarded(tmp_path, options=("--port", "1"), given=bound) as one:
            pid, _ = one.life(0)
            assert one.ask(port) == "life 0"
            with open(f"/proc/{pid}/environ", "rb") as environ:
                assert b"LISTEN_" not in environ.read(), "child processes must not see these variables"
            one.process.send_signal(signal.SIGTERM)
            assert one.ends() == 0
        waiting = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        for connection in waiting:
            connection.sendall(b"hello")
        with guarded(tmp_path, options=("--port", "1"), given=bound):
            for connection in waiting:
                connection.settimeout(30)
                assert connection.recv(100) == b"life 1"
                connection.close()


class Asked:
    """A health port. Its selector runs only while a test calls `turn`."""

    def __init__(self):
        self.selector = selectors.DefaultSelector()
        self.bound = socket.create_server(("127.0.0.1", 0))
        self.bound.setblocking(False)
        self.port = HealthPort(self.bound, self.selector, lambda: Health((), 5, True))

    def connect(self, data=b""):
        connection = socket.create_connection(self.bound.getsockname())
        connection.sendall(data)
        connection.setblocking(False)
        return connection

    def turn(self, seconds=0.2):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for key, _ in self.selector.select(0.01):
                key.data()
            self.port.tidy()

    def answer(self, connection):
        """Return the bytes that arrived, or None if none arrived and the connection is open."""
        data = b""
        try:
            while piece := connection.recv(65536):
                data += piece
        except BlockingIOError:
            return data or None
        except ConnectionResetError:
            return data
        return data


@pytest.fixture
def asked():
    one = Asked()
    yield one
    one.port.close()
    assert not one.selector.get_map()


def test_silent_connections_do_not_block_the_health_port(asked, monkeypatch):
    monkeypatch.setattr(health_port, "ASKING_S", 0.4)
    silent = [asked.connect(b"GET /he") for _ in range(MAX_PROBES + 20)]
    asked.turn()
    assert len(asked.port._probes._asking) == MAX_PROBES
    assert [asked.answer(each) for each in silent[:20]] == [b""] * 20, "the oldest connections are closed"
    answer = asked.connect(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
    asked.turn(0.1)
    assert asked.answer(answer).startswith(b"HTTP/1.1 200 OK\r\n")
    asked.turn(0.5)
    assert not asked.port._probes._asking and asked.answer(silent[-1]) == b"", (
        "connections are closed after ASKING_S"
    )


def test_the_health_port_survives_bad_heads(asked):
    long = asked.connect(b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * MAX_HEAD_BYTES)
    asked.turn()
    answer = asked.answer(long)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431 "), (
        "an error, or a reset if unread bytes remained"
    )
    for data in (b"\r\n\r\n", b"\xff\x00\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01 hello HTTP\r\n\r\n"):
        connection = asked.connect(data)
        asked.turn(0.05)
        assert asked.answer(connection).startswith(b"HTTP/1.1 400 ")
    in_pieces = asked.connect(b"GET /health/live HT")
    asked.turn(0.05)
    assert asked.answer(in_pieces) is None
    in_pieces.sendall(b"TP/1.0\r\n\r\n")
    asked.turn(0.05)
    assert asked.answer(in_pieces).endswith(b'\r\n\r\n{"status":"alive"}')


def said(line, health):
    head, _, body = answer_to(f"{line}\r\nhost: a\r\n\r\n".encode(), lambda: health).partition(b"\r\n\r\n")
    first, *headers = head.decode().split("\r\n")
    return first.split(" ", 2)[1], dict(each.split(": ") for each in headers), body


def test_health_answers_by_state():
    loading, told = Health(("it loads",), 9, False), Health(("no room",), 3, True)
    status, headers, body = said("GET /health/ready?a=b HTTP/1.1", loading)
    assert (status, headers["retry-after"]) == ("503", "9") and json.loads(body)["error"][
        "code"
    ] == "not_ready"
    status, headers, body = said("GET /health HTTP/1.1", told)
    assert (status, headers["retry-after"]) == ("503", "3")
    assert json.loads(body) == {"status": "not ready", "reasons": ["no room"]}
    status, headers, body = said("HEAD /health HTTP/1.1", told)
    assert status == "503" and int(headers["content-length"]) > 0 and body == b""
    assert said("GET /health/live HTTP/1.1", loading)[0] == "200"
    assert said("GET /health/live HTTP/1.1", Health(("silence",), 9, False, False))[0] == "503"
    assert said("POST /health HTTP/1.1", told)[0] == "405" and said("GET /v1 HTTP/1.1", told)[0] == "404"


def test_heartbeats_never_block():
    heard = HeartbeatReceiver.pair()
    beats = HeartbeatSender(os.dup(heard.sending_end.fileno()))
    assert heard.newest() is None
    beats.report_built()
    for number in range(10_000):  # The supervisor does not read, so most heartbeats are dropped.
        beats.send(Beat(True, True, True, ("a" * 10_000,), 3, number))
    found = heard.newest()
    assert found.is_serving and found.reasons == ("a" * MAX_REASON_CHARS,) and found.num_tokens < 10_000
    heard.sending_end.send(b"not a beat")
    assert heard.newest() is None
    heard.close()


def test_systemd_units_match_the_page_and_the_command():
    units = {}
    for name in ("socket", "service"):
        units[name] = configparser.ConfigParser(interpolation=None)
        units[name].optionxform = str
        units[name].read(ROOT / "deploy" / "systemd" / f"mmengine.{name}")
    service = units["service"]["Service"]
    known = {opt for each in COMMANDS["serve"].params for opt in each.opts}
    assert {word for word in service["ExecStart"].split() if word.startswith("--")} <= known
    assert service["RestartPreventExitStatus"].split() == ["2", "3", "4"]
    assert units["socket"]["Socket"]["ListenStream"] == "127.0.0.1:8000"
    settings = ServerSettings()
    assert int(service["TimeoutStopSec"]) > settings.drain_s
    assert int(units["socket"]["Socket"]["Backlog"]) == settings.max_connections
    page = (ROOT / "docs" / "how-to" / "deploy.md").read_text()
    for name in ("ExecStart", "KillMode", "TimeoutStopSec", "Restart"):
        assert f"    {name}={service[name]}" in page
