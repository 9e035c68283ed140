"""Tests adapters over HTTP. A call's `model` names an adapter. A client with the admin key can load adapters
from the root folder, and unload adapters.
"""

import json
import os

import pytest

from mmengine.checkpoint.peft import CONFIG_FILE, WEIGHTS_FILE
from mmengine.errors import ConfigError
from mmengine.serve.async_engine.async_engine import AsyncEngine
from tests.cli.cli_process import call_cli
from tests.lora.adapter_fakes import adapted_builder, made
from tests.serve.serve_fakes import TurnEcho, builder
from tests.server.running import NAMES, served

ADMIN = {"authorization": "Bearer chief"}


@pytest.fixture
def root(tmp_path):
    for name in ("one", "two"):
        made(tmp_path / "root", name)
    (tmp_path / "keys").write_text("caller\n")
    (tmp_path / "admin").write_text("chief\n")
    return tmp_path / "root"


@pytest.fixture
def server(root):
    engine = AsyncEngine(builder=adapted_builder(), loras={"first": root / "one"})
    files = {"key_file": root.parent / "keys", "admin_key_file": root.parent / "admin"}
    with served(engine, lora_root=str(root), **files) as one:
        yield one


def call(server, path, body=None, headers=ADMIN):
    status, _, answer = server.call(path, body, headers)
    return status, answer


def ask(server, model):
    body = {"messages": [{"role": "user", "content": "hi"}], "model": model}
    status, answer = call(server, "/v1/chat/completions", body, {"authorization": "Bearer caller"})
    return (status, answer["error"]["code"]) if status != 200 else answer["choices"][0]["message"]["content"]


def test_a_calls_model_names_an_adapter(server):
    assert ask(server, "first") == "first: HI"
    assert ask(server, NAMES[1]) == "HI" == ask(server, None)
    assert ask(server, "third") == (404, "model_not_found")
    _, models = call(server, "/v1/models", None, {"authorization": "Bearer caller"})
    assert [(card["id"], card["parent"]) for card in models["data"]] == [
        *((name, None) for name in NAMES),
        ("first", NAMES[0]),
    ]


def test_a_session_has_the_adapter_of_its_opening_model(root):
    engine = AsyncEngine(builder=adapted_builder(processor=TurnEcho()), loras={"first": root / "one"})
    with served(engine) as server:
        for opened, others in (("first", NAMES[0]), (NAMES[1], "first")):
            status, _, told = server.call("/v1/sessions", {"model": opened})
            assert status == 200 and told["model"] == opened
            path = f"/v1/sessions/{told['id']}/ask"
            for named in ({"model": opened}, {}):
                answer = server.call(path, {"content": "hi", "max_tokens": 30, **named})[2]
                text = answer["choices"][0]["message"]["content"]
                assert text.startswith("first: ") is (opened == "first") and "<HI>" in text
                assert answer["model"] == (opened if named or opened == "first" else NAMES[0])
            status, _, answer = server.call(path, {"content": "hi", "model": others})
            assert status == 400 and answer["error"]["param"] == "model"


def test_an_admin_loads_and_unloads(server, root):
    assert call(server, "/v1/load_lora_adapter", {"lora_name": "second", "lora_path": "two"})[0] == 200
    assert ask(server, "second") == "second: HI" and len(server.executor.known) == 2
    again = {"lora_name": "second", "lora_path": str(root / "one")}
    status, answer = call(server, "/v1/load_lora_adapter", again)
    assert status == 400 and "load_inplace" in answer["error"]["message"]
    assert call(server, "/v1/load_lora_adapter", again | {"load_inplace": True})[0] == 200
    assert len(server.executor.known) == 1, "two names of one content"
    for name in ("first", "second"):
        assert call(server, "/v1/unload_lora_adapter", {"lora_name": name})[0] == 200
    assert ask(server, "first") == (404, "model_not_found") and not server.executor.known
    assert call(server, "/v1/unload_lora_adapter", {"lora_name": "first"})[0] == 404


NO_FOLDERS = ["..", "/etc", "../outside", "link", "linked", "loop", "three", "a" * 300, "a" * 5000, "a\0b"]


@pytest.mark.parametrize("path", NO_FOLDERS)
def test_nothing_is_read_outside_of_the_root(server, root, path):
    outside = made(root.parent, "outside")
    if path == "loop":
        (root / "loop").symlink_to("loop")
    if path == "link":
        (root / "link").symlink_to(outside)
    if path == "linked":
        (root / "linked").mkdir()
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            (root / "linked" / name).symlink_to(outside / name)
    status, answer = call(server, "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": path})
    assert status == 400 and answer["error"]["param"] == "lora_path"


def test_load_errors_are_reported(server, root):
    made(root, "three", "broken")
    status, answer = call(server, "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "three"})
    assert status == 400 and "is broken" in answer["error"]["message"]
    for name in (NAMES[0], "", "a" * 300, "a\nb"):
        assert call(server, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": "two"})[0] == 400


def test_a_folder_name_that_no_log_can_hold_is_refused(server, root):
    odd = root / os.fsdecode(b"odd\xff")
    made(root, "three").rename(odd)
    (root / "link").symlink_to(odd)
    status, answer = call(server, "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "link"})
    assert status == 400 and "lora_path" in answer["error"]["message"]
    assert ask(server, "first") == "first: HI"


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer caller"}, {"x-api-key": "nobody"}])
def test_an_admin_key_is_needed(server, headers):
    for path in ("load", "unload"):
        body = {"lora_name": "first", "lora_path": "two"}
        status, answer = call(server, f"/v1/{path}_lora_adapter", body, headers)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    assert ask(server, "first") == "first: HI"


def test_without_a_root_no_adapter_is_loaded(root):
    with served(admin_key_file=root.parent / "admin") as one:
        status, answer = call(one, "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "two"})
        assert (status, answer["error"]["code"]) == (403, "no_lora_root")


def test_an_engine_without_adapter_slots_refuses_adapters(root):
    with pytest.raises(ConfigError, match="max_loras"):
        AsyncEngine(
            builder=lambda *given, takes_adapters, **options: builder()(*given, **options),
            loras={"a": root / "one"},
        )


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--lora", "mine"], "NAME=PATH"),
        (["--lora", "a=b", "--lora", "a=c"], "twice"),
        (["--lora", "a=b", "--served-model-name", "a"], "uses the model's name"),
        (["--lora-root", "."], "--admin-key-file"),
        (["--ray", "--lora", "a=b"], "--ray"),
    ],
)
def test_impossible_options_are_refused(arguments, words):
    ran = call_cli("serve", *arguments)
    assert ran.returncode == 2 and words in ran.stderr
    assert len(json.dumps(ran.stderr)) < 400
