"""The process that publishes KV events beside `mmengine serve`."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from mmengine.errors import ConfigError
from mmengine.extras import install_hint

END_S = 5  # for it to end by itself


def check_installed() -> None:
    if find_spec("zmq") is None:
        raise ConfigError(f"--kv-events needs ZeroMQ: {install_hint('kv-events')}")


@contextmanager
def publishing(log: Path | None, publish: str, replay: str, topic: str) -> Iterator[None]:
    """`mmengine log kv-events` runs on `log` meanwhile, where `publish` says at which endpoint. It ends with
    this process, however that ends. Raises ConfigError."""
    if not publish:
        if replay or topic:
            raise ConfigError("--kv-events-replay and --kv-events-topic go with --kv-events")
        yield
        return
    if log is None:
        raise ConfigError("--kv-events tells what the event log says; give --log, a folder, too")
    check_installed()
    asked = ["--publish", publish, *(["--replay", replay] if replay else []), "--topic", topic, "--beside"]
    verb = [sys.executable, "-m", "mmengine.cli.main", "log", "kv-events", str(log), *asked]
    process = subprocess.Popen(verb, stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
