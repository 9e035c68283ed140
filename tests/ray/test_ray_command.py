"""Tests that `mmengine serve --ray` serves requests with two replicas, and ends on SIGTERM."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

pytest.importorskip("ray", reason="Ray is not installed; make ray makes an environment with it")

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


def test_it_serves_and_ends_with_its_replicas(tmp_path):
    command = [sys.executable, "-m", "mmengine.cli.main", "serve", "--ray", "--replicas", "2", "--port", "0"]
    command += ["--replica-cpus", "0.1", "--log", str(tmp_path / "logs")]
    said = tmp_path / "said"
    with said.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        end = time.monotonic() + 300
        while (found := re.search(r"at (http://\S+)/v1 by 2 replicas", said.read_text())) is None:
            assert process.poll() is None and time.monotonic() < end, said.read_text()
            time.sleep(0.1)
        body = {"messages": [{"role": "user", "content": "What is a triangle?"}], "max_tokens": 8, "seed": 1}
        url = f"{found[1]}/v1/chat/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
        answers = [json.load(urllib.request.urlopen(request, timeout=60)) for _ in range(4)]
        assert len({each["choices"][0]["message"]["content"] for each in answers}) == 1
        with urllib.request.urlopen(f"{found[1]}/metrics", timeout=10) as response:
            assert "mmengine_fleet_open" in response.read().decode()
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0, said.read_text()
    assert len(os.listdir(tmp_path / "logs")) >= 1
