"""Tests which settings use a checkpoint's multi-token-prediction head, and how damaged or unsupported heads
are refused.
"""

import json

import pytest
import torch
from safetensors.torch import load_file
from structlog.testing import capture_logs

from mmengine.build import build
from mmengine.config import EngineConfig
from mmengine.core.resume import Resume
from mmengine.errors import ConfigError, ModelError
from mmengine.native import library
from mmengine.replay.verify import verify
from mmengine.serve.engine.engine import Engine
from mmengine.testing.contract import with_field
from mmengine_qwen3_5 import plugin
from tests.models.float_folder import to_float_codes
from tests.models.fp8_folder import to_fp8
from tests.qwen3_5.mtp_heads import add_head, edit
from tests.qwen3_5.tiny import make_text

SIZES = {"num_blocks": 129, "max_model_len": 128, "num_threads": 1}
FC = "mtp.fc.weight"


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "model"
    made.mkdir()
    add_head(made, make_text(made))
    return made


def drafters_of(folder, **settings):
    """Return the names of the engine's drafters, its num_draft_tokens, and its lookahead_tokens."""
    built = build(folder, dtype="float32", config=EngineConfig.from_dict(SIZES | settings))
    drafting, config = built.executor._runner._drafting, built.config
    built.close()
    names = [] if drafting is None else drafting.names
    return names, config.num_draft_tokens, config.lookahead_tokens


def test_the_head_drafts_if_the_settings_select_it(folder, monkeypatch):
    if library.load() is None:
        pytest.skip(library.describe())
    assert drafters_of(folder) == (["grammar", "mtp"], 15, 15)
    assert drafters_of(folder, num_draft_tokens=2) == (["grammar", "mtp"], 2, 2)
    assert drafters_of(folder, spec="mtp") == (["mtp"], 4, 4)
    assert drafters_of(folder, spec="mtp", num_draft_tokens=7) == (["mtp"], 7, 7)
    assert drafters_of(folder, spec="grammar") == (["grammar"], 8, 0)
    assert drafters_of(folder, spec="none") == ([], 0, 0)
    monkeypatch.setattr(library, "load", lambda: None)
    assert drafters_of(folder) == (["grammar"], 8, 0), "without kernels a pass takes longer than it saves"
    assert drafters_of(folder, spec="mtp") == (["mtp"], 4, 4)


def test_a_checkpoint_without_a_head(tmp_path):
    make_text(tmp_path)
    assert plugin.draft_head(tmp_path) is None
    assert drafters_of(tmp_path) == (["grammar"], 8, 0)
    with pytest.raises(ConfigError, match=r"has no multi-token-prediction head \(tensors mtp"):
        drafters_of(tmp_path, spec="mtp")


def test_another_family_has_no_head():
    with pytest.raises(ConfigError, match="has no multi-token-prediction head"):
        build(config=EngineConfig(spec="mtp"))


@pytest.mark.parametrize(
    "settings, words",
    [
        (
            {"spec": "mtp=/elsewhere"},
            "spec mtp=/elsewhere is not supported: the head is in the model's files",
        ),
        ({"spec": "mtp", "num_draft_tokens": 8}, "num_draft_tokens 8 exceeds a head's limit 7"),
    ],
)
def test_settings_that_do_not_fit_are_refused(folder, settings, words):
    with pytest.raises(ConfigError, match=words):
        drafters_of(folder, **settings)


def without(name):
    return lambda tensors: {each: values for each, values in tensors.items() if each != name}


BROKEN = {
    "missing": (without(FC), "have no tensor mtp.fc.weight"),
    "without the layer": (
        without("mtp.layers.0.self_attn.q_proj.weight"),
        "have no tensor text.layers.0.self_attn.q_proj.weight",
    ),
    "misshapen": (
        lambda tensors: tensors | {FC: torch.zeros(48, 48)},
        r"tensor mtp.fc.weight has shape \[48, 48\]; config.json requires \[48, 96\]",
    ),
    "unexpected": (
        lambda tensors: tensors | {"mtp.layers.1.input_layernorm.weight": torch.zeros(48)},
        "tensor mtp.layers.1.input_layernorm.weight does not belong",
    ),
    "of another dtype": (
        lambda tensors: tensors | {FC: torch.zeros(48, 96, dtype=torch.int16)},
        "tensor mtp.fc.weight is stored as I16",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_damaged_heads_are_refused(folder, name):
    change, words = BROKEN[name]
    edit(folder, change)
    with pytest.raises(ModelError, match=words):
        plugin.draft_head(folder)


def test_auto_continues_without_a_damaged_head(folder):
    if library.load() is None:
        pytest.skip(library.describe())
    edit(folder, without(FC))
    with capture_logs() as lines:
        assert drafters_of(folder)[0] == ["grammar"]
    (line,) = [line for line in lines if "draft head is not used" in line["event"]]
    assert "mtp.fc.weight" in line["reason"]
    with pytest.raises(ModelError, match="have no tensor mtp.fc.weight"):
        drafters_of(folder, spec="mtp")


@pytest.mark.parametrize(
    "field, value, words",
    [
        ("mtp_num_hidden_layers", 2, "mtp_num_hidden_layers is 2; heads with one layer are supported"),
        ("mtp_num_hidden_layers", -1, "mtp_num_hidden_layers is -1; it must be an integer"),
        ("mtp_use_dedicated_embeddings", True, "mtp_use_dedicated_embeddings is true"),
    ],
)
def test_unsupported_heads_are_refused(folder, field, value, words):
    path = folder / "config.json"
    path.write_text(with_field(path.read_text(), field, value))
    with pytest.raises(ModelError, match=f"config.json: {words}"):
        plugin.draft_head(folder)


def test_a_config_may_exclude_the_head(folder):
    path = folder / "config.json"
    path.write_text(with_field(path.read_text(), "mtp_num_hidden_layers", 0))
    assert plugin.draft_head(folder) is None
    config = json.loads(path.read_text())
    del config["mtp_num_hidden_layers"]
    path.write_text(json.dumps(config))
    assert plugin.draft_head(folder) is not None


FORMS = {
    "int8 at loading": lambda folder: {"quantize": "int8"},
    "FP8": lambda folder: to_fp8(folder) and {},
    "FP8 rows": lambda folder: to_float_codes(folder, "compressed-tensors", "fp8") and {},
    "NVFP4": lambda folder: to_float_codes(folder, "modelopt", "nvfp4") and {},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_quantised_model_has_a_quantised_head(folder, form):
    """Drafts from a quantised head change no token."""
    if library.load() is None:
        pytest.skip(library.describe())
    found, more = [], FORMS[form](folder)
    stored = load_file(folder / "model.safetensors")
    assert any(name.startswith("mtp.") and "scale" in name for name in stored) is (form != "int8 at loading")
    for spec in ("none", "mtp"):
        settings = SIZES | {"spec": spec, "draft_policy": "all"} | more
        with Engine(folder, dtype="bfloat16", config=EngineConfig.from_dict(settings)) as engine:
            answers = engine.generate(["Hello there", "One, two"], max_tokens=20, ignore_eos=True)
            found.append([each.token_ids for each in answers])
            stats = engine.stats()
    assert found[0] == found[1]
    assert 0 < stats.drafts[0].accepted < stats.drafts[0].proposed


@pytest.mark.parametrize("specs", [("none", "auto"), ("mtp", "auto"), ("auto", "mtp"), ("mtp", "mtp")])
def test_a_log_continues_with_or_without_the_head(folder, tmp_path, specs):
    """The first process's setting decides: a log that began without a head continues without a head."""
    if library.load() is None:
        pytest.skip(library.describe())
    found = []
    for spec in specs:
        config = EngineConfig.from_dict(SIZES | {"spec": spec, "draft_policy": "all"})
        with Engine(folder, dtype="float32", config=config, log=tmp_path / "log", resume=Resume()) as engine:
            (answer,) = engine.generate(["Hello there"], max_tokens=20, ignore_eos=True)
            found.append((answer.token_ids, sum(each.accepted for each in engine.stats().drafts.values())))
    assert found[0][0] == found[1][0]
    assert [accepted > 0 for _, accepted in found] == [
        spec != "none" and specs[0] != "none" for spec in specs
    ]
    assert verify(tmp_path / "log").ok
