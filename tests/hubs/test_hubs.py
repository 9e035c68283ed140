"""Tests fetching hub models with the real clients from a fake hub. Most tests run for both hubs, which must
behave alike.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from mmengine.checkpoint.tensors import weight_files
from mmengine.errors import ModelError
from mmengine.hubs import fetch
from mmengine.hubs.fetch import fetch_model
from mmengine.hubs.names import HubName, parse_name
from mmengine.models.loader import resolve_folder
from tests.hubs.fake_hub import LARGE, REPO, FakeHub, running

modelscope_hub = pytest.importorskip("modelscope_hub")

WEIGHTS = bytes(range(256)) * 16
INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
WHOLE = {
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors.index.json": INDEX,
    "model-1.safetensors": WEIGHTS,
    "model-2.safetensors": WEIGHTS[::-1],
}
UNWANTED = {
    "consolidated.safetensors": WEIGHTS,
    "pytorch_model.bin": WEIGHTS,
    "modeling_tiny.py": b"raise SystemExit",
    "original/params.json": b"{}",
}


@pytest.fixture
def hub(empty_hub):
    empty_hub.revisions = {"main": WHOLE | UNWANTED, "v1": WHOLE | {"config.json": b'{"old": 1}'}}
    return empty_hub


def refused(name, words: str) -> str:
    with pytest.raises(ModelError, match=words) as error:
        fetch_model(name)
    text = str(error.value)
    assert "\n" not in text and len(text) < 500 and REPO in text
    return text


def test_only_files_that_the_engine_reads_are_fetched(name, hub):
    folder = fetch_model(name)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == WHOLE
    assert hub.fetched() == sorted(WHOLE)
    hub.asked.clear()
    assert fetch_model(name) == folder
    assert not hub.fetched()  # Cached already.


def test_a_single_file_is_preferred_to_an_index(name, hub):
    """Only the files that `weight_files` chooses are fetched."""
    hub.revisions["main"]["model.safetensors"] = WEIGHTS[:1000]
    folder = fetch_model(name)
    assert [path.name for path in weight_files(folder)] == ["model.safetensors"]
    assert [file for file in hub.fetched() if file.endswith("safetensors")] == ["model.safetensors"]


def test_a_revision_is_another_folder(name, hub):
    new, old = fetch_model(name), fetch_model(name._replace(revision="v1"))
    assert new != old
    assert [folder.joinpath("config.json").read_bytes() for folder in (new, old)] == [b"{}", b'{"old": 1}']
    refused(name._replace(revision="v2"), f"{REPO} has no revision v2 at ")


def test_a_cut_download_continues_where_it_stopped(name, hub):
    hub.cut_after["model-1.safetensors"] = 1000
    folder = fetch_model(name)
    assert (folder / "model-1.safetensors").read_bytes() == WEIGHTS
    assert "GET model-1.safetensors bytes=1000-" in hub.asked


def test_an_interrupted_download_keeps_complete_files(name, hub):
    hub.cut_after["model-1.safetensors"], hub.always_cut = 1000, True
    refused(name, "could not be fetched completely.*; try again, complete files are kept")
    hub.cut_after.clear()
    assert (fetch_model(name) / "model-1.safetensors").read_bytes() == WEIGHTS
    assert hub.asked.count("GET config.json") == 1


def test_bytes_that_differ_from_the_list_are_discarded(name, hub):
    hub.sent["model-1.safetensors"] = bytes(len(WEIGHTS))
    refused(name, r"model-1.safetensors of .* does not match the SHA-256")
    assert not [path for path in large_files() if path.read_bytes() == hub.sent["model-1.safetensors"]]
    hub.sent.clear()
    assert (fetch_model(name) / "model-1.safetensors").read_bytes() == WEIGHTS


def large_files():
    """Return the weight files in the caches."""
    return [path for path in Path.cwd().rglob("*") if path.is_file() and path.stat().st_size >= LARGE]


def test_a_missing_file_is_reported(name, hub):
    hub.gone.add("model-2.safetensors")
    refused(name, r"model-2\.safetensors, which .* needs, is missing at ")
    hub.gone.clear()
    del hub.revisions["v1"]["model-2.safetensors"]
    refused(name._replace(revision="v1"), r"model-2\.safetensors, which .* needs, is missing at ")


def test_a_gated_model_explains_how_to_get_access(name, hub):
    hub.gated = True
    text = refused(name, "is restricted")
    assert "HF_TOKEN" in text or "MODELSCOPE_API_TOKEN" in text


def test_an_unknown_model_is_reported(name, hub):
    with pytest.raises(ModelError, match="there is no folder acme/none, and .* has no such model"):
        fetch_model(name._replace(repo="acme/none"))


def test_without_the_network_the_cache_is_used(name, hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused(name, "there is no folder .* could not be fetched from the hub, .*HF_HUB_OFFLINE is set")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    folder = fetch_model(name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.asked.clear()
    assert fetch_model(name) == folder and not hub.asked


def test_a_hub_that_does_not_answer(name, hub, monkeypatch):
    folder = fetch_model(name)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", "http://127.0.0.1:9")
    assert fetch_model(name) == folder
    with pytest.raises(ModelError, match="there is no folder acme/none, .* check the name and the network"):
        fetch_model(name._replace(repo="acme/none"))


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        ({"model-1.safetensors": 2**60}, "has 1,152,921,505 GB; at most 4,398 are fetched"),
        ({"model-1.safetensors": 2**42 - 2**20}, "GB more in .*, and .* are free; free some space"),
        ({f"{number}.json": 1 for number in range(99)}, "files beside its weights; at most 64"),
        ({"config.json": 2**30}, "has no config.json"),
    ],
)
def test_too_large_models_are_refused_before_the_download(name, hub, listed, words):
    hub.listed = listed
    refused(name, words)
    assert not [file for file in hub.fetched() if file.endswith("safetensors")]


def test_files_shared_with_another_commit_need_no_space(name, hub, monkeypatch):
    """After a commit that changes only a README, no file is downloaded again."""
    if name.hub != "hf":
        pytest.skip("the cache of ModelScope has no commits")
    first = fetch_model(name)
    hub.revisions["main"]["README.md"] = b"new"
    free = []
    usage = SimpleNamespace(free=len(WEIGHTS) - 1)
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda place: free.append(place) or usage)
    hub.asked.clear()
    second = fetch_model(name)
    assert second != first and (second / "model-1.safetensors").read_bytes() == WEIGHTS and free
    assert not [file for file in hub.asked if file.startswith("GET model")]
    hub.revisions["main"]["model-2.safetensors"] = WEIGHTS[1:] + b"?"
    refused(name, "needs 0.0 GB more in .*, and 0.0 GB are free; free some space")
    (first / "model-1.safetensors").resolve().write_bytes(WEIGHTS[1:])  # Changed by another program.
    hub.revisions["main"]["model-2.safetensors"] = WHOLE["model-2.safetensors"]
    hub.revisions["main"]["README.md"] = b"newer"
    refused(name, "needs 0.0 GB more")


def test_names_that_leave_the_folder_are_never_fetched(name, hub):
    hub.listed = {"../evil.json": 2, "/etc/evil.json": 2, "a/../../evil.json": 2, "..json": 2}
    fetch_model(name)
    assert hub.fetched() == sorted(WHOLE)
    hub.listed = {}
    files = hub.revisions["main"]
    files["model.safetensors.index.json"] = json.dumps(
        {"weight_map": {"a": "../model-1.safetensors"}}
    ).encode()
    files["config.json"] = b"{  }"  # This change makes a new commit.
    with pytest.raises(ModelError, match="not a safetensors file in this folder"):
        fetch_model(name)


@pytest.mark.parametrize(
    ("text", "variable", "meant"),
    [
        ("a/b", None, ("hf", "a/b", None)),
        ("a/b", "modelscope", ("modelscope", "a/b", None)),
        ("hf:a/b@main", "modelscope", ("hf", "a/b", "main")),
        ("modelscope:a/b-1.5@refs/pr/3", None, ("modelscope", "a/b-1.5", "refs/pr/3")),
        ("gpt2", "", ("hf", "gpt2", None)),
        ("a/b-GGUF:Q4_K_M", None, ("hf", "a/b-GGUF", None, "Q4_K_M")),
        ("a/b:UD-Q4_K_XL@v1", None, ("hf", "a/b", "v1", "UD-Q4_K_XL")),
        ("modelscope:a/b:Q8_0", None, ("modelscope", "a/b", None, "Q8_0")),
        ("hf.co/a/b:Q8_0", "modelscope", ("hf", "a/b", None, "Q8_0")),
        ("https://huggingface.co/a/b", None, ("hf", "a/b", None)),
        ("hf.co/b", None, ("hf", "hf.co/b", None)),
        ("a:Q8_0", None, None),
        ("a/b:", None, None),
        ("a/b:Q8/0", None, None),
        ("ollama:a/b", None, None),
        ("a/../b", None, None),
        ("a/b/c", None, None),
    ],
)
def test_names(text, variable, meant, monkeypatch):
    monkeypatch.delenv("MMENGINE_HUB", raising=False)
    if variable is not None:
        monkeypatch.setenv("MMENGINE_HUB", variable)
    assert parse_name(text) == (None if meant is None else HubName(*meant))


@pytest.mark.parametrize(
    ("text", "variable", "words"),
    [
        ("a/b@", None, "is not a valid revision"),
        ("a/b@../c", None, "is not a valid revision"),
        ("a/b", "ollama", "MMENGINE_HUB is 'ollama'; set it to hf or modelscope"),
    ],
)
def test_names_that_are_refused(text, variable, words, monkeypatch):
    monkeypatch.setenv("MMENGINE_HUB", variable or "")
    with pytest.raises(ModelError, match=words):
        parse_name(text)


def test_modelscope_without_its_client_tells_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "modelscope_hub", None)
    with pytest.raises(ModelError, match=r"pip install '\.\[modelscope\]'"):
        resolve_folder(f"modelscope:{REPO}")


def test_a_mirror_is_named_by_the_environment(tmp_path):
    """The client reads HF_ENDPOINT on import, so the test needs a new process."""
    with running(FakeHub({"main": WHOLE})) as hub:
        environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        code = f"from mmengine.models.loader import resolve_folder; print(resolve_folder({REPO!r}))"
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True
        )
        assert hub.fetched() == sorted(WHOLE), done.stderr
    assert done.stdout.strip().startswith(str(tmp_path))
