"""Tests `mmengine model check`."""

import json

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from mmengine.cli.main import app
from mmengine.errors import ConfigError, ModelError
from tests.any_model.catalogue import write
from tests.gguf.writing import model, vocabulary, weights
from tests.gguf.writing import write as write_gguf
from tests.llama.tiny import make_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_tiny(folder, "Qwen3")
    return folder


def report(*args):
    found = CliRunner().invoke(app, ["model", "check", *map(str, args), "--json"])
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    return json.loads(found.stdout), found.exit_code


def test_a_described_model_is_sized_without_its_weights(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    found, code = report(tmp_path, "--context", 64)
    assert (code, found["implementation"], found["refused"]) == (0, "described", "")
    per_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 2
    assert (found["kv_bytes_per_token"], found["kv_bytes"]) == (per_token, 64 * per_token)
    assert found["weight_bytes"] == 0
    assert found["command"].startswith("mmengine serve ") and "max_model_len=64" in found["command"]
    whole, _ = report(folder, "--dtype", "float32")
    assert whole["kv_bytes_per_token"] == 2 * per_token
    assert whole["weight_bytes"] == (folder / "model.safetensors").stat().st_size


def test_a_model_that_no_plugin_serves_is_refused_with_the_reason(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["T5ForConditionalGeneration"]
    config["model_type"] = "t5"
    (tmp_path / "config.json").write_text(json.dumps(config))
    found, code = report(tmp_path)
    assert (code, found["implementation"], found["command"]) == (1, "none", "")
    assert "T5ForConditionalGeneration" in found["refused"]


def test_a_hosted_model_is_sized_from_a_run_without_values(tmp_path):
    write("gemma3", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    found, code = report(tmp_path, "--context", 64)
    assert (code, found["implementation"]) == (0, "transformers") and "LoRA adapters" in found["unsupported"]
    assert found["kv_bytes_per_token"] == 2 * 4 * 2 * 16 * 2  # Layers, KV heads, head size, bfloat16.
    assert "an image is computed in one step" in found["notes"][0] and "2 of 4" in found["notes"][1]
    # Two layers have a window with 12 tokens.
    assert found["kv_bytes"] == 2 * 2 * 16 * 2 * (2 * 64 + 2 * 12)
    shown = CliRunner().invoke(app, ["model", "check", str(tmp_path)]).stdout
    assert "(512 bytes per token, freed behind windows)" in shown


def test_a_window_that_the_described_model_lacks_is_served_by_transformers(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 16}
    config.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    found, code = report(tmp_path)
    assert (code, found["implementation"], found["refused"]) == (0, "transformers", "")
    assert found["command"] == f"mmengine serve {tmp_path}"
    assert "own implementation refuses it" in found["notes"][-1] and "sliding_window" in found["notes"][-1]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quant_method 'mxfp4' is not supported"),
        ({"text_config": {"quantization_config": {}}}, "text_config.quantization_config must not be in"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; the limit is 1,024"),
        ({"hidden_size": "big"}, "expected int, got str"),
        ({"num_key_value_heads": 3}, "4 heads do not divide into 3 KV heads"),
    ],
)
def test_a_hosted_model_with_an_unusable_config_is_refused_with_the_reason(tmp_path, fields, reason):
    config = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "num_hidden_layers": 4}
    config |= {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps({**config, **fields}))
    found, code = report(tmp_path)
    assert code == 1 and reason in found["refused"] and "\n" not in found["refused"]


def test_a_gguf_file_is_sized_from_its_header(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(write_gguf(model("qwen3") + vocabulary(), weights("F32")).data)
    found, code = report(path, "--context", 16)
    assert (code, found["implementation"], found["architecture"]) == (0, "described", "Qwen3ForCausalLM")
    assert found["weight_bytes"] == path.stat().st_size and found["kv_bytes"] > 0
    assert str(path) in found["command"]


def test_a_gguf_file_that_is_missing_or_damaged_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    with pytest.raises(ModelError, match="there is no file .*model.gguf"):
        report(path)
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"model\.gguf") as caught:
        report(path)
    assert "\n" not in str(caught.value)


def test_a_hub_that_cannot_be_asked_is_named(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"no folder a/b, .* not be fetched .*HF_HUB_OFFLINE is set"):
        report("a/b")


def test_a_person_reads_lines(folder):
    shown = CliRunner().invoke(app, ["model", "check", str(folder)]).stdout
    lines = dict(
        line.split(None, 1) for line in shown.splitlines() if line.split(None, 1)[0] in ("KV", "model")
    )
    assert lines["model"] == str(folder) and "bytes per token" in lines["KV"]
    assert "serve with" in shown


def test_wrong_arguments_are_refused(folder, tmp_path):
    with pytest.raises(ModelError, match="cannot read .*config.json"):
        report(tmp_path)
    with pytest.raises(ConfigError, match="dtype must be one of"):
        report(folder, "--dtype", "int3")
    with pytest.raises(ConfigError, match="positions"):
        report(folder, "--context", 10**9)
