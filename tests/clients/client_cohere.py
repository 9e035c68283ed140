"""Checks the server with Cohere's client."""

import asyncio

import cohere
from checks import EXPECTED, MODEL, RERANK_URL, assert_close, check, run

ROOT = RERANK_URL.removesuffix("/v1")  # Cohere's paths begin with the version.
ASKS = {"model": MODEL, "query": EXPECTED["query"], "documents": EXPECTED["documents"]}
ORDER = sorted(range(len(EXPECTED["scores"])), key=lambda index: -EXPECTED["scores"][index])


def assert_ranked(results, count=None):
    order = ORDER[:count]
    assert [one.index for one in results] == order
    assert_close([one.relevance_score for one in results], [EXPECTED["scores"][index] for index in order])


@check("reranking: version 2")
def rerank():
    found = cohere.ClientV2(api_key="none", base_url=ROOT).rerank(**ASKS)
    assert found.id
    assert_ranked(found.results)


@check("reranking: top_n and max_tokens_per_doc")
def top():
    found = cohere.ClientV2(api_key="none", base_url=ROOT).rerank(**ASKS, top_n=2, max_tokens_per_doc=4096)
    assert_ranked(found.results, 2)


@check("reranking: version 1 with documents")
def version_1():
    client = cohere.Client(api_key="none", base_url=ROOT)
    documents = [{"text": text} for text in EXPECTED["documents"]]
    found = client.rerank(**{**ASKS, "documents": documents}, return_documents=True)
    assert_ranked(found.results)
    assert [one.document.text for one in found.results] == [EXPECTED["documents"][index] for index in ORDER]


@check("reranking: async")
def rerank_async():
    async def run_it():
        async with cohere.AsyncClientV2(api_key="none", base_url=ROOT) as client:
            return await client.rerank(**ASKS)

    assert_ranked(asyncio.run(run_it()).results)


@check("errors")
def errors():
    client = cohere.ClientV2(api_key="none", base_url=ROOT)
    for fields, kind in (
        ({"documents": []}, cohere.BadRequestError),
        ({"top_n": 0}, cohere.BadRequestError),
        ({"model": "unknown"}, cohere.NotFoundError),
    ):
        try:
            client.rerank(**{**ASKS, **fields})
        except kind as error:
            assert error.body["error"]["message"]
        else:
            raise AssertionError(f"{fields} was accepted")


run()
