"""Tests that sessions survive a kill -9 while a camera sends frames to `mmengine serve --log`."""

import base64
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from PIL import Image

from mmengine.replay import verify

PATIENCE_S = 60


def picture(number):
    data = io.BytesIO()
    Image.new("RGB", (64, 64), (number * 30 % 256, 90, 160)).save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


class Camera:
    """A client that repeats a call until it is answered."""

    def __init__(self, port):
        self.url = f"http://127.0.0.1:{port}/v1/sessions"

    def call(self, way="", body=None):
        end = time.monotonic() + PATIENCE_S
        while True:
            data = None if body is None else json.dumps(body).encode()
            try:
                with urllib.request.urlopen(urllib.request.Request(self.url + way, data), timeout=20) as told:
                    return json.loads(told.read())
            except (urllib.error.HTTPError, OSError) as error:
                is_final = isinstance(error, urllib.error.HTTPError) and error.code not in (409, 429, 503)
                assert not is_final and time.monotonic() < end, error
                time.sleep(0.1)


def engine_of(server):
    """Return the process ids of the supervisor's children."""
    with open(f"/proc/{server.pid}/task/{server.pid}/children") as file:
        return [int(pid) for pid in file.read().split()]


@pytest.mark.soak
def test_sessions_are_there_after_kill_9(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mmengine.cli.main", "serve", "--port", str(port)]
    server = subprocess.Popen([*command, "--log", str(tmp_path / "log"), "--no-request-log"])
    try:
        camera = Camera(port)
        session = f"/{camera.call('', {'system': 'You watch.'})['id']}"
        told = {"requests": 0}
        for number in range(8):
            frame = {"image": picture(number), "seconds": number / 2, "index": told["requests"]}
            told = camera.call(f"{session}/frame", frame)
        assert told["requests"] == 4 and told["frames_held"] == 0
        asked = {"content": "What moves?", "index": 4, "max_tokens": 8, "temperature": 0}
        answer = camera.call(f"{session}/ask", asked)["choices"]
        for pid in engine_of(server):
            os.kill(pid, signal.SIGKILL)
        assert camera.call(f"{session}/ask", asked)["choices"] == answer, "it is not answered anew"
        again = camera.call(session)
        assert again["requests"] == 5 and again["media"] == 4 and not again["kept_tokens"]
        for number in range(8, 10):
            told = camera.call(f"{session}/frame", {"image": picture(number), "seconds": number / 2})
        assert told["requests"] == 6 and told["kept_tokens"] > 0
        assert len(list((tmp_path / "log" / "media").glob("*.media"))) == 5
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(PATIENCE_S)
    assert verify(tmp_path / "log").ok
