"""Tests SmolLM2-135M-Instruct from its GGUF file: the config, the chat template, the weights, and the model's
answer to a question.
"""

import json

import jinja2
import pytest
import tokenizers
import torch

from mmengine.checkpoint.gguf.model import GGUFModel
from mmengine.models.reader import open_reader
from tests.gguf.fetched import SMOLLM2, fetched

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "max_position_embeddings": 8192,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "rms_norm_eps": 9.999999747378752e-06,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def model():
    return GGUFModel(fetched(SMOLLM2))


@pytest.fixture(scope="module")
def weights(model):
    entries = model.tensors(lambda name: name)
    with open_reader(entries, torch.device("cpu"), torch.float32) as reader:
        return {name: reader.read(name) for name in entries}


def prompt_of(model) -> str:
    template = jinja2.Template(model.file("tokenizer_config.json")["chat_template"])
    return template.render(messages=MESSAGES, add_generation_prompt=True)


def test_the_config_equals_the_folders(model):
    assert model.file("config.json") == CONFIG
    assert model.file("generation_config.json") == {"eos_token_id": [2, 0]}  # <|im_end|>, <|endoftext|>
    assert prompt_of(model) == PROMPT


def test_every_weight_equals_transformers_to_the_bit(model, weights):
    reader = pytest.importorskip("transformers.integrations.gguf.reader")
    dequant = pytest.importorskip("transformers.integrations.gguf.dequant")
    legacy = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
    processor = legacy.LlamaTensorProcessor(CONFIG)
    path, stored = str(model.container.path), {}
    for name, lazy in reader.load_gguf_state_dict(reader.GgufHeader.from_file(path)).items():
        kind = lazy.ggml_type
        values = dequant.dequantize(torch.from_numpy(lazy.data.copy()), kind) if kind else lazy[...]
        stored[name] = (values, lazy.shape)
    assert len(stored) == len(weights) == 272
    for name, entry in model.tensors(lambda name: name).items():
        values, _ = stored[entry.stored_name]
        its = processor.process(values.reshape(entry.shape).numpy(), entry.stored_name).weights
        assert torch.equal(torch.from_numpy(its.copy()).view(torch.int32), weights[name].view(torch.int32)), (
            name
        )


def test_the_model_answers(model, weights):
    """transformers' network answers correctly with config, tokenizer and weights read from the file."""
    from transformers import LlamaConfig, LlamaForCausalLM  # Slow to import.

    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(model.file("tokenizer.json")))
    with torch.device("meta"):
        network = LlamaForCausalLM(LlamaConfig(**model.file("config.json")))
    network.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}, assign=True)
    network.model.rotary_emb = type(network.model.rotary_emb)(network.config)
    ids = tokenizer.encode(prompt_of(model), add_special_tokens=False).ids
    out = network.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
    assert tokenizer.decode(out, skip_special_tokens=False) == "The capital of France is Paris.<|im_end|>"
