"""Tests which GGUF files of a hub's model are fetched, with the real clients and a fake hub."""

import pytest
from huggingface_hub import constants

from mmengine.checkpoint.gguf.pair import gguf_file, projector_file
from mmengine.errors import ModelError
from mmengine.hubs.fetch import fetch_description, fetch_model
from mmengine.models.loader import resolve_folder
from tests.hubs.fake_hub import REPO

DATA = bytes(range(256)) * 8
MODELS = {name: DATA + name.encode() for name in ("m-BF16.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf")}
PARTS = {f"UD-Q4_K_XL/m-UD-Q4_K_XL-0000{number}-of-00002.gguf": DATA + bytes([number]) for number in (1, 2)}
PROJECTORS = {"mmproj-BF16.gguf": DATA + b"16", "mmproj-Q8_0.gguf": DATA + b"8"}
OTHERS = {"README.md": b"#", "config.json": b"{}", "imatrix.gguf": DATA, "mtp-m-Q4_K_M.gguf": DATA}


@pytest.fixture
def hub(empty_hub):
    empty_hub.revisions = {"main": PARTS | OTHERS | MODELS | PROJECTORS, "v1": MODELS}
    return empty_hub


def refused(name, words):
    with pytest.raises(ModelError, match=words) as error:
        fetch_model(name)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


@pytest.mark.parametrize(
    ("tag", "file", "projector"),
    [
        (None, "m-Q4_K_M.gguf", "mmproj-Q8_0.gguf"),
        ("Q4_K_M", "m-Q4_K_M.gguf", "mmproj-Q8_0.gguf"),
        ("bf16", "m-BF16.gguf", "mmproj-BF16.gguf"),
    ],
)
def test_a_tag_fetches_its_file_and_the_projector(name, hub, tag, file, projector):
    path = fetch_model(name._replace(tag=tag))
    assert path.name == file and path.read_bytes() == MODELS[file]
    assert projector_file(path) == path.parent / projector
    assert hub.fetched() == sorted([file, projector])
    hub.asked.clear()
    assert fetch_model(name._replace(tag=tag)) == path and not hub.fetched()


def test_a_split_model_brings_its_parts_and_the_projector_above(name, hub):
    path = fetch_model(name._replace(tag="UD-Q4_K_XL"))
    file = gguf_file(path)
    assert file.parts[-2:] == tuple(sorted(PARTS)[0].split("/"))
    assert {f"UD-Q4_K_XL/{each.name}": each.read_bytes() for each in file.parent.iterdir()} == PARTS
    assert projector_file(path) == file.parent.parent / "mmproj-Q8_0.gguf"
    assert hub.fetched() == sorted([*PARTS, "mmproj-Q8_0.gguf"])


def test_a_model_without_a_projector(name, hub):
    hub.revisions["main"] = MODELS
    assert projector_file(fetch_model(name)) is None
    assert hub.fetched() == ["m-Q4_K_M.gguf"]


def test_errors_name_what_is_missing(name, hub):
    refused(
        name._replace(tag="Q2_K"), f"{REPO} has no GGUF file with the tag Q2_K at .*; there are: UD-Q4_K_XL/"
    )
    hub.revisions["main"] = {**PARTS, **MODELS}
    del hub.revisions["main"][sorted(PARTS)[1]]
    refused(name._replace(tag="UD-Q4_K_XL"), "00002-of-00002.gguf, which .* needs, is missing at")
    assert not hub.fetched()
    with pytest.raises(
        ModelError, match="Q8_0 is a GGUF file, which describes itself; download it, and give"
    ):
        fetch_description(name._replace(tag="Q8_0"))


def test_too_large_files_are_refused_before_the_download(name, hub):
    hub.listed = {"m-Q6_K.gguf": 2**60}
    refused(name._replace(tag="Q6_K"), "has 1,152,921,505 GB; at most 4,398 are fetched")
    assert not hub.fetched()


def test_names_that_leave_the_folder_are_never_fetched(name, hub):
    hub.listed = {"../m-Q2_K.gguf": 2, "/etc/m-Q2_K.gguf": 2, "a/../../m-Q2_K.gguf": 2, "a/*-Q2_K.gguf": 2}
    refused(name._replace(tag="Q2_K"), "has no GGUF file with the tag Q2_K")


def test_wrong_bytes_are_deleted(name, hub):
    hub.sent["m-Q8_0.gguf"] = DATA + b"m-Q8_1.gguf"
    refused(name._replace(tag="Q8_0"), "m-Q8_0.gguf of .* was deleted, because it does not match the SHA-256")


def test_without_a_network_the_cached_file_is_used(name, hub, monkeypatch):
    path = fetch_model(name._replace(tag="Q8_0"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", "http://127.0.0.1:9")
    assert fetch_model(name._replace(tag="Q8_0")) == path
    assert fetch_model(name) == path
    refused(name._replace(tag="BF16"), "could not be fetched from the hub")


def test_users_name_a_file_as_they_do_elsewhere(name, hub, monkeypatch, tmp_path):
    monkeypatch.setenv("MMENGINE_HUB", name.hub)
    wanted = fetch_model(name._replace(tag="Q8_0"))
    assert resolve_folder(f"{REPO}:Q8_0") == wanted
    if name.hub == "hf":
        assert resolve_folder(f"hf.co/{REPO}:Q8_0") == wanted
    own = tmp_path / "own.gguf"
    own.write_bytes(DATA)
    found = resolve_folder(f"{REPO}:Q8_0?mmproj={own}")
    assert (gguf_file(found), projector_file(found)) == (wanted, own)
    assert projector_file(resolve_folder(f"{REPO}:Q8_0?mmproj=none")) is None
