"""Makes embedding models with random bfloat16 weights, and inputs for them. The text model has
Qwen3-Embedding-0.6B's shape. The image model has Qwen3-VL-Embedding-2B's shape.
"""

import json
import re
from pathlib import Path

import numpy as np
import torch

from benchmarks.common import large_model

VOCABULARY = Path(__file__).resolve().parents[2] / "build" / "vocabularies" / "ggml-vocab-qwen2.gguf"
TEXT = large_model.TEXT | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 32_768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
SMALL = large_model.SMALL_TEXT | {"rope_parameters": TEXT["rope_parameters"]}
MODULES = {
    "": "sentence_transformers.base.modules.transformer.Transformer",
    "1_Pooling": "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
    "2_Normalize": "sentence_transformers.base.modules.normalize.Normalize",
}
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
WORD = re.compile(r"Ġ[a-z]{3,9}", re.ASCII)


def make_text_model(folder: Path, *, small: bool = False) -> None:
    """Write a Qwen3 that embeds texts."""
    from transformers import Qwen3Config, Qwen3ForCausalLM  # lazy: takes seconds

    large_model.make_tokenizer(folder, None if small else VOCABULARY)
    for path in folder.glob("*preprocessor_config.json"):
        path.unlink()
    config = Qwen3Config(**(SMALL if small else TEXT), tie_word_embeddings=True, dtype="bfloat16")
    config.architectures = ["Qwen3ForCausalLM"]
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    config.save_pretrained(folder)
    large_model.write_weights(folder, model, small)
    _mark(folder, config.hidden_size, {})


def make_image_model(folder: Path, *, small: bool = False, layers: int | None = None) -> None:
    """Write a Qwen3-VL that embeds texts and images. `layers`: number of layers in the text model, and also
    in the vision tower.
    """
    vocabulary = None if small else VOCABULARY
    large_model.make(folder, vocabulary, small=small, layers=layers, tower_layers=layers)
    width = (large_model.SMALL_TEXT if small else large_model.TEXT)["hidden_size"]
    features = {"method": "forward", "method_output_name": "last_hidden_state"}
    modalities: dict[str, dict[str, str]] = dict.fromkeys(("text", "image", "video"), features)
    modalities["message"] = {**features, "format": "structured"}
    module = {
        "transformer_task": "feature-extraction",
        "modality_config": modalities,
        "module_output_name": "token_embeddings",
        "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
    }
    _mark(folder, width, module)


def _mark(folder: Path, width: int, module: dict[str, object]) -> None:
    """Write sentence-transformers' description files for an embedding model."""
    listed = [
        {"idx": at, "name": str(at), "path": path, "type": kind}
        for at, (path, kind) in enumerate(MODULES.items())
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    if module:
        (folder / "sentence_bert_config.json").write_text(json.dumps(module))
    for name in ("1_Pooling", "2_Normalize"):
        (folder / name).mkdir()
    pooling = {"embedding_dimension": width, "pooling_mode": "lasttoken"}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "2_Normalize" / "config.json").write_text("{}")
    prompts = {"prompts": {"query": f"Instruct: {INSTRUCTION}\nQuery:"}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))


def random_texts(folder: Path, lengths: np.ndarray) -> list[str]:
    """Return a text for each length in tokens. Each word is a single token."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    words = sorted(token.replace("Ġ", " ") for token in vocabulary if WORD.fullmatch(token))
    chance = np.random.default_rng(1)
    return ["".join(words[at] for at in chance.integers(0, len(words), length)) for length in lengths]


def photographs(folder: Path, count: int, widths: tuple[int, int]) -> list[str]:
    """Write JPEG files and return their paths. The widths are evenly spaced, in random order."""
    chance = np.random.default_rng(2)
    found = []
    for number, width in enumerate(chance.permutation(np.linspace(*widths, count, dtype=int))):
        found.append(str(large_model.photograph(folder / f"{number}.jpg", int(width), int(width) * 3 // 4)))
    return found
