"""Tests that every call is answered although the engine's process dies again and again under its supervisor.
The exception is a call that kills the process.
"""

import http.client
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from mmengine.replay.verify import verify
from tests.server.guarded import as_systemd, free_port

pytestmark = pytest.mark.soak
ROOT = Path(__file__).parents[2]
PATIENCE_S = 120
SERVER = """
import os, signal, sys, time
from mmengine.cli import serve, supervisor
from mmengine.core.resume import Resume
from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.serve.engine.engine import Engine
from tests.serve import serve_fakes as fakes

breaks = os.path.join(os.path.dirname(sys.argv[-1]), "break")
step = Engine.step

def stepped(self, **options):
    if os.path.exists(breaks):
        os.unlink(breaks)
        raise RuntimeError("a bug of the engine's")
    return step(self, **options)

Engine.step = stepped
dispatch, collect = fakes.EchoExecutor.dispatch, fakes.EchoExecutor.collect

def note(self, plan):
    dispatch(self, plan)
    self.names = {self._rows[row].request_id for row in plan.rows.tolist()}

def kill(self):
    if any("killer" in name for name in self.names):
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(0.005)
    return collect(self)

fakes.EchoExecutor.dispatch, fakes.EchoExecutor.collect = note, kill

def engine(model, log, config, progress, beats, loras):
    build = serve.then(fakes.builder(max_num_seqs=8, num_blocks=400), lambda found: beats.report_built())
    return AsyncEngine(builder=build, log=log.log, resume=Resume(cause=supervisor.ended_by()))

serve._engine = engine
from mmengine.cli.main import main
main()
"""
PACED = """
import time
from mmengine.serve.engine.engine import Engine

step = Engine.step

def paced(self, **options):
    time.sleep(0.015)  # so that something is unfinished at each death
    return step(self, **options)

Engine.step = paced
from mmengine.cli.main import main
main()
"""
SUPERVISOR = """
import sys
from mmengine.cli import supervisor
supervisor.COMMAND = (sys.executable, "-c", {server!r})
sys.argv = ["mmengine", *{arguments!r}]
from mmengine.cli.main import main
main()
"""


@contextmanager
def serving(folder, port, server=PACED, given=None):
    """Run the supervisor's process. `server`: the engine process's code. `given`: the listening socket."""
    arguments = ["serve", "--port", str(port), "--log", str(folder / "log")]
    script = SUPERVISOR.format(server=server, arguments=arguments)
    command, fds = as_systemd([sys.executable, "-c", script], given)
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'plugins'}"}
    with (folder / "err").open("a") as err:
        process = subprocess.Popen(command, stderr=err, env=env, pass_fds=fds)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def child_of(process):
    """Return the engine process's id, or None."""
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    found = path.read_text().split()
    return int(found[0]) if found else None


def kill_child(process):
    if (pid := child_of(process)) is not None:
        os.kill(pid, signal.SIGKILL)


def answer_of(port, key, body):
    """Return the final status and body for a client that retries after broken connections and status 503."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        try:
            headers = {"content-type": "application/json", "idempotency-key": key}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            response = connection.getresponse()
            body_of_it = json.loads(response.read())
            if response.status != 503:
                return response.status, body_of_it
            time.sleep(0.3)
        except (OSError, http.client.HTTPException):
            time.sleep(0.3)
        finally:
            connection.close()
    raise AssertionError(f"no answer for {key}")


def answers_of(port, bodies, meanwhile):
    """Send all bodies in parallel, and return the answers by key. `meanwhile` is called with a function that
    returns the number of answers.
    """
    found = {}

    def ask(key, body):
        found[key] = answer_of(port, key, body)

    threads = [threading.Thread(target=ask, args=each) for each in bodies.items()]
    for thread in threads:
        thread.start()
    meanwhile(lambda: len(found))
    for thread in threads:
        thread.join(PATIENCE_S)
    return found


def body_of(text, **fields):
    return {"messages": [{"role": "user", "content": text}], **fields}


def check_log(folder):
    """Check that the log verifies and each request ends once."""
    report = verify(folder / "log")
    assert report.ok and not report.unfinished
    events = [record.event for record in LogReader(folder / "log")]
    ended = [event.request_id for event in events if isinstance(event, ev.Finished)]
    assert len(ended) == len(set(ended)), "each once"
    return events


def end(process):
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0


def test_a_request_that_kills_the_process_fails_and_the_others_continue(tmp_path):
    port = free_port()
    bodies = {name: body_of(f"text of {name} " * 10, request_id=name) for name in ("a", "b", "c", "d")}
    bodies["killer"] = body_of("text of a killer", request_id="killer")
    with serving(tmp_path, port, SERVER) as process:
        found = answers_of(port, bodies, lambda count: None)
        end(process)
    said = (tmp_path / "err").read_text()
    print(said.count("starting again"), "restarts")
    status, body = found.pop("killer")
    assert status == 500 and "request killer failed" in body["error"]["message"]
    assert body["error"]["code"] == "request_failed"
    for name, (status, body) in found.items():
        text = f"text of {name} " * 10
        assert status == 200 and body["choices"][0]["message"]["content"].strip() == text.upper().strip(), (
            name
        )
    events = check_log(tmp_path)
    failed = [event for event in events if isinstance(event, ev.Failed)]
    assert 2 <= len(failed) <= 5 and all("SIGSEGV" in event.error for event in failed)
    assert said.count("starting again") == len(failed)


def test_kills_at_random_while_the_supervisor_lives(tmp_path):
    """Some kills hit a new process while it loads the engine or resumes the log."""
    port, chance, killed = free_port(), random.Random(19), []
    bodies = {
        f"q{number}": body_of(f"What is shape {number}?", max_tokens=200, ignore_eos=True, seed=number)
        for number in range(12)
    }

    def meanwhile(process, count):
        while count() < len(bodies) and len(killed) < 8:
            time.sleep(chance.choice((0.3, 1.0, 2.5, 4.0)) * (0.5 + chance.random()))
            if (pid := child_of(process)) is not None:
                killed.append((pid, count()))
                os.kill(pid, signal.SIGKILL)

    with serving(tmp_path, port) as process:
        found = answers_of(port, bodies, lambda count: meanwhile(process, count))
        pid = process.pid
        again = answers_of(port, {f"{name} again": body for name, body in bodies.items()}, lambda count: None)
        assert process.poll() is None and process.pid == pid
        end(process)
    print(f"{len(killed)} kills, open at each: {[len(bodies) - done for _, done in killed]}")
    assert len(killed) >= 3
    for name, (status, body) in found.items():
        assert status == 200, (name, body)
        assert body["choices"][0]["message"] == again[f"{name} again"][1]["choices"][0]["message"], name
    check_log(tmp_path)


def test_both_are_killed_and_the_same_command_goes_on(tmp_path):
    port = free_port()
    bodies = {
        f"q{number}": body_of(f"What is shape {number}?", max_tokens=400, ignore_eos=True)
        for number in range(8)
    }

    unfinished = []

    def meanwhile(count):
        for number in range(3):
            with serving(tmp_path, port) as process:  # killed afterwards, with its child
                time.sleep(3.5)
                if number == 1:
                    kill_child(process)
                    time.sleep(1.0)
                unfinished.append(len(bodies) - count())
        with serving(tmp_path, port) as process:
            while count() < len(bodies):
                time.sleep(0.05)
            end(process)

    found = answers_of(port, bodies, meanwhile)
    print(f"open at each death of both: {unfinished}")
    assert unfinished[1] and {status for status, _ in found.values()} == {200}
    assert "another process writes the log" not in (tmp_path / "err").read_text()
    check_log(tmp_path)


def test_a_server_that_is_started_again_in_good_order_breaks_no_connection(tmp_path):
    """This process owns the socket, as systemd does. Each call has its own connection and is not repeated."""
    said, done = [], threading.Event()

    def ask(port, number):
        while not done.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
            try:
                body = json.dumps(body_of(f"What is shape {number}?", max_tokens=5))
                connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
                said.append(connection.getresponse().status)
            except (OSError, http.client.HTTPException) as error:
                said.append(type(error).__name__)
            finally:
                connection.close()

    with socket.create_server(("127.0.0.1", 0), backlog=128) as bound:
        port = bound.getsockname()[1]
        threads = [threading.Thread(target=ask, args=(port, number)) for number in range(8)]
        for thread in threads:
            thread.start()
        for number in range(3):
            before = len(said)
            with serving(tmp_path, port, given=bound) as process:
                while len(said) < before + 60:
                    time.sleep(0.05)
                if number == 2:
                    done.set()
                    for thread in threads:
                        thread.join(PATIENCE_S)
                end(process)
    counts = {each: said.count(each) for each in set(said)}
    print(f"calls while a server was started again twice: {counts}")
    assert counts == {200: len(said)}
    check_log(tmp_path)


def test_an_engine_that_stops_is_followed_by_another_process(tmp_path):
    port = free_port()
    bodies = {f"q{number}": body_of(f"text of {number} " * 12) for number in range(4)}

    def meanwhile(count):
        while not (tmp_path / "err").read_text().count("serving"):
            time.sleep(0.01)
        (tmp_path / "break").touch()

    with serving(tmp_path, port, SERVER) as process:
        found = answers_of(port, bodies, meanwhile)
        end(process)
    said = (tmp_path / "err").read_text()
    assert "the process ended with exit code 1 (the engine stopped: RuntimeError: a bug" in said
    assert said.count("starting again") == 1 and {status for status, _ in found.values()} == {200}
    check_log(tmp_path)


def test_where_the_seconds_of_a_restart_go(tmp_path):
    """Prints each restart stage's median time in seconds since the kill. The engine, with the package's
    checkpoint, is killed five times.
    """
    port, rows = free_port(), []
    body = body_of("What is a triangle?", max_tokens=2)
    plain = "from mmengine.cli.main import main\nmain()\n"

    def when(text, lines, begun):
        while (tmp_path / "err").read_text().count(text) <= lines:
            time.sleep(0.002)
        return time.monotonic() - begun

    def restart(process, number):
        """Kill the engine, and return the seconds from the kill to each stage of the restart."""
        begun, found = time.monotonic(), []
        kill_child(process)
        found.append(when("; starting again", number, begun))

        def meanwhile(count):
            for text in ("loading the", "loaded in", "serving mm"):
                found.append(when(text, number + 1, begun))

        assert answers_of(port, {f"{number}": body}, meanwhile)[f"{number}"][0] == 200
        return [*found, time.monotonic() - begun]

    with serving(tmp_path, port, plain) as process:
        assert answer_of(port, "first", body)[0] == 200
        for number in range(5):
            time.sleep(1.0)
            rows.append(restart(process, number))
        end(process)
    medians = [statistics.median(each) for each in zip(*rows)]
    names = "the old one is gone", "options are read", "model and log are loaded", "it listens", "answered"
    print("; ".join(f"{name} {seconds:.2f}" for name, seconds in zip(names, medians)))
    assert medians[-1] < 15
