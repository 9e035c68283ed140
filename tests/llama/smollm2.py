"""Opens SmolLM2-135M-Instruct in the engine and in transformers, and supplies prompts."""

import re
from pathlib import Path

import torch

from mmengine.checkpoint.gguf.model import GGUFModel
from mmengine.config import EngineConfig
from mmengine.models.reader import open_reader
from mmengine.serve.engine.engine import Engine
from tests.gguf.fetched import SMOLLM2, fetched

ROOT = Path(__file__).parents[2]
EVERY = 13  # `make test` uses every 13th prompt in prompts.txt.
ASKED_OF_TEXTS = (
    "Summarize in one sentence: {}",
    "What is this text about?\n\n{}",
    "Ask a question that this text answers: {}",
    "Read the text and list its three most important words.\n\n{}",
    "Rewrite this for a beginner: {}",
)


def open_engine(log=None, **settings):
    config = EngineConfig(**{"max_model_len": 1024, "num_blocks": 1025, "num_threads": 1, **settings})
    return Engine(fetched(SMOLLM2), device="cpu", dtype="float32", config=config, log=log)


def load_transformers():
    """Return transformers' float32 network with the weights that our reader gets from the GGUF file.

    tests/gguf/test_smollm2.py checks that transformers reads the same weights, bit for bit.
    """
    from transformers import LlamaConfig, LlamaForCausalLM  # Slow to import.

    model = GGUFModel(fetched(SMOLLM2))
    entries = model.tensors(lambda name: name)
    with open_reader(entries, torch.device("cpu"), torch.float32) as reader:
        weights = {name: reader.read(name) for name in entries}
    with torch.device("meta"):
        network = LlamaForCausalLM(LlamaConfig(**model.file("config.json"))).eval()
    network.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}, assign=True)
    network.model.rotary_emb = type(network.model.rotary_emb)(network.config)
    return network


def written_prompts():
    return (Path(__file__).parent / "prompts.txt").read_text().splitlines()


def prompts(count):
    """Return `count` prompts: those in prompts.txt, then questions about paragraphs of this repository's
    documents.
    """
    asked = written_prompts()
    pages = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
    texts = [
        text.replace("\n", " ")
        for page in pages
        for text in re.split(r"\n\s*\n", page.read_text())
        if 200 < len(text) < 500 and text[0].isalpha()
    ]
    asked += [ASKED_OF_TEXTS[i % len(ASKED_OF_TEXTS)].format(text) for i, text in enumerate(texts)]
    assert len(asked) >= count and len(set(asked)) == len(asked)
    return asked[:count]


def chat(question):
    return [{"role": "user", "content": question}]


def scores(network, prompt_ids, token_ids):
    """Return transformers' log-probabilities at the position of each generated token, float32 [tokens,
    vocab].
    """
    ids = torch.tensor([[*prompt_ids, *token_ids[:-1]]])
    with torch.inference_mode():
        hidden = network.model(ids, use_cache=False).last_hidden_state[0, len(prompt_ids) - 1 :]
        return network.lm_head(hidden).log_softmax(-1)
