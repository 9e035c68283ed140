"""Tests the log of a vLLM server with mmengine_vllm.Scheduler after kill -9 and after a restart. `make vllm`
runs this test.
"""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("vllm.version")  # importorskip("vllm") would import the folder tests/vllm

from mmengine.replay import verify
from mmengine_shapes import checkpoint_path

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
HERE = Path(__file__).parents[2]
OPTIONS = (
    *("--dtype", "float32", "--max-model-len", "480", "--enforce-eager", "--max-num-seqs", "4"),
    *("--block-size", "32", "--max-num-batched-tokens", "96", "--kv-cache-memory-bytes", str(64 << 20)),
    *("--scheduler-cls", "mmengine_vllm.Scheduler", "--no-async-scheduling", "--served-model-name", "shapes"),
)
NUM_LONG, LONG = 6, 400  # two of the long requests wait for a row


@contextmanager
def server(log, printed):
    """Run `vllm serve` and yield its port. Afterwards, kill all server processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = ("--model", str(checkpoint_path()), "--host", "127.0.0.1", "--port", str(port))
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *where, *OPTIONS]
    paths = os.pathsep.join(map(str, (HERE, HERE / "plugins")))
    environment = {**os.environ, "MMENGINE_LOG": str(log), "PYTHONPATH": paths}
    with printed.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=environment, cwd=HERE, start_new_session=True
        )
        try:
            wait_for(lambda: is_healthy(port), process, printed)
            yield port
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def is_healthy(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def wait_for(condition, process=None, printed=None):
    """Wait until a condition holds. The test's time limit ends the wait."""
    while not condition():
        assert process is None or process.poll() is None, printed.read_text()[-3000:]
        time.sleep(0.2)


class Client(threading.Thread):
    """Streams one answer. `tokens`: the ids that were delivered so far."""

    def __init__(self, port, name, max_tokens):
        super().__init__(daemon=True)
        self.name, self.tokens, self.is_done = name, [], False
        self._connection = http.client.HTTPConnection("127.0.0.1", port)
        body = {"model": "shapes", "prompt": f"{name}: what is a triangle?", "max_tokens": max_tokens}
        body |= {"ignore_eos": True, "temperature": 0, "stream": True, "return_token_ids": True}
        headers = {"Content-Type": "application/json", "X-Request-Id": name}
        self._connection.request("POST", "/v1/completions", json.dumps(body), headers)
        self.start()

    def run(self):
        try:
            for line in self._connection.getresponse():
                data = line.decode().removeprefix("data: ").strip()
                self.is_done |= data == "[DONE]"
                if data.startswith("{"):
                    for choice in json.loads(data)["choices"]:
                        self.tokens += choice["token_ids"] or ()
        except (OSError, http.client.HTTPException):  # the server was killed
            self._connection.close()


def pending(log):
    """Return the output of `mmengine log pending`, keyed by request id."""
    command = [sys.executable, "-m", "mmengine", "log", "pending", str(log), "--json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (HERE, HERE / "plugins")))}
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE, env=environment)
    assert done.returncode == 0, done.stderr
    return {each["request_id"]: each for each in map(json.loads, done.stdout.splitlines())}


def test_pending_lists_what_clients_got_before_a_kill(tmp_path):
    log, again = tmp_path / "log", tmp_path / "log-2"
    with server(log, tmp_path / "first.txt") as port:
        short = Client(port, "short", 4)
        clients = [Client(port, f"long{number}", LONG) for number in range(NUM_LONG)]
        wait_for(lambda: short.is_done and sum(len(client.tokens) >= 20 for client in clients) >= 3)
    for client in clients:
        client.join(60)
    left = pending(log)
    assert len(left) == NUM_LONG and not any("short" in name for name in left), left.keys()
    for client in clients:
        (found,) = (each for name, each in left.items() if client.name in name)
        assert found["max_tokens"] == LONG and not client.is_done
        assert found["output_tokens"][: len(client.tokens)] == client.tokens
        assert not client.tokens or found["state"] == "running"
    assert {each["state"] for each in left.values()} == {"running", "waiting"}
    num_delivered = [len(client.tokens) for client in clients]
    num_logged = [len(each["output_tokens"]) for each in left.values()]
    print(f"\nkill -9: clients had {num_delivered} tokens, the log has {sorted(num_logged, reverse=True)}")
    assert verify(log).divergence is None
    with server(log, tmp_path / "second.txt") as port:
        answer = Client(port, "later", 8)
        wait_for(lambda: answer.is_done)
    assert pending(log).keys() == left.keys() and not pending(again)
