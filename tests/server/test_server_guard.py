"""Tests of the server's supervisor, which restarts the engine's process and reports its health."""

import json
import os
import signal
import socket
import sys
import time

import pytest

from mmengine.cli import restarts, serve, supervisor
from mmengine.cli.guard import Guard
from mmengine.cli.restarts import BLAMED_KILLS, MAX_FAILED_LOADS, Life, Restarts
from mmengine.cli.supervisor import HANG_EXIT, MAX_RESTARTS, CannotStart, Ended
from mmengine.errors import MMEngineError
from mmengine.events.lock import lock
from tests.cli.cli_process import call_cli
from tests.server.guarded import free_port, guarded

HEAVY = ("torch", "transformers", "numpy", "PIL", "uvicorn", "starlette", "uvloop", "structlog", "asyncio")


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_the_supervisor_keeps_the_socket_and_imports_little(tmp_path):
    """After a kill and a crash of the engine's process, waiting clients get answers from the next process.
    SIGTERM ends both processes.
    """
    port = free_port()
    with guarded(tmp_path, options=("--port", port, "--health-port", "0")) as one:
        one.wait_for(lambda: one.num_lives == 1)
        assert one.ask(port) == "life 0"
        assert one.health()[::2] == (200, '{"status":"ready","reasons":[]}')
        pid, cause = one.life(0)
        assert cause == ""
        os.kill(pid, signal.SIGKILL)
        assert one.ask(port, "token") == "life 1", "the client waited in the socket's backlog"
        assert one.life(1)[1] == "", "a kill from outside is not blamed on a step"
        assert one.ask(port, "die SIGSEGV") == "life 1"
        assert one.ask(port, "unwell") == "life 2"
        assert one.life(2)[1] == "the process died from SIGSEGV"
        one.wait_for(lambda: one.health()[0] == 503)
        status, headers, body = one.health()
        assert json.loads(body) == {"status": "not ready", "reasons": ["a reason"]}
        assert headers["retry-after"] == "7" and one.health("/health/live")[0] == 200
        one.process.send_signal(signal.SIGHUP)
        one.wait_for((tmp_path / "hup").exists)
        one.process.send_signal(signal.SIGTERM)
        assert one.ends() == 0
        assert not is_alive(one.life(2)[0]) and one.num_lives == 3
        modules = one.said.partition("MODULES ")[2].splitlines()[0].split()
        assert "mmengine" in modules and not set(HEAVY) & set(modules)
        rss_mb = int(one.said.partition("VmRSS:")[2].split()[0]) / 1024
        print(f"the supervisor holds {rss_mb:.1f} MB")
        assert rss_mb < 60


def test_health_without_an_engine(tmp_path):
    with guarded(tmp_path, ["loads", "serves"]) as one:
        one.wait_for(lambda: one.num_lives == 1)
        status, headers, body = one.health("/health/ready")
        error = json.loads(body)["error"]
        assert status == 503 and 1 <= int(headers["retry-after"]) <= 60
        assert error == {
            "message": "not ready: the model is being loaded",
            "type": "server_error",
            "param": None,
            "code": "not_ready",
        }
        assert one.health("/health/live")[0] == 200, "a restart would only start loading again"
        assert one.health("/metrics")[0] == 404
        os.kill(one.life(0)[0], signal.SIGKILL)
        one.wait_for(lambda: one.health()[0] == 200)


def test_a_frozen_engine_is_unhealthy(tmp_path):
    port = free_port()
    with guarded(tmp_path, options=("--port", port, "--health-port", "0")) as one:
        assert one.ask(port, "freeze") == "life 0"
        one.wait_for(lambda: one.health()[0] == 503)
        assert "the engine has not responded for" in one.health()[2]
        one.wait_for(lambda: one.health("/health/live")[0] == 503)
        for _ in range(2):
            one.process.send_signal(signal.SIGTERM)
            time.sleep(0.1)  # Two pending signals with the same number would count as one.
        assert one.ends() == 128 + signal.SIGKILL, "the engine's process did not end, so it was killed"


def test_a_frozen_engine_is_replaced(tmp_path):
    port = free_port()
    with guarded(tmp_path, options=("--port", port), frozen_s=0.8) as one:
        assert one.ask(port, "freeze") == "life 0"
        assert one.ask(port) == "life 1"
        assert "the engine has not responded for 0.8 s and is killed" in one.said


def test_the_first_signal_drains_and_refuses_new_clients(tmp_path):
    port = free_port()
    with guarded(tmp_path, ["lingers"], options=("--port", port)) as one:
        assert one.ask(port) == "life 0"
        one.process.send_signal(signal.SIGTERM)
        one.wait_for(lambda: "told 1" in one.said)
        time.sleep(0.1)
        assert one.process.poll() is None, "the engine's process decides when it has drained"
        one.process.send_signal(signal.SIGTERM)
        assert one.ends() == 7 and "told 2" in one.said and one.num_lives == 1


@pytest.mark.parametrize(
    "plan, code, lives",
    [
        (["refuses 2"], 2, 1),
        (["refuses 1"], 1, 1),
        (["built exit 70"], 70, 1),
        (["serving exit 0"], 0, 1),
        (["loading SIGTERM"], 143, 1),
        (["loading SIGABRT"], 5, MAX_FAILED_LOADS + 1),
        (["built SIGSEGV", "refuses 2"], 2, 2),
        (["serving exit 3", "refuses 1", "serving SIGKILL", "serving exit 0"], 0, 4),
        (["loading SIGKILL", f"built exit {HANG_EXIT}", "serving exit 0"], 0, 3),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, list) else "",
)
def test_exit_codes_that_end_the_supervisor(tmp_path, plan, code, lives):
    """The supervisor exits with the engine's exit code if the engine refuses to start or ends without an
    error. A refusal after successful service may be temporary, so the supervisor restarts the engine.
    """
    with guarded(tmp_path, plan, options=("--port", "0")) as one:
        assert one.ends() == code, one.said
        assert one.num_lives == lives and "Traceback" not in one.said


def test_a_failed_start_is_retried(monkeypatch, capfd):
    """A failed restart is retried, because memory may be short after an out-of-memory kill. A failed first
    start is not retried.
    """
    monkeypatch.setattr(supervisor, "COMMAND", ("/no/such/program",))
    monkeypatch.setattr(restarts, "MAX_PAUSE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        with pytest.raises(CannotStart, match="no process can be started: No such file or directory"):
            Guard([], bound, None).run()
        one = Guard([], bound, None)
        one._has_served = True
        begin = restarts.Restarts.pause_s

        def there_is_room_again(self, life):
            if self._failed_loads == 2:
                monkeypatch.setattr(supervisor, "COMMAND", (sys.executable, "-c", "pass"))
            return begin(self, life)

        monkeypatch.setattr(restarts.Restarts, "pause_s", there_is_room_again)
        assert one.run() == 0
    assert capfd.readouterr().err.count("No such file or directory; starting again") == 3


def test_a_locked_log_is_awaited(tmp_path, monkeypatch):
    """A killed process may hold the lock until its memory is freed, so the start waits. After LOCK_WAIT_S,
    the start fails.
    """
    (tmp_path / "log").mkdir()
    held = lock(tmp_path / "log")
    with guarded(tmp_path) as one:
        time.sleep(0.6)
        assert not one.num_lives and one.process.poll() is None
        os.close(held)
        one.wait_for(lambda: one.num_lives)
    held = lock(tmp_path / "log")
    monkeypatch.setattr(serve, "LOCK_WAIT_S", 0.1)
    result = call_cli("serve", "--log", tmp_path / "log", "--port", "0")
    os.close(held)
    assert result.returncode == 1
    assert result.stderr.startswith(
        f"mmengine: another process is writing the log in {tmp_path / 'log'}; stop it"
    )


def test_killing_both_processes_leaves_no_process(tmp_path):
    port = free_port()
    with guarded(tmp_path, options=("--port", port)) as one:
        assert one.ask(port) == "life 0"
        one.process.kill()
        one.process.wait()
        end = time.monotonic() + 10
        while is_alive(one.life(0)[0]):
            assert time.monotonic() < end, "the engine's process outlives its supervisor"
            time.sleep(0.01)
    with guarded(tmp_path, options=("--port", port)) as one:
        one.life(1)
        assert one.ask(port) == "life 1"


def lived(code, *, is_built=True, num_tokens=0, served_s=0.0, by_memory=False, trace="", reasons=()):
    return Life(Ended(code, trace, 0), is_built, num_tokens, served_s, reasons, by_memory)


def test_restart_pauses_grow_until_progress():
    one = Restarts()
    pauses = [one.pause_s(lived(-signal.SIGSEGV)) for _ in range(12)]
    assert pauses[:4] == [0.0, 0.1, 0.2, 0.4] and pauses[-1] == 10.0
    assert one.pause_s(lived(-signal.SIGSEGV, num_tokens=1)) == 0.0
    assert one.pause_s(lived(-signal.SIGSEGV)) == 0.1
    assert one.pause_s(lived(-signal.SIGSEGV, served_s=100.0)) == 0.0


def test_the_supervisor_gives_up_with_a_message():
    one = Restarts()
    for _ in range(MAX_RESTARTS):
        one.pause_s(lived(70, reasons=("the engine stopped: a bug",)))
    with pytest.raises(MMEngineError) as raised:
        one.pause_s(lived(70, reasons=("the engine stopped: a bug",)))
    assert str(raised.value) == (
        f"given up after {MAX_RESTARTS} restarts without a new token: the process ended with exit code 70 "
        "(the engine stopped: a bug); accepted requests stay in the log, and the same command continues "
        "with them"
    )


def test_which_requests_are_blamed_for_a_crash():
    """A crash is blamed on the crashed process's last step. A kill from outside is blamed on a step only if
    the kill repeats. A crash before the first step or in a prompt's preparation is never blamed on a step. If
    the next process is killed before reading the cause, the process that follows gets the cause.
    """
    one = Restarts()
    one.pause_s(lived(-signal.SIGSEGV, num_tokens=5))
    assert one.cause == "the process died from SIGSEGV"
    one.pause_s(lived(-signal.SIGKILL, is_built=False))
    assert one.cause == "the process died from SIGSEGV", "the process was killed before it read the cause"
    one.pause_s(lived(-signal.SIGKILL, num_tokens=5))
    assert one.cause == ""
    for number in range(1, BLAMED_KILLS):
        assert one.cause == "", number
        one.pause_s(lived(-signal.SIGKILL))
    assert one.cause == "the process was killed (SIGKILL)"
    one = Restarts()
    one.pause_s(lived(-signal.SIGKILL, by_memory=True))
    assert one.cause == "the process was killed (SIGKILL), for memory"
    one = Restarts()
    one.pause_s(lived(-signal.SIGSEGV, is_built=False))
    assert one.cause == "", "no step can run before the weights are loaded"
    one.pause_s(lived(-signal.SIGSEGV, trace='Current thread 1:\n  File "/a/serve/prompt/prompt.py"'))
    assert one.cause == "", "the preparation of a prompt crashed, not a step"
    one.pause_s(lived(HANG_EXIT))
    assert one.cause == "a step hung"
