"""Checks for sentence-transformers.

The package has no HTTP client. The checks load the served models with the package, and compare the results
with the server.
"""

import json
import os
import urllib.request
from io import BytesIO
from pathlib import Path

from checks import (
    EMBED_URL,
    EXPECTED,
    IMAGE,
    IMAGE_EMBED_URL,
    MODEL,
    RERANK_URL,
    Skipped,
    assert_close,
    check,
    run,
)
from PIL import Image

from tests.serve.pipeline_sides import load_transformers, transformers_can_run

if transformers_can_run():
    load_transformers()
from sentence_transformers import CrossEncoder, SentenceTransformer

MODELS = Path(os.environ["EXPECTED"]).parent
LOADED = {"device": "cpu", "local_files_only": True, "model_kwargs": {"dtype": "float32"}}
REPRESENT = "Represent the user's input."


def call(address, path, **fields):
    body = json.dumps({"model": MODEL, **fields}).encode()
    request = urllib.request.Request(
        address.removesuffix("/v1") + path, body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def served(address, **fields):
    return [each["embedding"] for each in call(address, "/v1/embeddings", **fields)["data"]]


@check("embeddings: texts")
def texts():
    model = SentenceTransformer(str(MODELS / "embedder"), **LOADED)
    for name in ("document", "query"):
        found = served(EMBED_URL, input=EXPECTED["texts"], prompt_name=name)
        assert_close(found, model.encode(EXPECTED["texts"], prompt_name=name).tolist())


@check("embeddings: images and mixed inputs")
def images():
    if not transformers_can_run():
        raise Skipped("transformers' Qwen3-VL processor needs build/torchvision, which is not available")
    model = SentenceTransformer(str(MODELS / "image_embedder"), **LOADED)
    with urllib.request.urlopen(IMAGE) as response:
        image = Image.open(BytesIO(response.read())).convert("RGB")
    given = [{"image": image}, {"image": image, "text": "two circles"}, "a red square"]
    wanted = [model.encode([each], prompt=REPRESENT)[0].tolist() for each in given]
    sent = [{"image": IMAGE}, {"image": IMAGE, "text": "two circles"}, "a red square"]
    assert_close(served(IMAGE_EMBED_URL, input=sent), wanted)


@check("reranking")
def reranking():
    model = CrossEncoder(str(MODELS / "reranker"), **LOADED)
    query, documents = EXPECTED["query"], EXPECTED["documents"]
    found = call(RERANK_URL, "/v1/rerank", query=query, documents=documents)["results"]
    wanted = model.rank(query, documents)
    assert [each["index"] for each in found] == [each["corpus_id"] for each in wanted]
    assert_close([each["relevance_score"] for each in found], [float(each["score"]) for each in wanted])


run()
