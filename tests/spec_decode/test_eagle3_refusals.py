"""Tests that defects in a draft head's folder give errors with the field's or the tensor's name."""

import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmengine.errors import ModelError
from mmengine.spec_decode.eagle3.config import Target
from mmengine.spec_decode.eagle3.loading import open_head
from tests.spec_decode.eagle3_heads import DRAFT_VOCAB, FAMILIES, TARGET, edited

FIELD = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    "family, changes, words",
    [
        (
            "specforge",
            {"architectures": ["EagleLlamaForCausalLM"]},
            "architectures is ['EagleLlama",
        ),
        ("specforge", {"architectures": ["PEagleDraftModel"]}, "PEagleDraftModel"),
        ("specforge", {"architectures": 3}, "architectures is 3"),
        ("specforge", {"architectures": None}, "architectures is None"),
        ("specforge", {"architectures": [["a"] * 10**5]}, "architectures"),
        ("specforge", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (
            "specforge",
            {"vocab_size": 97},
            "vocab_size is 97, the target's is 96",
        ),
        ("specforge", {"vocab_size": None}, "vocab_size is missing"),
        ("specforge", {"target_hidden_size": 64}, "target_hidden_size is 64, the target's hidden_size is 48"),
        ("specforge", {"hidden_size": 64}, "hidden_size is 64, but fc.weight gives 48"),
        ("specforge", {"hidden_size": "48"}, "hidden_size is '48'"),
        ("specforge", {"head_dim": 20}, "head_dim 20"),
        ("specforge", {"num_attention_heads": 3}, "num_key_value_heads: 3 heads"),
        ("specforge", {"num_attention_heads": 6, "head_dim": 16}, "head_dim 16 with num_attention_heads 6"),
        ("specforge", {"num_key_value_heads": 1}, "k_proj.weight has shape [32, 96]"),
        ("specforge", {"intermediate_size": 81}, "gate_proj.weight has shape [80, 48]"),
        ("specforge", {"num_hidden_layers": 2}, "no tensor layers.1."),
        ("specforge", {"num_hidden_layers": 9}, "num_hidden_layers is 9"),
        ("specforge", {"draft_vocab_size": 97}, "draft_vocab_size is 97"),
        ("specforge", {"draft_vocab_size": 41}, "lm_head.weight has shape [40, 48]"),
        ("specforge", {"draft_vocab_size": None}, "lm_head.weight has shape [40, 48]"),
        ("specforge", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("specforge", {"mlp_bias": True}, "mlp_bias"),
        ("specforge", {"use_sliding_window": True}, "use_sliding_window"),
        ("specforge", {"attention_bias": True}, "no tensor layers.0.self_attn.q_proj.bias"),
        ("specforge", {"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ("specforge", {"rope_theta": float("inf")}, "rope_theta"),
        ("specforge", {"rope_scaling__type": "yarn"}, "rope_type is 'yarn'"),
        ("specforge", {"rope_scaling__mrope_section": [2, 3, 4]}, "rope_scaling.mrope_section is [2, 3, 4]"),
        ("specforge", {"rope_scaling__mrope_section": [8]}, "mrope_section"),
        ("specforge", {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing"),
        ("specforge", {"rope_scaling": {"rope_type": "linear", "factor": -1}}, "rope_scaling.factor is -1"),
        ("specforge", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("modelopt", {"rope_scaling__low_freq_factor": 5}, "low_freq_factor 5.0 must be less"),
        ("specforge", {"norm_output": "yes"}, "norm_output is 'yes'"),
        ("specforge", {"norm_before_fc": True}, "norm_before_fc is true, but the weights do not hold"),
        ("speculators", {"fc_norm": False}, "fc_norm is false, but the weights hold fc_norm.0.weight"),
        ("speculators", {"speculators_model_type": "peagle"}, "speculators_model_type is 'peagle'"),
        ("speculators", {"transformer_layer_config": None}, "transformer_layer_config is missing"),
        (
            "speculators",
            {"transformer_layer_config__vocab_size": 7},
            "layer_config.vocab_size is 7",
        ),
        (
            "speculators",
            {"transformer_layer_config__model_type": "qwen3"},
            "no tensor layers.0.self_attn.q_n",
        ),
        ("speculators", {"speculators_config__proposal_methods": 3}, "proposal_methods must be a list"),
        (
            "speculators",
            {"speculators_config__proposal_methods": [{"speculative_tokens": 0}]},
            "speculators_config.proposal_methods: speculative_tokens is 0",
        ),
        (
            "modelopt",
            {"eagle_config__use_aux_hidden_state": False},
            "eagle_config.use_aux_hidden_state is",
        ),
        ("modelopt", {"eagle_config__parallel_draft_step": 4}, "eagle_config.parallel_draft_step is 4"),
        ("modelopt", {"draft_vocab_size": 40}, "no lm_head.weight"),
        ("specforge", {FIELD: [2, 6]}, f"{FIELD} names 2 layers, but fc.weight reads 3"),
        ("specforge", {FIELD: [2, 6, 13]}, f"{FIELD} gives the inputs of layers [2, 6, 13]"),
        ("specforge", {FIELD: [2, 9, 6]}, "do not ascend"),
        ("specforge", {FIELD: [2, 6, "9"]}, f"{FIELD} must be a list"),
        ("specforge", {FIELD: [-1, 6, 9]}, FIELD),
        ("specforge", {FIELD: list(range(100))}, FIELD),
        (
            "modelopt",
            {f"eagle_config__{FIELD}": [1, 5, 12]},
            f"eagle_config.{FIELD} gives the inputs",
        ),
        ("specforge", {"num_aux_hidden_states": 4}, "num_aux_hidden_states is 4, but fc.weight reads 3"),
    ],
)
def test_a_wrong_field_is_named(family, changes, words, tmp_path):
    with pytest.raises(ModelError) as error:
        open_head(edited(family, **changes).save(tmp_path), TARGET)
    assert words in str(error.value) and len(str(error.value)) < 600


@pytest.mark.parametrize(
    "target, words",
    [
        (Target(64, 96, 12), "fc.weight reads 144 values, no multiple of the target's hidden_size 64"),
        (Target(24, 96, 12), "embed_tokens.weight is missing, and the layer reads embeddings of 48"),
        (Target(48, 100, 12), "vocab_size is 96, the target's is 100"),
        (Target(48, 96, 6), "EAGLE's default gives the inputs of layers [2, 3, 3]"),
        (Target(48, 96, 2), "EAGLE's default gives the inputs of layers [2, 1, -1]"),
    ],
)
def test_a_head_for_another_model(target, words, tmp_path):
    with pytest.raises(ModelError) as error:
        open_head(FAMILIES["specforge"]().save(tmp_path), target)
    assert words in str(error.value)


def test_a_head_that_shares_a_matrix_of_another_size(tmp_path):
    # Without lm_head, the head would use the target's matrix, which has another hidden size.
    written = FAMILIES["qwen3"]()
    written.config["draft_vocab_size"] = TARGET.vocab_size
    for name in ("model.lm_head.weight", "model.d2t", "model.t2d"):
        del written.tensors[name]
    with pytest.raises(
        ModelError, match="no lm_head.weight, and the target's reads 48 values, not hidden_size 32"
    ):
        open_head(written.save(tmp_path), TARGET)


def replaced(**tensors):
    return lambda stored: stored.update(tensors)


IDS = torch.arange(DRAFT_VOCAB)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: t.pop("fc.weight"), "tensor fc.weight is missing"),
        (lambda t: t.pop("midlayer.hidden_norm.weight"), "no tensor layers.0.hidden_norm.weight"),
        (lambda t: t.pop("midlayer.self_attn.q_proj.weight"), "q_proj.weight is missing"),
        (lambda t: t.pop("norm.weight"), "no tensor norm.weight"),
        (lambda t: t.pop("lm_head.weight"), "no lm_head.weight"),
        (lambda t: t.pop("d2t"), "no tensor d2t"),
        (replaced(**{"fc.weight": torch.ones(48)}), "tensor fc.weight is of shape [48]"),
        (replaced(**{"fc.weight": torch.ones(47, 144)}), "hidden_size is 48, but fc.weight gives 47"),
        (replaced(**{"fc.weight": torch.ones(48, 48 * 20)}), "fc.weight reads 20 hidden states"),
        (replaced(**{"fc.weight": torch.ones(48, 48)}), f"{FIELD} is missing, and fc.weight reads 1"),
        (
            replaced(**{"midlayer.input_layernorm.weight": torch.ones(47)}),
            "layernorm.weight has shape [47]",
        ),
        (replaced(**{"embed_tokens.weight": torch.ones(95, 48)}), "embed_tokens.weight has shape [95, 48]"),
        (
            replaced(**{"midlayer.extra.weight": torch.ones(3)}),
            "midlayer.extra.weight does not belong to the model",
        ),
        (replaced(mask_hidden=torch.ones(1, 48)), "mask_hidden"),
        (replaced(**{"layers.0.hidden_norm.weight": torch.ones(48)}), "both hold"),
        (replaced(**{"lm_head.weight": torch.ones(40, 48, dtype=torch.int8)}), "stored as I8"),
        (replaced(d2t=torch.zeros(39, dtype=torch.int64)), "d2t is I64 [39]; [40]"),
        (replaced(d2t=torch.zeros(40)), "d2t is F32 [40]"),
        (replaced(d2t=57 * torch.ones(40, dtype=torch.int64)), "d2t must hold offsets"),
        (replaced(d2t=-torch.ones(40, dtype=torch.int64)), "d2t must hold offsets"),
        (replaced(d2t=-IDS), "d2t must hold offsets"),  # all map to token 0
        (replaced(d2t=torch.full((40,), 2**62) * (IDS % 4)), "d2t must hold offsets"),
        (replaced(t2d=torch.zeros(96, dtype=torch.bool)), "t2d and d2t name different tokens"),
        (replaced(t2d=torch.zeros(95, dtype=torch.bool)), "t2d is BOOL [95]; [96]"),
    ],
)
def test_a_wrong_tensor_is_named(change, words, tmp_path):
    written = FAMILIES["specforge"]()
    change(written.tensors)
    with pytest.raises(ModelError) as error:
        open_head(written.save(tmp_path), TARGET)
    assert words in str(error.value) and len(str(error.value)) < 600


def test_a_language_model_is_no_head(tmp_path):
    written = FAMILIES["specforge"]()
    written.config["architectures"] = ["LlamaForCausalLM"]
    del written.tensors["fc.weight"]
    with pytest.raises(ModelError, match="fc.weight is missing.*not a complete EAGLE-3 head"):
        open_head(written.save(tmp_path), TARGET)


def test_an_older_eagle_is_refused(tmp_path):
    """An EAGLE 1 head has an ordinary decoder layer, and fc takes an embedding and a single hidden state."""
    written = FAMILIES["specforge"]()
    written.tensors["fc.weight"] = torch.ones(48, 96)
    for name, rows in (("q", 64), ("k", 32), ("v", 32)):
        written.tensors[f"midlayer.self_attn.{name}_proj.weight"] = torch.ones(rows, 48)
    with pytest.raises(ModelError, match="q_proj .* reads 48 values.*EAGLE 1 and 2 are not supported"):
        open_head(written.save(tmp_path), TARGET)


def test_ids_in_place_of_offsets_are_refused(tmp_path):
    written = FAMILIES["specforge"]()
    written.tensors["d2t"] = written.tensors["d2t"] + IDS
    with pytest.raises(ModelError, match="d2t (must hold offsets|.*different tokens)|different tokens"):
        open_head(written.save(tmp_path), TARGET)


def test_both_norms_of_the_taps_are_refused(tmp_path):
    # Taps are the target's layers whose hidden states the head reads.
    written = FAMILIES["modelopt"]()
    written.tensors |= {f"fc_norm.{i}.weight": torch.ones(48) for i in range(3)}
    with pytest.raises(ModelError, match="norm_before_fc and fc_norm exclude each other"):
        open_head(written.save(tmp_path), TARGET)


@pytest.mark.parametrize("chosen", [[2, 6], [2, 6, 13], [6, 2, 9]])
def test_taps_chosen_by_hand_are_checked_too(chosen, tmp_path):
    with pytest.raises(ModelError, match="tap_layers (names|gives)"):
        open_head(FAMILIES["specforge"]().save(tmp_path), TARGET, aux_layers=chosen)


def test_a_pickle_is_never_read(tmp_path):
    folder = FAMILIES["specforge"]().save(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model.bin is a pickle.*save_file"):
        open_head(folder, TARGET)


@pytest.mark.parametrize("spoil", ["cut", "header", "length", "empty", "none"])
def test_a_spoiled_safetensors_file(spoil, tmp_path):
    folder = FAMILIES["specforge"]().save(tmp_path)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    spoiled = {
        "cut": data[:-100],
        "header": data[:8] + b"}" * 40 + data[48:],
        "length": struct.pack("<Q", 2**60) + data[8:],
        "empty": b"",
    }
    if spoil == "none":
        path.unlink()
    else:
        path.write_bytes(spoiled[spoil])
    with pytest.raises(ModelError, match="model.safetensors"):
        open_head(folder, TARGET)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 10**5, "\x00", " " * (2**20 + 1)])
def test_a_broken_config(text, tmp_path):
    folder = FAMILIES["specforge"]().save(tmp_path)
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match="config.json"):
        open_head(folder, TARGET)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match="config.json"):
        open_head(folder, TARGET)


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(-3, 200), max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_values_changed_in_a_config(data, tmp_path):
    """`open_head` accepts the folder or raises ModelError, and raises no other error."""
    written = FAMILIES[data.draw(st.sampled_from(sorted(FAMILIES)))]()
    places = [(written.config, name) for name in written.config]
    for child in list(written.config.values()):
        if isinstance(child, dict):
            places += [(child, name) for name in child]
    for at, name in data.draw(
        st.lists(st.sampled_from(places), min_size=1, max_size=3, unique_by=lambda p: p[1])
    ):
        at[name] = data.draw(JUNK)
    try:
        open_head(written.save(tmp_path), TARGET)
    except ModelError as error:
        assert len(str(error)) < 1000
