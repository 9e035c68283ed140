"""Tests /v1/embeddings, /pooling, /v1/rerank and /score with tiny models and real sockets."""

import asyncio
import base64
import json

import numpy as np
import openai
import pytest

from mmengine.errors import ErrorCode, InvalidRequest
from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.serve.prompt.framed_text import FramedText
from mmengine.server.lifecycle.warm_up import warm_up
from tests.pooling.pooled_folders import embedding_folder, media_folder, reranker_folder
from tests.server.batching import begun, client_of, ended, lines_in
from tests.server.running import served

OPTIONS = {"dtype": "float32", "num_blocks": 300, "max_model_len": 900, "max_num_seqs": 8}
TEXTS = ["the cat", "what is the time"]


@pytest.fixture(scope="module")
def embedding_server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embed")
    embedding_folder(folder)
    with served(AsyncEngine(folder, **OPTIONS), names=("embedder",), max_inputs=8) as server:
        yield server


@pytest.fixture(scope="module")
def rerank_server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rerank")
    reranker_folder(folder)
    with served(AsyncEngine(folder, **OPTIONS), names=("reranker",)) as server:
        yield server


def vectors(body):
    return np.array([item["embedding"] for item in body["data"]], np.float32)


def test_openai_client_gets_the_same_vectors_in_both_encodings(embedding_server):
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{embedding_server.port}/v1", api_key="none")
    by_default = client.embeddings.create(model="embedder", input=TEXTS, user="someone")
    as_numbers = client.embeddings.create(model="embedder", input=TEXTS, encoding_format="float")
    one, other = ([item.embedding for item in each.data] for each in (by_default, as_numbers))
    assert np.allclose(one, other, atol=1e-7) and np.allclose(np.linalg.norm(one, axis=1), 1, atol=1e-6)
    assert by_default.usage.prompt_tokens == by_default.usage.total_tokens > 2
    short = client.embeddings.create(model="embedder", input="the cat", dimensions=8)
    assert len(short.data) == 1 and len(short.data[0].embedding) == 8


def test_token_ids_messages_and_pooling(embedding_server):
    _, _, text = embedding_server.call("/v1/embeddings", {"input": "the cat"})
    _, _, ids = embedding_server.call("/tokenize", {"prompt": "the cat"})
    for given in (ids["tokens"], [ids["tokens"]]):
        status, _, body = embedding_server.call("/v1/embeddings", {"input": given})
        assert status == 200 and np.allclose(vectors(body), vectors(text), atol=1e-6)
    status, _, body = embedding_server.call(
        "/v1/embeddings", {"messages": [{"role": "user", "content": "the cat"}]}
    )
    assert status == 200 and body["usage"]["prompt_tokens"] > text["usage"]["prompt_tokens"]
    status, _, body = embedding_server.call("/pooling", {"input": TEXTS, "encoding_format": "base64"})
    assert status == 200 and [item["object"] for item in body["data"]] == ["pooling"] * 2
    first = np.frombuffer(base64.b64decode(body["data"][0]["data"]), "<f4")
    assert np.allclose(first, vectors(text)[0], atol=1e-6)


def test_rankings_have_the_shape_of_jina_and_cohere(rerank_server):
    body = {"model": "reranker", "query": "the cat", "documents": ["the mat", {"text": "12"}, "the end"]}
    found = [rerank_server.call(path, body)[2] for path in ("/rerank", "/v1/rerank", "/v2/rerank")]
    assert found[0]["results"] == found[1]["results"] == found[2]["results"]
    results = found[0]["results"]
    scores = [one["relevance_score"] for one in results]
    assert scores == sorted(scores, reverse=True) and all(0 < score < 1 for score in scores)
    assert sorted(one["index"] for one in results) == [0, 1, 2]
    by_index = {one["index"]: one["document"] for one in results}
    assert by_index == {0: {"text": "the mat"}, 1: {"text": "12"}, 2: {"text": "the end"}}
    _, _, bare = rerank_server.call("/rerank", {**body, "top_n": 1, "return_documents": False})
    assert bare["results"] == [{key: results[0][key] for key in ("index", "relevance_score")}]
    scored = rerank_server.call("/score", {"text_1": "the cat", "text_2": ["the mat", "12", "the end"]})[2]
    pairs = {one["index"]: one["score"] for one in scored["data"]}
    assert pairs == {one["index"]: pytest.approx(one["relevance_score"], abs=1e-6) for one in results}
    same = rerank_server.call("/v1/score", {"queries": ["the cat"], "documents": ["the mat"]})[2]
    assert same["data"][0]["score"] == pytest.approx(pairs[0], abs=1e-6)


EMBED, RERANK, SCORE = "/v1/embeddings", "/v1/rerank", "/score"
REFUSED = [
    (EMBED, {}, "set either input or messages", "input"),
    (EMBED, {"input": []}, "1 to 8", "input"),
    (EMBED, {"input": ["a"] * 9}, "(max_inputs)", "input"),
    (EMBED, {"input": "a", "messages": [{"role": "user", "content": "a"}]}, "set either", "input"),
    (EMBED, {"input": ["a", 1]}, "mixes token ids with texts", "input"),
    (EMBED, {"input": "a", "dimensions": 49}, "1 to 48", "dimensions"),
    (EMBED, {"input": "a", "dimensions": 0}, "1 to 48", "dimensions"),
    (EMBED, {"input": "the " * 3000}, "too long", "input"),
    (EMBED, {"input": ["a", "the " * 3000]}, "too long", "input[1]"),
    (EMBED, {"input": ["the " * 3000]}, "too long", "input[0]"),
    (EMBED, {"input": [1] * 3000}, "too long", "input"),
    (EMBED, {"input": [99_999]}, "token", "input"),
    (EMBED, {"input": [[1], [99_999]]}, "token", "input[1]"),
    (EMBED, {"input": ["a", []]}, "empty", "input[1]"),
    (EMBED, {"input": {"text": 5}}, "a text, token ids, or an object with text", "input"),
    (EMBED, {"messages": [{"role": "user", "content": "the " * 3000}]}, "too long", "messages"),
    (EMBED, {"input": "a", "truncate_prompt_tokens": 900}, "1 to 899", "truncate_prompt_tokens"),
    (EMBED, {"input": "a", "truncate_prompt_tokens": 1}, "1 tokens beside", "truncate_prompt_tokens"),
    (EMBED, {"input": ["a", "b"], "truncate_prompt_tokens": 1}, "beside", "truncate_prompt_tokens"),
    (EMBED, {"input": "a", "truncate_prompt_tokens": 0}, "must be -1", "truncate_prompt_tokens"),
    (EMBED, {"input": "a", "encoding_format": "hex"}, "encoding_format", "encoding_format"),
    (EMBED, {"input": "a", "prompt_name": "none"}, "not a prompt of this model", "prompt_name"),
    (EMBED, {"input": {"image": "data:image/png;base64,aa"}}, "no images", "input"),
    (SCORE, {"text_1": "a", "text_2": []}, "1 to 8", "text_2"),
    (SCORE, {"queries": "a", "documents": []}, "1 to 8", "documents"),
    (SCORE, {"text_1": "a", "queries": "a", "text_2": "b"}, "two names of one field", "text_1"),
    (SCORE, {"text_1": "the " * 3000, "text_2": ["a"]}, "too long", "text_1"),
    (SCORE, {"text_1": "a", "text_2": ["b", "the " * 3000]}, "too long", "text_2[1]"),
    (SCORE, {"text_1": "a", "text_2": ["b", {"image": "c"}]}, "no images", "text_2[1]"),
    (RERANK, {"query": "the " * 3000, "documents": ["a"]}, "too long", "query"),
    ("/v1/sessions", {}, "gives no answers", None),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, "gives no answers", None),
]


@pytest.mark.parametrize(("path", "body", "words", "param"), REFUSED)
def test_bad_calls_get_one_clear_400(embedding_server, path, body, words, param):
    status, _, found = embedding_server.call(path, body)
    assert status == 400 and words in found["error"]["message"], found
    assert found["error"]["param"] == param, found


@pytest.mark.parametrize(
    ("write", "count"),
    [
        (embedding_folder, 1),
        (reranker_folder, 1),
        (lambda folder: media_folder(folder / "m", "Pooling", Pooling={"pooling_mode": "lasttoken"}), 2),
    ],
)
def test_the_first_steps_of_a_server_are_pooled_requests(tmp_path, write, count):
    """The warm-up embeds or scores a text, and also an image if the model accepts images."""

    async def warmed_up():
        write(tmp_path)
        folder = tmp_path / "m" if (tmp_path / "m").exists() else tmp_path
        engine = AsyncEngine(folder, **OPTIONS)
        await warm_up(engine, "")
        finished = engine.stats().num_finished
        await engine.close()
        return finished

    assert asyncio.run(warmed_up()) == count


def test_a_long_text_is_cut_if_the_call_says_so(embedding_server):
    body = {"input": "the " * 3000, "truncate_prompt_tokens": -1}
    status, _, found = embedding_server.call("/v1/embeddings", body)
    assert status == 200 and found["usage"]["prompt_tokens"] == OPTIONS["max_model_len"] - 1


def test_cutting_reads_only_the_beginning_of_a_text(embedding_server, monkeypatch):
    """The tokenizer would need several seconds for a whole text of 8 million characters."""
    processor = embedding_server.engine.processor
    encode, num_chars = processor.tokenizer.encode, []

    def counted(text, **options):
        num_chars.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(processor.tokenizer, "encode", counted)
    for text in ("the cat sat ", "a", "ü12 "):
        long = text * (8_000_000 // len(text))
        prompt = FramedText(long, keep=40).prepare(processor)
        assert prompt.prompt_token_ids.tolist() == encode(long[:4000])[:40]
        with pytest.raises(InvalidRequest):
            FramedText(long, keep=40, head=long).prepare(processor)
    assert num_chars and sum(num_chars) < 100_000


def test_a_reranker_embeds_and_chats_nothing(rerank_server):
    long = "the " * 3000
    for path, body, param in (
        (EMBED, {"input": "a"}, None),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, None),
        ("/v1/sessions", {}, None),
        (RERANK, {"query": "a", "documents": []}, "documents"),
        (RERANK, {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        (RERANK, {"query": "a", "documents": ["b"], "max_tokens_per_doc": 0}, "max_tokens_per_doc"),
        (RERANK, {"query": "a", "documents": ["b"], "max_tokens_per_doc": 9}, "max_tokens_per_doc"),
        (RERANK, {"query": "a", "documents": ["b"], "max_tokens_per_doc": 200}, "max_tokens_per_doc"),
        (RERANK, {"query": long, "documents": ["b"], "max_tokens_per_doc": 800}, "max_tokens_per_doc"),
        (RERANK, {"query": "a", "documents": ["b", long]}, "documents[1]"),
        (RERANK, {"query": "a", "documents": [long]}, "documents[0]"),
        (RERANK, {"query": "a", "documents": ["b", {"image": "c"}]}, "documents[1]"),
        (SCORE, {"text_1": "a", "text_2": long}, "text_2"),
    ):
        status, _, found = rerank_server.call(path, body)
        assert status == 400 and found["error"]["message"], found
        assert found["error"]["param"] == param, found


def test_errors_about_images_name_the_input(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media") / "m"
    media_folder(folder, "Pooling", Pooling={"pooling_mode": "lasttoken"})
    bad = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}
    image = {"image": "data:image/png;base64,aaaa"}
    with served(AsyncEngine(folder, **OPTIONS), names=("embedder",)) as server:
        for body, param in (
            ({"input": ["a", image]}, "input[1]"),
            ({"input": ["a", {"image": "https://example.com/a.png"}]}, "input[1]"),
            ({"input": image}, "input"),
            ({"messages": [{"role": "user", "content": [bad]}]}, "messages[0].content[0]"),
            ({"input": ["a"], "truncate_prompt_tokens": 20}, "truncate_prompt_tokens"),
        ):
            status, _, found = server.call(EMBED, body)
            assert (status, found["error"]["param"]) == (400, param), found


def test_the_routes_are_in_the_openapi_document(embedding_server):
    document = embedding_server.call("/openapi.json", method="GET")[2]
    assert {"/v1/embeddings", "/pooling", "/rerank", "/v1/rerank", "/score"} <= document["paths"].keys()
    assert json.dumps(document["components"]["schemas"]["EmbeddingBody"])
    assert ErrorCode.UNSUPPORTED_FIELD


def test_batches_of_vectors_and_scores(tmp_path):
    embedding_folder(tmp_path / "model")
    engine = AsyncEngine(tmp_path / "model", log=tmp_path / "log", **OPTIONS)
    with served(engine, names=("embedder",), storage={"log": tmp_path / "log"}, max_inputs=8) as server:
        client = client_of(server)
        _, _, wanted = server.call("/v1/embeddings", {"input": TEXTS})
        bodies = {"both": {"input": TEXTS}, "empty": {"input": []}, "long": {"input": "word " * 2000}}
        lines = [vector_line(name, "/v1/embeddings", **body) for name, body in bodies.items()]
        found = ended(client, begun(client, lines, "/v1/embeddings"))
        assert (found.request_counts.completed, found.request_counts.failed) == (1, 2)
        (answer,) = lines_in(client, found.output_file_id)
        assert answer["custom_id"] == "both"
        assert np.allclose(vectors(answer["response"]["body"]), vectors(wanted), atol=1e-6)
        errors = {each["custom_id"]: each["response"] for each in lines_in(client, found.error_file_id)}
        assert {name: each["status_code"] for name, each in errors.items()} == {"empty": 400, "long": 400}
        pair = vector_line("s", "/v1/score", text_1="the cat", text_2=TEXTS)
        found = ended(client, begun(client, [pair], "/v1/score"))
        (answer,) = lines_in(client, found.output_file_id)
        _, _, wanted = server.call("/v1/score", {"text_1": "the cat", "text_2": TEXTS})
        scores, wanted = (
            [each["score"] for each in body["data"]] for body in (answer["response"]["body"], wanted)
        )
        assert len(scores) == 2 and np.allclose(scores, wanted, atol=1e-6)
        with pytest.raises(openai.BadRequestError, match="/v1/embeddings, /v1/rerank, /v1/score"):
            begun(client, lines, "/v1/other")


def vector_line(custom_id, url, **body):
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode()
