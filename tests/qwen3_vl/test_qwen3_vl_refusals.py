"""Tests that invalid model folders raise a ModelError with the file's name, before any large allocation. Also
tests fingerprints and shards.
"""

import json
import shutil
import struct
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from qwen3_vl_reference import make_reference
from safetensors.torch import load_file, save_file

from mmengine.checkpoint.fingerprint import fingerprint as fingerprint_of
from mmengine.errors import ConfigError, ModelError
from mmengine_qwen3_vl import config, plugin
from mmengine_qwen3_vl.config import read_config
from mmengine_qwen3_vl.names import NAMES
from tests.models.config_fields import Noted, ignored

EMBEDDING = "model.language_model.embed_tokens.weight"
Q_PROJ = "model.language_model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pristine")
    make_reference(folder)
    return folder


@pytest.fixture
def folder(pristine, tmp_path):
    shutil.copytree(pristine, tmp_path / "model")
    return tmp_path / "model"


def fingerprint(folder):
    return plugin.fingerprint(folder)


def vision_fingerprint(folder):
    return fingerprint_of(folder, NAMES, prefix="visual.")


def load(folder, **options):
    return plugin.load_model(folder, **({"device": "cpu", "dtype": "float32"} | options))


def edit_config(folder, path, value):
    config = json.loads((folder / "config.json").read_text())
    *parents, last = path.split(".")
    target = config
    for name in parents:
        target = target[name]
    if value is None:
        del target[last]
    else:
        target[last] = value
    (folder / "config.json").write_text(json.dumps(config))


def edit_weights(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    "path, value, words",
    [
        ("architectures", ["LlamaForCausalLM"], "LlamaForCausalLM"),
        ("architectures", "Qwen3VLForConditionalGeneration", "architectures"),
        ("quantization_config", {"quant_method": "fp8"}, "has no weight_block_size"),
        ("text_config.quantization_config", {"quant_method": "awq"}, "text_config.quantization_config"),
        ("auto_map", {"AutoModel": "modeling.Mine"}, "auto_map"),
        ("text_config", None, "text_config"),
        ("text_config.hidden_size", float("nan"), "text_config.hidden_size is nan"),
        ("text_config.hidden_size", 48.0, "hidden_size"),
        ("text_config.hidden_size", True, "hidden_size"),
        ("text_config.vocab_size", None, "vocab_size is missing"),
        ("text_config.vocab_size", 10**15, "vocab_size"),
        ("text_config.num_hidden_layers", 0, "num_hidden_layers"),
        ("text_config.num_hidden_layers", "3", "num_hidden_layers"),
        ("text_config.num_key_value_heads", 3, "key-value heads"),
        ("text_config.hidden_act", "relu", "relu"),
        ("text_config.rms_norm_eps", float("nan"), "rms_norm_eps"),
        ("text_config.rope_parameters.rope_theta", float("inf"), "rope_theta"),
        ("text_config.rope_parameters.rope_theta", -1, "rope_theta"),
        ("text_config.rope_parameters.rope_type", "yarn", "yarn"),
        ("text_config.rope_parameters.mrope_section", [4, 2, 3], "mrope_section"),
        ("text_config.rope_parameters.mrope_section", [8], "mrope_section"),
        ("text_config.rope_parameters.mrope_interleaved", False, "mrope_interleaved"),
        ("text_config.rope_parameters", [1], "rope_parameters"),
        ("text_config.head_dim", 15, "mrope_section"),
        ("text_config.layer_types", ["full_attention", "sliding_attention"], "sliding_attention"),
        ("text_config.use_sliding_window", True, "text_config.sliding_window None needs"),
        ("vision_config.hidden_size", 34, "multiple of 4"),
        ("vision_config.hidden_act", "quick_gelu", "quick_gelu"),
        ("vision_config.num_position_embeddings", 26, "square"),
        ("vision_config.out_hidden_size", 64, "out_hidden_size"),
        ("vision_config.deepstack_visual_indexes", [0, 3], "deepstack_visual_indexes"),
        ("vision_config.deepstack_visual_indexes", [1, 1], "twice"),
        ("vision_config.deepstack_visual_indexes", None, "deepstack_visual_indexes"),
        ("vision_config.spatial_merge_size", 0, "spatial_merge_size"),
        ("tie_word_embeddings", "yes", "tie_word_embeddings"),
        ("image_token_id", 96, "image_token_id"),
    ],
)
def test_a_config_that_cannot_be_served(folder, path, value, words):
    edit_config(folder, path, value)
    with pytest.raises(ModelError) as error:
        read_config(folder)
    assert words in str(error.value) and str(folder / "config.json") in str(error.value)


def test_no_field_is_ignored_that_transformers_reads(folder, monkeypatch):
    asked, read = set(), config.read_model_json
    monkeypatch.setattr(config, "read_model_json", lambda *of: Noted(read(*of), asked))
    read_config(folder)
    assert not ignored("qwen3_vl", asked)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 10**5, "\x00", '"x"'])
def test_a_broken_config(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match="config.json"):
        load(folder)


def test_the_public_4b_config_in_the_style_of_the_hub(tmp_path):
    rope = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
    text = {
        "attention_bias": False,
        "dtype": "bfloat16",
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "max_position_embeddings": 262144,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": rope,
        "rope_theta": 5000000,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    }
    vision = {
        "deepstack_visual_indexes": [5, 11, 17],
        "depth": 24,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1024,
        "in_channels": 3,
        "intermediate_size": 4096,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2560,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": 151655,
        "text_config": text,
        "tie_word_embeddings": True,
        "video_token_id": 151656,
        "vision_config": vision,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = read_config(tmp_path)
    assert (read.text.rope.theta, read.text.rope.sections, read.text.tied) == (5e6, (24, 20, 20), True)
    assert (read.vision.head_dim, read.vision.patch_width, read.vision.rope_theta) == (64, 1536, 1e4)


def test_every_cut_of_a_weight_file_is_named(folder):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    header = 8 + struct.unpack("<Q", data[:8])[0]
    for length in (0, 5, 8, 100, header - 1, header, header + 1, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        for use in (load, fingerprint):
            with pytest.raises(ModelError, match="model.safetensors.*download it again"):
                use(folder)


FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(data=st.data())
def test_any_bytes_changed_in_a_header(folder, pristine, data):
    """With random bytes in the header, the model either loads or is refused with a short ModelError."""
    stored = bytearray((pristine / "model.safetensors").read_bytes())
    header_end = 8 + struct.unpack("<Q", stored[:8])[0]
    places = st.integers(0, 7) | st.integers(8, header_end - 1)
    for place in data.draw(st.lists(places, min_size=1, max_size=6)):
        stored[place] = data.draw(st.integers(0, 255) | st.sampled_from(b'0129[]{}",:-'))
    (folder / "model.safetensors").write_bytes(stored)
    for use in (fingerprint, load):
        try:
            use(folder)
        except ModelError as error:
            assert len(str(error)) < 1000


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(-1, 5) | st.just(10**400), max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@FUZZ
@given(data=st.data())
def test_any_value_changed_in_a_config(folder, pristine, data):
    config = json.loads((pristine / "config.json").read_text())
    paths = [(None, name) for name in config]
    paths += [(part, name) for part in ("text_config", "vision_config") for name in config[part]]
    for part, name in data.draw(st.lists(st.sampled_from(paths), min_size=1, max_size=3)):
        target = config if part is None else config[part]
        if isinstance(target, dict):  # An earlier change may have replaced this section.
            target[name] = data.draw(JUNK)
    (folder / "config.json").write_text(json.dumps(config))
    try:
        load(folder)
    except ModelError as error:
        assert len(str(error)) < 1000


def rename(header, old, new):
    header[new] = header.pop(old)


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header[Q_PROJ].update(data_offsets=[0, 2**40]),
        lambda header: header[Q_PROJ].update(data_offsets=[8, 4]),
        lambda header: header[Q_PROJ].update(data_offsets=[-4, 0]),
        lambda header: header[Q_PROJ].update(data_offsets=[float("nan"), 1]),
        lambda header: header[Q_PROJ].update(data_offsets=7),
        lambda header: header[Q_PROJ].update(shape=[2**60, 2**60]),
        lambda header: header[Q_PROJ].update(shape="ab"),
        lambda header: header[Q_PROJ].update(shape=[1] * 1000),
        lambda header: header[Q_PROJ].update(dtype=["F32"]),
        lambda header: header[Q_PROJ].update(dtype="F8_E4M3"),
        lambda header: header[Q_PROJ].pop("dtype"),
        lambda header: rename(header, Q_PROJ, "x" * 10**5),
        lambda header: header.update({Q_PROJ: None}),
        lambda header: header.clear(),
    ],
)
def test_a_damaged_header(folder, change):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
    with pytest.raises(ModelError) as error:
        load(folder)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    "data", [b"\xff" * 64, struct.pack("<Q", 40) + b"[" * 40, struct.pack("<Q", 2) + b"[]"]
)
def test_a_file_that_is_no_safetensors(folder, data):
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelError, match="model.safetensors"):
        load(folder)


def test_missing_unexpected_and_misshapen_tensors(folder, pristine):
    stored = (pristine / "model.safetensors").read_bytes()

    def expect(words, change):
        (folder / "model.safetensors").write_bytes(stored)
        edit_weights(folder, change)
        with pytest.raises(ModelError, match=words):
            load(folder)

    expect("no tensor text.layers.0.self_attn.q_proj.weight", lambda t: t.pop(Q_PROJ))
    expect(r"model\.extra\.weight", lambda t: t.update({"model.extra.weight": torch.ones(2)}))
    expect(
        r"q_proj.weight has shape \[64, 47\].*\[64, 48\]", lambda t: t.update({Q_PROJ: torch.ones(64, 47)})
    )
    expect("both hold", lambda t: t.update({"language_model.embed_tokens.weight": t[EMBEDDING].clone()}))
    expect("stored as I8", lambda t: t.update({Q_PROJ: torch.ones(64, 48, dtype=torch.int8)}))


def test_an_untied_model_without_its_head(folder):
    edit_config(folder, "tie_word_embeddings", False)
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        load(folder)


def test_a_config_that_asks_for_more_than_the_file_holds_allocates_nothing(folder):
    edit_config(folder, "text_config.intermediate_size", 2**20)
    with pytest.raises(ModelError, match="shape"):
        load(folder)


@pytest.mark.parametrize(
    "stored, canonical",
    [
        (EMBEDDING, "text.embed_tokens.weight"),
        ("language_model.model.norm.weight", "text.norm.weight"),
        ("model.layers.3.mlp.up_proj.weight", "text.layers.3.mlp.up_proj.weight"),
        ("model.visual.merger.norm.bias", "visual.merger.norm.bias"),
        ("visual.merger.norm.bias", "visual.merger.norm.bias"),
        ("lm_head.weight", "lm_head.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.language_model.rotary_emb.inv_freq", None),
    ],
)
def test_published_tensor_names(stored, canonical):
    assert NAMES.canonical(stored) == canonical


def shard(folder, rename=lambda name: name):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for i in range(3):
        part = {rename(name): tensors[name] for name in sorted(tensors)[i::3]}
        save_file(part, folder / f"part-{i}.safetensors")
        weight_map |= dict.fromkeys(part, f"part-{i}.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index, weight_map


def test_shards_and_other_prefixes_are_the_same_model(folder, pristine):
    index, weight_map = shard(folder, lambda name: name.replace("model.language_model.", "model.", 1))
    ids = torch.arange(20)
    assert torch.equal(load(folder).embed(ids), load(pristine).embed(ids))
    assert fingerprint(folder) == fingerprint(pristine)
    for bad, words in (
        ("../up.safetensors", "in this folder"),
        ("gone.safetensors", "missing"),
        (3, "folder"),
        (f"{'é' * 121}x.safetensors", "missing"),  # The longest possible file name, in bytes.
        (f"{'é' * 122}.safetensors", "in this folder"),
        ("\ud800.safetensors", "in this folder"),
        ("\0.safetensors", "in this folder"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map | {"x": bad}}))
        with pytest.raises(ModelError, match=words):
            load(folder)


def test_fingerprints_change_with_the_weights_they_cover(folder, pristine):
    before, vision_before = fingerprint(pristine), vision_fingerprint(pristine)
    assert (before, vision_before) == (fingerprint(folder), vision_fingerprint(folder))
    edit_weights(folder, lambda t: t[Q_PROJ].mul_(1.001))
    after = fingerprint(folder)
    assert after != before and vision_fingerprint(folder) == vision_before
    edit_weights(folder, lambda t: t["model.visual.pos_embed.weight"].add_(1))
    assert fingerprint(folder) != after and vision_fingerprint(folder) != vision_before


def test_a_large_tensor_is_sampled_at_both_ends(tmp_path):
    tensor = torch.zeros(2**20)
    seen = set()
    for place in (None, 0, 2**20 - 1):
        changed = tensor.clone()
        if place is not None:
            changed[place] = 1
        save_file({"visual.x": changed}, tmp_path / "model.safetensors")
        seen.add(fingerprint(tmp_path))
    assert len(seen) == 3


@pytest.mark.parametrize("options", [{"dtype": "int8"}, {"device": "tpu"}, {"device": "cuda:99"}])
def test_device_and_dtype_that_cannot_be_used(pristine, options):
    with pytest.raises(ConfigError):
        load(pristine, **options)


def test_the_plugin_and_the_fingerprint_import_no_torch(pristine):
    code = (
        "import sys; from pathlib import Path; from mmengine_qwen3_vl import plugin;"
        f"plugin.fingerprint(Path({str(pristine)!r}));"
        "assert not {'torch', 'transformers', 'PIL', 'av'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
