"""Tests reading adapter folders: ranks, scales, and errors with the faulty field or tensor."""

import json
import os
import shutil
import struct
import tracemalloc

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmengine.checkpoint import peft
from mmengine.checkpoint.peft import CONFIG_FILE, MAX_RANK, MAX_TENSORS, PICKLED_FILE, WEIGHTS_FILE
from mmengine.errors import ModelError
from mmengine.hubs.fetch import adapter_from
from mmengine.hubs.hub import HubFile
from mmengine.hubs.names import parse_name
from mmengine.models.loader import resolve_adapter
from mmengine_qwen3_vl import plugin
from tests.lora.lora_models import KINDS, make_adapter, make_model

ROOM = 2**24
Q = "base_model.model.model.language_model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a model's folder and an adapter's folder."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "model").mkdir()
    model = make_model(folder / "model")
    make_adapter(model, folder / "adapter", **KINDS["patterns"])
    return folder / "model", folder / "adapter"


@pytest.fixture
def copy(made, tmp_path):
    shutil.copytree(made[1], tmp_path / "copy")
    return tmp_path / "copy"


def read(made, folder, room=ROOM):
    return plugin.read_adapter(made[0], folder, room, 4)


def with_config(folder, **fields):
    path = folder / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def with_weights(folder, change):
    weights = load_file(folder / WEIGHTS_FILE)
    change(weights)
    save_file(weights, folder / WEIGHTS_FILE)


def refused(made, folder, *words, room=ROOM):
    with pytest.raises(ModelError) as error:
        read(made, folder, room)
    text = str(error.value)
    assert all(word in text for word in words), text
    assert text.isprintable() and len(text) < 500


def test_ranks_and_scales_equal_peft(made):
    files = read(made, made[1])
    assert not files.is_visual and len(files.digest) == 32
    scales = {name: (pair.rank, pair.scale) for name, pair in files.pairs.items()}
    assert scales["text.layers.0.self_attn.q_proj"] == (4, 4.0)
    assert scales["text.layers.0.self_attn.v_proj"] == (6, 2.0)
    assert scales["text.layers.1.self_attn.v_proj"] == (6, 16 / 6)


def test_the_digest_is_of_the_content(made, copy):
    before = read(made, made[1]).digest
    assert read(made, copy).digest == before, "a copy in another folder has the same digest"
    with_weights(copy, lambda weights: weights[f"{Q}.lora_B.weight"].view(-1)[:1].add_(1))
    changed = read(made, copy).digest
    with_config(copy, lora_alpha=17)
    assert len({before, changed, read(made, copy).digest}) == 3


@pytest.mark.parametrize(
    "field, value",
    [
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("bias", "all"),
        ("lora_bias", True),
        ("fan_in_fan_out", True),
        ("layer_replication", [[0, 1]]),
        ("alora_invocation_tokens", [1]),
        ("trainable_token_indices", [1]),
        ("target_parameters", ["mlp"]),
        ("init_lora_weights", "pissa"),
        ("peft_type", "LOHA"),
        ("peft_type", None),
        ("r", 0),
        ("r", MAX_RANK + 1),
        ("r", "8"),
        ("lora_alpha", -1),
        ("lora_alpha", float("nan")),
        ("use_rslora", "yes"),
        ("rank_pattern", {"q_proj": 10**9}),
        ("rank_pattern", ["q_proj"]),
        ("alpha_pattern", {"(a+)+$": 3}),
        ("alpha_pattern", {"q_proj": "three"}),
        ("alpha_pattern", {f"m{n}": 1 for n in range(5000)}),
    ],
)
def test_fields_that_are_not_served_are_named(made, copy, field, value):
    with_config(copy, **{field: value})
    refused(made, copy, CONFIG_FILE, field)


def change_of(name):
    """Return a function that damages the weights so that the error contains `name`."""

    def gone(weights):
        del weights[f"{Q}.lora_A.weight"]

    def misshapen(weights):
        weights[f"{Q}.lora_A.weight"] = weights[f"{Q}.lora_A.weight"][:, 1:].contiguous()

    def of_another_rank(weights):
        weights[f"{Q}.lora_A.weight"] = torch.zeros(5, weights[f"{Q}.lora_A.weight"].shape[1])

    def of_b(weights):
        weights[f"{Q}.lora_B.weight"] = torch.zeros(7, 4)

    def twice(weights):  # Text models use this name for the same module.
        weights[Q.replace(".language_model", "") + ".lora_A.weight"] = weights[f"{Q}.lora_A.weight"].clone()

    def other(key):
        return lambda weights: weights.update({key: torch.zeros(4, 4)})

    return {
        "has no lora_B": lambda weights: weights.pop(f"{Q}.lora_B.weight"),
        "has no lora_A": gone,
        "require [4 or 6": misshapen,
        "has shape [5": of_another_rank,
        "has shape [7, 4]": of_b,
        "is stored twice": twice,
        "lm_head.lora_A": other("base_model.model.lm_head.lora_A.weight"),
        "embed_tokens.lora_embedding_A": other("base_model.model.model.embed_tokens.lora_embedding_A"),
        "lora_magnitude_vector": other(f"{Q}.lora_magnitude_vector.weight"),
        "modules_to_save": other("base_model.model.lm_head.modules_to_save.weight"),
        "layers.99.": other(Q.replace("layers.0", "layers.99") + ".lora_A.weight"),
        "mlp.experts.0": other(Q.replace("self_attn.q_proj", "mlp.experts.0.up_proj") + ".lora_A.weight"),
        "patch_embed": other("base_model.model.model.visual.patch_embed.proj.lora_A.weight"),
    }[name]


@pytest.mark.parametrize(
    "words",
    [
        *("has no lora_B", "has no lora_A", "require [4 or 6", "has shape [5", "has shape [7, 4]"),
        *("is stored twice", "lm_head.lora_A", "embed_tokens.lora_embedding_A", "lora_magnitude_vector"),
        *("modules_to_save", "layers.99.", "mlp.experts.0", "patch_embed"),
    ],
)
def test_tensors_that_are_not_served_are_named(made, copy, words):
    with_weights(copy, change_of(words))
    refused(made, copy, WEIGHTS_FILE, words)


def test_an_adapter_that_matches_no_module_is_refused(made, copy):
    with_weights(copy, lambda weights: weights.clear())
    refused(made, copy, "no matrices")
    save_file(
        {"base_model.model.transformer.h.0.attn.c_attn.lora_A.weight": torch.zeros(4, 4)}, copy / WEIGHTS_FILE
    )
    refused(made, copy, "c_attn", "changes no module")


def test_an_adapter_over_the_byte_limit_is_refused(made, copy):
    size = read(made, copy).num_bytes(4)
    assert read(made, copy, size)
    refused(made, copy, "lora_bytes", str(size), room=size - 1)
    (copy / CONFIG_FILE).write_text(" " * 2**20 + "{}")
    refused(made, copy, CONFIG_FILE, "the limit for such a file")


@pytest.mark.parametrize(
    "room, behind, words",
    [(1000, 0, "raise lora_bytes"), (ROOM, 2**24, "belong to no tensor"), (1000, -1, "cut short")],
)
def test_a_large_file_is_refused_by_its_header(copy, room, behind, words):
    """The refusal reads only the file's header, not the matrix of 16 MiB."""
    with_config(copy, r=4, rank_pattern={})
    header, at = {}, 0
    for which, shape in (("A", (4, 8)), ("B", (2**20, 4))):
        name, end = f"base_model.model.m.lora_{which}.weight", at + 4 * shape[0] * shape[1]
        header[name], at = {"dtype": "F32", "shape": shape, "data_offsets": [at, end]}, end
    head = json.dumps(header).encode()
    (copy / WEIGHTS_FILE).write_bytes(struct.pack("<Q", len(head)) + head)
    os.truncate(copy / WEIGHTS_FILE, 8 + len(head) + at + behind)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=words):
            peft.read_adapter(copy, lambda name: name.removesuffix(".weight"), {"m": (2**20, 8)}, room, 2)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_a_file_that_changes_while_it_is_read_is_refused(made, copy, monkeypatch):
    pair, weights = peft._pair, load_file(copy / WEIGHTS_FILE)
    # The note makes the header longer than the file object's buffer, to force a second read.
    save_file(weights, copy / WEIGHTS_FILE, {"note": "a" * 2**17})

    def changed(*given):
        with open(copy / WEIGHTS_FILE, "r+b") as file:
            file.write(struct.pack("<Q", 2) + b"{}")
        return pair(*given)

    monkeypatch.setattr(peft, "_pair", changed)
    refused(made, copy, WEIGHTS_FILE, "changed while it was read")


@pytest.mark.parametrize("head", [b"", struct.pack("<Q", 2**62), struct.pack("<Q", 4) + b"[[[[", b"junk" * 9])
def test_broken_files_are_refused(made, copy, head):
    (copy / WEIGHTS_FILE).write_bytes(head)
    refused(made, copy, WEIGHTS_FILE)


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("\ud800", "F32"),
        (Q + "\udfff.lora_A.weight", "F32"),
        ("a\n\x1b[31mred", "F32"),
        ("\x1b" * 300, "F32"),
        ("a" * 1000, "F32"),
        (Q + ".lora_A.weight", "F\ud800"),
        (Q + ".lora_A.weight", "\x1b[31mred"),
    ],
)
def test_unprintable_names_are_refused_and_not_shown(made, copy, name, dtype):
    header = json.dumps({name: {"dtype": dtype, "shape": [1], "data_offsets": [0, 4]}}).encode()
    (copy / WEIGHTS_FILE).write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    refused(made, copy, WEIGHTS_FILE, "wrongly")


@pytest.mark.soak
def test_too_many_tensors_are_refused(made, copy):
    tensors = {
        f"t{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(MAX_TENSORS + 1)
    }
    header = json.dumps(tensors).encode()
    (copy / WEIGHTS_FILE).write_bytes(struct.pack("<Q", len(header)) + header)
    refused(made, copy, str(MAX_TENSORS))


def test_a_pickle_is_never_read(made, copy):
    (copy / WEIGHTS_FILE).rename(copy / PICKLED_FILE)
    refused(made, copy, PICKLED_FILE, "pickle")
    (copy / PICKLED_FILE).unlink()
    refused(made, copy, WEIGHTS_FILE)


class OneHub:
    """A hub with the given files, which `fetch` writes to the cache folder."""

    def __init__(self, cache, files):
        self.cache, self.files = cache, files

    def find(self):
        return None

    def list_files(self):
        return {name: HubFile(len(data), None, False, len(data)) for name, data in self.files.items()}

    def fetch(self, names):
        self.cache.mkdir(exist_ok=True)
        for name in names:
            (self.cache / name).write_bytes(self.files[name])
        return self.cache


def test_two_files_are_fetched_from_a_hub(made, tmp_path):
    files = {path.name: path.read_bytes() for path in made[1].iterdir() if path.is_file()}
    hub = OneHub(tmp_path / "hub", {**files, PICKLED_FILE: b"pickle", "config.json": b"{}"})
    folder = adapter_from(hub, parse_name("owner/adapter"))
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG_FILE, WEIGHTS_FILE]
    assert read(made, folder).digest == read(made, made[1]).digest
    with pytest.raises(ModelError, match=WEIGHTS_FILE):
        adapter_from(OneHub(tmp_path / "b", {CONFIG_FILE: b"{}"}), parse_name("owner/adapter"))
    with pytest.raises(ModelError, match="hub id"):
        resolve_adapter("/nowhere/at/all")
