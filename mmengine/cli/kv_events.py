"""Runs the process that publishes KV events while `mmengine serve` runs."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from mmengine.errors import ConfigError
from mmengine.extras import install_hint

END_S = 5  # Seconds to wait for the end of the process before killing it.


def check_installed() -> None:
    if find_spec("zmq") is None:
        raise ConfigError(f"--kv-events needs ZeroMQ: {install_hint('kv-events')}")


@contextmanager
def publishing(log: Path | None, publish: str, replay: str, topic: str) -> Iterator[None]:
    """Run `mmengine log kv-events` on `log` until the context ends, if `publish` names an endpoint.

    The child process also ends if this process is killed. Raises ConfigError.
    """
    if not publish:
        if replay or topic:
            raise ConfigError("--kv-events-replay and --kv-events-topic need --kv-events")
        yield
        return
    if log is None:
        raise ConfigError("--kv-events reads the event log; give --log FOLDER, too")
    check_installed()
    options = ["--publish", publish, *(["--replay", replay] if replay else []), "--topic", topic, "--beside"]
    command = [sys.executable, "-m", "mmengine.cli.main", "log", "kv-events", str(log), *options]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
