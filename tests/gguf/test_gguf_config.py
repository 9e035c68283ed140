"""Tests the conversion of a GGUF file's metadata to transformers' config. Unknown keys are refused."""

import numpy as np
import pytest
import transformers

from mmengine.checkpoint.gguf.model import GGUFModel
from mmengine.errors import ModelError
from tests.gguf.writing import (
    ARRAY,
    BOOL,
    FLOAT32,
    INT32,
    STRING,
    UINT32,
    Tensor,
    model,
    vocabulary,
    weights,
    write,
)

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "max_position_embeddings": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 263,
    "rms_norm_eps": 9.999999747378752e-06,
    "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}


@pytest.fixture
def opened(tmp_path):
    def put(architecture="llama", keys=(), tensors=None, **more):
        path = tmp_path / "model.gguf"
        found = weights("F16") if tensors is None else tensors
        path.write_bytes(write(model(architecture, **more) + vocabulary() + list(keys), found).data)
        return GGUFModel(path)

    return put


def test_sizes_and_other_fields(opened):
    assert opened().file("config.json") == SMALL


def test_an_untied_head(opened):
    assert opened(tensors=weights("F16", head=True)).file("config.json") == SMALL | {
        "tie_word_embeddings": False
    }


@pytest.mark.parametrize(
    ("architecture", "name", "kind"),
    [("qwen2", "Qwen2ForCausalLM", "qwen2"), ("qwen3", "Qwen3ForCausalLM", "qwen3")],
)
def test_other_architectures(opened, architecture, name, kind):
    changes = {"architectures": [name], "model_type": kind}
    assert opened(architecture).file("config.json") == SMALL | changes


def test_a_different_head_size(opened):
    lengths = {"attention.key_length": (UINT32, 32), "attention.value_length": (UINT32, 32)}
    assert opened(**lengths).file("config.json")["head_dim"] == 32
    assert opened(**{"rope.dimension_count": (UINT32, 16)}).file("config.json") == SMALL


def test_optional_fields(tmp_path):
    keys = [key for key in model() + vocabulary() if not key[0].endswith(("head_count_kv", "freq_base"))]
    path = tmp_path / "model.gguf"
    path.write_bytes(write(keys, weights()).data)
    rope = {"rope_theta": 10000.0, "rope_type": "default"}
    assert GGUFModel(path).file("config.json") == SMALL | {"num_key_value_heads": 4, "rope_parameters": rope}


def test_rope_scaling_is_written_to_the_config(opened):
    linear = {"rope.scaling.type": (STRING, "linear"), "rope.scaling.factor": (FLOAT32, 2.0)}
    rope = {"rope_theta": 5000.0, "rope_type": "linear", "factor": 2.0}
    assert opened(**linear).file("config.json")["rope_parameters"] == rope
    yarn = linear | {
        "rope.scaling.type": (STRING, "yarn"),
        "rope.scaling.original_context_length": (UINT32, 64),
    }
    rope |= {"rope_type": "yarn", "original_max_position_embeddings": 64}
    assert opened(**yarn).file("config.json")["rope_parameters"] == rope
    assert opened(**{"rope.scaling.type": (STRING, "none")}).file("config.json") == SMALL


def as_llama_cpp_writes(theta: float, head_dim: int, scaling: dict) -> np.ndarray:
    """Return the frequency factors of llama.cpp's converter: unscaled frequencies divided by transformers'
    llama3 frequencies, float32 [head_dim / 2].
    """
    fields = {"rope_type": "llama3", "rope_theta": theta, **scaling}
    config = transformers.LlamaConfig(
        head_dim=head_dim, hidden_size=head_dim, num_attention_heads=1, rope_parameters=fields
    )
    scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    return (theta ** -(np.arange(0, head_dim, 2) / head_dim) / scaled.numpy()).astype(np.float32)


@pytest.mark.parametrize(("factor", "head_dim"), [(8.0, 128), (32.0, 64)])
def test_the_frequencies_of_llama_3_are_found_in_their_factors(opened, factor, head_dim):
    """The parameters of llama3 rope scaling are derived from the file's frequency factors."""
    scaling = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    factors = as_llama_cpp_writes(500000.0, head_dim, scaling)
    assert factors.min() == pytest.approx(1) and factors.max() == pytest.approx(factor)
    lengths = {f"attention.{name}_length": (UINT32, head_dim) for name in ("key", "value")}
    lengths["rope.freq_base"] = (FLOAT32, 500000.0)
    stored = [*weights("F16"), Tensor("rope_freqs.weight", "F32", factors.shape, factors.tobytes())]
    told = opened(tensors=stored, **lengths)
    found = told.file("config.json")["rope_parameters"]
    assert found == {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        **scaling,
        "factor": pytest.approx(factor),
    }
    assert "rope_freqs.weight" not in told.tensors(lambda name: name)
    with pytest.raises(ModelError, match="rope_freqs.weight scales frequencies differently"):
        opened(tensors=stored, **lengths | {"rope.freq_base": (FLOAT32, 10000.0)}).file("config.json")
    with pytest.raises(ModelError, match=r"rope_freqs.weight has shape \[.*\]; 8 values are required"):
        opened(tensors=stored).file("config.json")


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_invalid_factors_are_refused(opened, value):
    factors = np.full(8, value, np.float32)
    stored = [*weights("F16"), Tensor("rope_freqs.weight", "F32", (8,), factors.tobytes())]
    with pytest.raises(ModelError, match="rope_freqs.weight scales frequencies differently"):
        opened(tensors=stored).file("config.json")


def test_biases_and_windows(opened):
    bias = Tensor("blk.0.attn_q.bias", "F32", (64,), bytes(256))
    assert opened(tensors=[*weights("F16"), bias]).file("config.json") == SMALL | {"attention_bias": True}
    bias = Tensor("blk.1.ffn_up.bias", "F32", (96,), bytes(384))
    assert opened(tensors=[*weights("F16"), bias]).file("config.json") == SMALL | {"mlp_bias": True}
    windows = {"sliding_window": 32, "use_sliding_window": True}
    assert opened(**{"attention.sliding_window": (UINT32, 32)}).file("config.json") == SMALL | windows


REFUSED = {
    "another architecture": (
        "gemma2",
        {},
        "general.architecture is 'gemma2'; supported in GGUF files are llama, qwen2, qwen3",
    ),
    "experts": ("llama", {"expert_count": (UINT32, 8)}, "llama.expert_count is 8, which is not supported"),
    "a scale": (
        "llama",
        {"attention.scale": (FLOAT32, 0.5)},
        "attention.scale is 0.5, which is not supported",
    ),
    "no layers": ("llama", {"block_count": (UINT32, 0)}, "llama.block_count is 0; it must be"),
    "many layers": ("llama", {"block_count": (UINT32, 2000)}, "llama.block_count is 2000"),
    "a size in words": ("llama", {"embedding_length": (STRING, "64")}, "embedding_length is '64'"),
    "heads by layer": (
        "llama",
        {"attention.head_count": (ARRAY, (INT32, [4, 4]))},
        "head_count is an array of 2; it must be an int",
    ),
    "part of a head": (
        "llama",
        {"rope.dimension_count": (UINT32, 8)},
        "rope.dimension_count is 8, but a head has 16",
    ),
    "two lengths": ("llama", {"attention.value_length": (UINT32, 8)}, "value_length is 8, but a head has 16"),
    "no norm": (
        "llama",
        {"attention.layer_norm_rms_epsilon": (FLOAT32, 0)},
        "rms_epsilon is 0.0; .* positive",
    ),
    "a scaling by number": (
        "llama",
        {"rope.scaling.type": (UINT32, 1)},
        "rope.scaling.type is 1; it must be a name",
    ),
    "many tokens": ("llama", {"vocab_size": (UINT32, 2**31)}, "vocab_size is 2147483648"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_name_the_wrong_field(opened, name):
    architecture, more, said = REFUSED[name]
    with pytest.raises(ModelError, match=said):
        opened(architecture, **more).file("config.json")


def test_a_file_without_an_architecture_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(write([("general.quantized", BOOL, True)]).data)
    with pytest.raises(ModelError, match="general.architecture is missing"):
        GGUFModel(path).file("config.json")
