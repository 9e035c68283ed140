"""Tests `mmengine serve` as a process with the included model."""

import base64
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import jsonschema
import pytest

from mmengine.cli import serve_config
from mmengine.events import vocabulary as ev
from mmengine.replay.checked_log import CheckedLog
from tests.cli.cli_process import call_cli
from tests.pictures import scene
from tests.project.doc_blocks import blocks

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    (folder / "serve.yaml").write_text(
        "port: 0\nserved-model-name: [shapes, other]\nmax_body_bytes: 100000\nlive: true\n"
    )
    (folder / "keys").write_text("# the first\nsecret-1\n")
    env = {**os.environ, "MMENGINE_API_KEY_FILE": str(folder / "keys"), "MMENGINE_PING_S": "5"}
    arguments = ("serve", "--config", str(folder / "serve.yaml"), "--log", str(folder / "run.log"))
    with open(folder / "err", "w") as err:
        started = subprocess.Popen(
            [sys.executable, "-m", "mmengine.cli.main", *arguments], env=env, stderr=err
        )
    try:
        yield started, folder, address_of(started, folder / "err")
    finally:
        started.kill()
        started.wait()


def address_of(started, err):

    for _ in range(1200):
        said = err.read_text()
        if " at http://" in said:
            return said.rpartition(" at ")[2].split("/v1")[0]
        assert started.poll() is None, said
        time.sleep(0.05)
    raise AssertionError(err.read_text())


def call(address, path, body=None, key="secret-1"):
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(address + path, data, headers), timeout=60) as got:
            return got.status, json.loads(got.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_all_routes_except_health_need_a_key(process):
    _, folder, address = process
    assert call(address, "/health", key=None) == (200, {"status": "ready", "reasons": []})
    status, body = call(address, "/v1/models", key=None)
    assert status == 401 and body["error"]["type"] == "authentication_error"
    assert call(address, "/v1/models", key="secret-2")[0] == 401
    assert [each["id"] for each in call(address, "/v1/models")[1]["data"]] == ["shapes", "other"]
    (folder / "keys").write_text("secret-1\nsecret-2\n")
    process[0].send_signal(signal.SIGHUP)
    for _ in range(100):
        if call(address, "/v1/models", key="secret-2")[0] == 200:
            break
        time.sleep(0.02)
    else:
        raise AssertionError("the keys were not read again")


def test_answers_and_detokenization(process):
    address = process[2]
    status, answer = call(
        address,
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "What is a triangle?"}],
            "logprobs": True,
            "top_logprobs": 1,
        },
    )
    choice = answer["choices"][0]
    assert status == 200 and choice["finish_reason"] == "stop" and answer["model"] == "shapes"
    said = b"".join(bytes(each["bytes"]) for each in choice["logprobs"]["content"][:-1])
    assert said.decode() == choice["message"]["content"]
    tokens = call(address, "/tokenize", {"prompt": choice["message"]["content"], "return_token_strs": True})[
        1
    ]
    assert tokens["count"] == len(tokens["tokens"]) == answer["usage"]["completion_tokens"] - 1
    assert call(address, "/detokenize", {"tokens": tokens["tokens"]})[1] == {
        "prompt": choice["message"]["content"]
    }
    asked = {"messages": [{"role": "user", "content": "What is a triangle?"}]}
    assert call(address, "/tokenize", asked)[1]["count"] == answer["usage"]["prompt_tokens"]
    status, answer = call(
        address,
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": "Say it."},
                {"role": "assistant", "content": "The triangle is"},
            ],
            "continue_final_message": True,
            "max_tokens": 3,
        },
    )
    assert status == 200 and answer["choices"][0]["message"]["content"]


def test_the_readmes_request_is_answered(process):
    (shown,) = blocks("README.md", "bash")
    text = shown.text.partition("<<EOF\n")[2].removesuffix("EOF\n")
    image = base64.b64encode((ROOT / "docs" / "images" / "shapes.png").read_bytes()).decode()
    body = json.loads(text.replace("$(base64 -w0 demo/image1.png)", image))
    status, answer = call(process[2], "/v1/chat/completions", body)
    content = answer["choices"][0]["message"]["content"]
    assert status == 200 and content in (ROOT / "README.md").read_text()


def test_the_examples_run(process, tmp_path):

    address = process[2]
    image = tmp_path / "shapes.png"
    image.write_bytes(scene())
    pytest.importorskip("openai")
    script = (ROOT / "examples" / "chat_image_schema.py").read_text().replace('"none"', '"secret-1"')
    (tmp_path / "script.py").write_text(script)
    ran = subprocess.run(
        [sys.executable, tmp_path / "script.py", image, f"{address}/v1"], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    value = eval(ran.stdout, {"__builtins__": {}})
    schema = {"type": "object", "required": ["shape", "colour"], "additionalProperties": {"type": "string"}}
    jsonschema.validate(value, schema)
    if shutil.which("curl"):
        ran = subprocess.run([ROOT / "examples" / "chat.sh", address], capture_output=True, text=True)
        assert json.loads(ran.stdout)["error"]["code"] == "invalid_api_key"


def test_the_first_steps_run_before_the_server_listens(process):
    """The warm-up generates from a text, and from an image with structured output."""
    _, folder, address = process
    said = [line for line in (folder / "err").read_text().splitlines() if line.startswith("mmengine: ")]
    assert [line.split()[1] for line in said[:4]] == ["loading", "loaded", "running", "serving"]
    assert "form has notes" not in (folder / "err").read_text()
    assert said[3].endswith(f" at {address}/v1, live page {address}/live")
    queued = [each.event for each in CheckedLog(folder / "run.log") if isinstance(each.event, ev.Queued)]
    first, second = queued[:2]
    assert first.request_id.startswith("warm-up-") and second.request_id.startswith("warm-up-")
    assert not first.media and first.grammar is None and not first.envelope
    assert second.media and second.grammar is not None and not second.envelope


def test_a_killed_engine_is_replaced_on_the_same_socket(process):
    """A client may connect before the new process is ready. The client then waits and gets an answer. SIGHUP
    still reloads the keys.
    """
    started, folder, address = process
    (child,) = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
    os.kill(int(child), signal.SIGKILL)
    while Path(f"/proc/{child}").exists():
        time.sleep(0.01)
    os.kill(started.pid, signal.SIGHUP)  # The new process must read the keys again.
    asked = {"messages": [{"role": "user", "content": "What is a triangle?"}], "max_tokens": 5}
    begun = time.monotonic()
    status, answer = call(address, "/v1/chat/completions", asked)
    print(f"answered {time.monotonic() - begun:.1f} s after the engine's process had ended")
    assert status == 200 and answer["usage"]["completion_tokens"] == 5
    said = (folder / "err").read_text()
    assert "the process was killed (SIGKILL), " in said and "; starting again\n" in said
    assert started.poll() is None and said.count("serving shapes, other at") == 2
    for _ in range(100):
        if "API keys reloaded" in (folder / "err").read_text().rpartition("starting again")[2]:
            break
        time.sleep(0.02)
    else:
        raise AssertionError("SIGHUP was lost")


def test_sigterm_ends_it_and_the_log_verifies(process):
    started, folder, _ = process
    started.send_signal(signal.SIGTERM)
    assert started.wait(30) == 0
    assert "Traceback" not in (folder / "err").read_text()
    assert call_cli("log", "verify", folder / "run.log").returncode == 0
    assert '"What is a triangle' not in (folder / "err").read_text()


def test_mistakes_are_reported_before_a_model_is_loaded(tmp_path):
    (tmp_path / "a.yaml").write_text("prot: 1\n")
    (tmp_path / "first.yaml").write_text("first: a/b\n")
    (tmp_path / "empty").write_text("# nothing\n")
    (tmp_path / "day.yaml").write_text("port: 2020-99-99\n")
    (tmp_path / "deep.yaml").write_text("[" * 5000)
    (tmp_path / "large.yaml").write_text("port: 1\n#" + "a" * 2**20)
    (tmp_path / "broken.jinja").write_text("{% for %}")
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    for arguments, says in (
        (["--config", tmp_path / "a.yaml"], "unknown option 'prot'"),
        (["--config", tmp_path / "first.yaml"], "unknown option 'first'"),
        (["--config", tmp_path / "b.yaml"], "cannot be read: No such file"),
        (["--config", tmp_path / "day.yaml"], "day.yaml is not valid YAML"),
        (["--config", tmp_path / "deep.yaml"], "deep.yaml is not valid YAML"),
        (["--config", tmp_path / "large.yaml"], "it has more than 1,048,576 bytes"),
        (["--port", "99999"], "port must lie in 0 to 65535, not 99999"),
        (["--api-key-file", tmp_path / "empty"], "holds no API key"),
        (["--ssl-certfile", "x"], "ssl_certfile and ssl_keyfile require each other"),
        (["--set", "tokens=1"], "unknown engine setting 'tokens'"),
        (["--host", "203.0.113.7"], "cannot listen on 203.0.113.7:8000 (Cannot assign requested address);"),
        (["--port", port], f"cannot listen on 127.0.0.1:{port} (Address already in use); choose another"),
        (["--host", "a.invalid"], "cannot listen on a.invalid:8000 ("),
        (["--port", 0, "--chat-template", tmp_path / "broken.jinja"], "broken.jinja is not a valid template"),
        (["--port", 0, "--model", tmp_path / "none"], "none; give one with config.json and the weights"),
    ):
        result = call_cli("serve", *arguments)
        assert result.returncode == 2 and says in result.stderr, result.stderr
        assert "while" not in result.stderr and "loaded" not in result.stderr
        assert "Traceback" not in result.stderr
    taken.close()


def test_a_missing_library_is_reported_with_its_install_command(monkeypatch):

    monkeypatch.setattr(serve_config, "NEEDED", ("starlette", "no_such_library"))
    result = call_cli("serve")
    assert result.returncode == 2
    assert "mmengine serve needs no_such_library: pip install '.[serve]' from a checkout" in result.stderr
