"""Checks for llama-index-embeddings-openai-like."""

import asyncio

from checks import EMBED_URL, EXPECTED, MODEL, assert_close, check, run
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from openai import BadRequestError


def model(**fields):
    return OpenAILikeEmbedding(model_name=MODEL, api_base=EMBED_URL, max_retries=0, **fields)


@check("embeddings: in batches of 10")
def batches():
    assert_close(model().get_text_embedding_batch(EXPECTED["texts"]), EXPECTED["vectors"])


@check("embeddings: a query")
def query():
    found = model().get_query_embedding(EXPECTED["texts"][0])
    assert_close(found, EXPECTED["vectors"][0])
    assert model().similarity(found, EXPECTED["vectors"][0]) > 0.9999


@check("embeddings: dimensions")
def dimensions():
    short = model(dimensions=EXPECTED["dimensions"])
    assert_close(short.get_text_embedding_batch(EXPECTED["texts"]), EXPECTED["short"])


@check("embeddings: prompt_name in the body")
def prompt_name():
    named = model(additional_kwargs={"extra_body": {"prompt_name": "query"}})
    assert_close(named.get_text_embedding_batch(EXPECTED["texts"]), EXPECTED["queries"])


@check("embeddings: async")
def embeddings_async():
    found = asyncio.run(model(num_workers=2).aget_text_embedding_batch(EXPECTED["texts"]))
    assert_close(found, EXPECTED["vectors"])


@check("errors")
def errors():
    try:
        model(dimensions=10_000).get_text_embedding("a")
    except BadRequestError as error:
        assert error.param == "dimensions"
    else:
        raise AssertionError("the request was accepted")


run()
