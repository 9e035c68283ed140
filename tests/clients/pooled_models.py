"""Writes tiny embedding models and a reranker for client tests, and the engine's results for comparison."""

import json
from pathlib import Path

from mmengine import Engine
from tests.pooling.pooled_folders import embedding_folder, media_folder, reranker_folder, set_in

OPTIONS = {"dtype": "float32", "num_blocks": 300, "max_model_len": 900, "max_num_seqs": 8}
ARGUMENTS = ["--dtype", "float32", "--set", "num_blocks=300", "--set", "max_model_len=900"]
TEXTS = ["the cat", "what is the time, the end " * 20, "über 12 Köche"]
TEXTS += [f"the cat sat {n}" for n in range(61)]
QUERY, DOCUMENTS = "the cat", ["the mat", "what is the end", "12", "the cat sat on the mat " * 9]
SHORT = 16  # A value for the argument `dimensions`.
FEATURES = {"method": "forward", "method_output_name": "last_hidden_state"}


def write_models(folder: Path) -> dict[str, Path]:
    """Write the models and `expected.json`, and return the models' folders by name.

    `expected.json` has the inputs, and the results of `Engine.embed` and `Engine.score`.
    """
    models = {name: folder / name for name in ("embedder", "reranker", "image_embedder")}
    for name, write in (("embedder", embedding_folder), ("reranker", reranker_folder)):
        models[name].mkdir()
        write(models[name])
    pooling = {"embedding_dimension": 128, "pooling_mode": "lasttoken"}
    media_folder(models["image_embedder"], "Pooling", "Normalize", Pooling=pooling)
    set_in(
        models["image_embedder"] / "sentence_bert_config.json",
        transformer_task="feature-extraction",
        modality_config={
            **dict.fromkeys(("text", "image", "video"), FEATURES),
            "message": {**FEATURES, "format": "structured"},
        },
        module_output_name="token_embeddings",
        processing_kwargs={"chat_template": {"add_generation_prompt": True}},
    )
    expected = {"texts": TEXTS, "query": QUERY, "documents": DOCUMENTS, "dimensions": SHORT}
    with Engine(models["embedder"], **OPTIONS) as engine:
        expected["vectors"] = engine.embed(TEXTS).tolist()
        expected["short"] = engine.embed(TEXTS, dimensions=SHORT).tolist()
        expected["queries"] = engine.embed(TEXTS, prompt_name="query").tolist()
        expected["ids"] = engine.processor.tokenizer.encode(TEXTS[0])
        expected["of_ids"] = engine.embed([expected["ids"]])[0].tolist()
    with Engine(models["reranker"], **OPTIONS) as engine:
        expected["scores"] = engine.score(QUERY, DOCUMENTS)
    (folder / "expected.json").write_text(json.dumps(expected))
    return models
