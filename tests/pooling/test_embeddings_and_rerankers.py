"""Tests embeddings and relevance scores against transformers on tiny random checkpoints in float32."""

import json
import math
import random

import numpy as np
import pytest

from mmengine import Engine
from mmengine.errors import InvalidRequest, ModelError
from mmengine.replay import verify
from mmengine_shapes.scenes import random_scene
from tests.llama.tiny import make_tiny
from tests.pooling.pooled_folders import (
    TASK,
    embedding_folder,
    media_folder,
    media_outputs,
    reranker_folder,
    text_logits,
    text_state,
    unit,
)

CLOSE = 1e-5
OPTIONS = {"dtype": "float32", "num_blocks": 300, "max_model_len": 900, "max_num_seqs": 8}
TEXTS = ["the cat", "what is the time, the end " * 30, "über 12 Köche", "the cat sat on the mat " * 9]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embed")
    model = embedding_folder(folder)
    with Engine(folder, token_budget=64, **OPTIONS) as engine:
        yield engine, model


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rerank")
    model = reranker_folder(folder)
    with Engine(folder, **OPTIONS) as engine:
        yield engine, model


def tokens_of(engine, text):
    tokenizer = engine.processor.tokenizer
    return [*tokenizer.text_prefix, *tokenizer.encode(text), *tokenizer.text_suffix]


def test_vectors_equal_transformers(embedder):
    engine, model = embedder
    found = engine.embed(TEXTS)
    wanted = [unit(text_state(model, tokens_of(engine, text))) for text in TEXTS]
    assert found.dtype == np.float32 and np.abs(found - wanted).max() < CLOSE
    again = engine.embed(TEXTS)  # from the prefix cache
    assert np.abs(again - wanted).max() < CLOSE


def test_instructions_dimensions_and_raw_states(embedder):
    engine, model = embedder
    state = text_state(model, tokens_of(engine, f"Instruct: {TASK}\nQuery:the cat"))
    for named in ({"prompt_name": "query"}, {"instruction": TASK}):
        assert np.abs(engine.embed("the cat", **named)[0] - unit(state)).max() < CLOSE
    cut = engine.embed("the cat", prompt_name="query", dimensions=16)
    assert cut.shape == (1, 16) and np.abs(cut[0] - unit(state, 16)).max() < CLOSE
    raw = engine.embed("the cat", prompt_name="query", normalize=False)
    assert np.abs(raw[0] - state).max() < CLOSE


def test_token_ids_and_truncation(embedder):
    engine, model = embedder
    ids = tokens_of(engine, "what is the time")
    assert np.abs(engine.embed([ids])[0] - unit(text_state(model, ids))).max() < CLOSE
    cut = engine.embed("what is the time", truncate_prompt_tokens=6)[0]
    tokenizer = engine.processor.tokenizer
    kept = tokenizer.encode("what is the time")[: 6 - len(tokenizer.text_prefix)]
    assert np.abs(cut - unit(text_state(model, [*tokenizer.text_prefix, *kept]))).max() < CLOSE


def prompt_of(engine, query, document, instruction=TASK):
    """Return the token ids of the reranker's prompt, built without a chat template."""
    tokenizer = engine.processor.tokenizer
    before = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
        'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    after = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    middle = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    pieces = tokenizer.encode(before), tokenizer.encode(middle), tokenizer.encode(after)
    return [token for piece in pieces for token in piece]


def test_scores_equal_transformers(reranker):
    engine, model = reranker
    documents = ["the mat", "what is the end", "12"]
    odds = []
    for document in documents:
        logits = text_logits(model, prompt_of(engine, "the cat", document))
        odds.append(float(logits[11] - logits[7]))
    assert np.allclose(engine.score("the cat", documents, raw=True), odds, atol=CLOSE)
    wanted = [1 / (1 + math.exp(-each)) for each in odds]
    assert np.allclose(engine.score("the cat", documents), wanted, atol=CLOSE)
    found = engine.rerank("the cat", documents, top_n=2)
    order = sorted(range(3), key=lambda index: -odds[index])[:2]
    assert [one.index for one in found] == order and found[0].document == documents[order[0]]
    assert math.isclose(found[0].score, max(wanted), abs_tol=CLOSE)


def test_an_embedding_model_scores_by_the_cosine(embedder):
    engine, _ = embedder
    query = engine.embed("the cat", prompt_name="query")[0]
    documents = engine.embed(TEXTS[:2])
    assert np.allclose(engine.score("the cat", TEXTS[:2]), documents @ query, atol=CLOSE)


def picture(seed):
    return random_scene(random.Random(seed)).draw()


def test_images_and_mixed_inputs_equal_transformers(tmp_path):
    """The expected conversation has the model's system message, then the media, then the text."""
    folder = media_folder(
        tmp_path / "model", "Pooling", "Normalize", Pooling={"pooling_mode_lasttoken": True}
    )
    with Engine(folder, token_budget=48, **OPTIONS) as engine:
        inputs = [{"image": picture(1)}, {"text": "two circles", "image": picture(2)}, "a red square"]
        found = engine.embed(inputs)
        for given, vector in zip(inputs, found, strict=True):
            parts = [{"type": "image", "image": given["image"]}] if "image" in given else []
            text = given.get("text") if isinstance(given, dict) else given
            parts += [{"type": "text", "text": text}] if text else []
            system = {"role": "system", "content": [{"type": "text", "text": "Represent the user's input."}]}
            state, _ = media_outputs(engine.processor, [system, {"role": "user", "content": parts}])
            assert np.abs(vector - unit(state)).max() < CLOSE
        with pytest.raises(InvalidRequest, match="gives embeddings and gives no answers"):
            engine.generate("What is this?", max_tokens=4)


def test_a_reranker_of_images_equals_transformers(tmp_path):
    tokens = {"true_token_id": 31, "false_token_id": 42}
    folder = media_folder(tmp_path / "model", "LogitScore", LogitScore=tokens)
    with Engine(folder, **OPTIONS) as engine:
        found = engine.score("two circles", [{"image": picture(3)}], raw=True)
        judge = (
            "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
            'Note that the answer can only be "yes" or "no".'
        )
        instruct = "Given a search query, retrieve relevant candidates that answer the query."
        texts = f"<Instruct>: {instruct}<Query>:two circles\n<Document>:"
        user = [{"type": "text", "text": texts}, {"type": "image", "image": picture(3)}]
        messages = [{"role": "system", "content": judge}, {"role": "user", "content": user}]
        _, logits = media_outputs(engine.processor, messages)
        assert math.isclose(found[0], float(logits[31] - logits[42]), abs_tol=CLOSE)


def test_the_log_has_digests_and_verifies(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    embedding_folder(folder)
    with Engine(folder, log=tmp_path / "log", **OPTIONS) as engine:
        engine.embed(TEXTS)
    assert verify(tmp_path / "log").divergence is None


def test_wrong_calls_are_refused(embedder, reranker):
    engine, _ = embedder
    for call, words in (
        (lambda: engine.embed([]), "empty"),
        (lambda: engine.embed("a", dimensions=49), "1 to 48"),
        (lambda: engine.embed("a", dimensions=0), "1 to 48"),
        (lambda: engine.embed("the " * 2000), "too long"),
        (lambda: engine.embed("a", prompt_name="nothing"), "not a prompt of this model"),
        (lambda: engine.embed("a", prompt_name="query", instruction="b"), "not both"),
        (lambda: engine.embed({"image": "x.png"}), "no images"),
        (lambda: engine.score(["a", "b"], ["c", "d", "e"]), "make no pairs"),
        (lambda: engine.generate("hi", max_tokens=1), "gives no answers"),
        (lambda: reranker[0].embed("a"), "gives no embeddings"),
        (lambda: reranker[0].generate("hi", max_tokens=1), "gives no answers"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            call()


def test_a_chat_model_ranks_nothing(tmp_path):
    make_tiny(tmp_path, "Qwen3")
    with Engine(tmp_path, **OPTIONS) as engine:
        assert engine.embed("the cat").shape == (1, 48)
        with pytest.raises(InvalidRequest, match="ranks no documents"):
            engine.rerank("a", ["b"])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: embedding_folder(folder, mode="mean"), "pools by mean"),
        (lambda folder: reranker_folder(folder, tokens=(99_999, 7)), "no valid true_token_id"),
        (
            lambda folder: (folder / "modules.json").write_text('[{"type": "a.Pooling", "path": "../b"}]'),
            "not a valid name",
        ),
        (lambda folder: (folder / "modules.json").write_text("{"), "not a list of modules"),
        (
            lambda folder: (folder / "config_sentence_transformers.json").write_text(
                json.dumps({"prompts": {"a": "b"}, "default_prompt_name": "c"})
            ),
            "is no prompt",
        ),
    ],
)
def test_damaged_folders_are_refused(tmp_path, damage, words):
    make_tiny(tmp_path, "Qwen3")
    damage(tmp_path)
    with pytest.raises(ModelError, match=words):
        Engine(tmp_path, **OPTIONS)
