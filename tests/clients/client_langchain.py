"""Checks for langchain-openai."""

import asyncio

from checks import (
    BASE,
    EMBED_URL,
    EXPECTED,
    IMAGE,
    MODEL,
    QUESTION,
    SMALL,
    TAUGHT,
    Anything,
    Colour,
    Corners,
    Shape,
    assert_close,
    check,
    full_queue,
    needs_tools,
    run,
)
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from openai import BadRequestError

model = ChatOpenAI(base_url=BASE, api_key="none", model=MODEL, temperature=0)


@tool
def paint(colour: Colour, corners: Corners) -> str:
    """Paint a shape."""
    return f"painted with {corners} corners in {colour}"


@check("chat")
def chat():
    said = model.invoke(QUESTION)
    assert said.content and said.usage_metadata["total_tokens"]
    assert model.bind(stop=["triangle"], logprobs=True).invoke(QUESTION).response_metadata["logprobs"]


@check("streams")
def stream():
    chunks = list(model.stream(QUESTION, stream_usage=True))
    whole = chunks[0]
    for each in chunks[1:]:
        whole += each
    assert whole.content == model.invoke(QUESTION).content and whole.usage_metadata["output_tokens"]


@check("images")
def image():
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": IMAGE}}]
    assert model.invoke([HumanMessage(parts)]).content


@check("structured output: json_schema")
def by_schema():
    assert isinstance(model.with_structured_output(Shape, method="json_schema").invoke(QUESTION), Shape)


@check("structured output: json_mode")
def by_mode():
    parts = [{"type": "image_url", "image_url": {"url": IMAGE}}, {"type": "text", "text": TAUGHT}]
    found = model.with_structured_output(Anything, method="json_mode").invoke([HumanMessage(parts)])
    assert isinstance(found, Anything)


@check("structured output: function_calling")
def by_call():
    needs_tools()
    assert isinstance(model.with_structured_output(Shape, method="function_calling").invoke(QUESTION), Shape)


@check("structured output: streamed")
def streamed():
    pieces = list(model.with_structured_output(Shape, method="json_schema").stream(QUESTION))
    assert isinstance(pieces[-1], Shape)


@check("tools in a loop")
def tools():
    needs_tools()
    first = model.bind_tools([paint], tool_choice="any").invoke(QUESTION)
    assert first.tool_calls and not first.invalid_tool_calls
    results = [
        ToolMessage(str(paint.invoke(call["args"])), tool_call_id=call["id"]) for call in first.tool_calls
    ]
    again = model.bind_tools([paint], tool_choice="none").invoke([HumanMessage(QUESTION), first, *results])
    assert again.content and not again.tool_calls


@check("errors")
def errors():
    try:
        model.bind(temperature=-1).invoke(QUESTION)
    except BadRequestError as error:
        assert error.param == "temperature"
    else:
        raise AssertionError("the request was accepted")


@check("retries")
def retries():
    small = ChatOpenAI(base_url=SMALL, api_key="none", model=MODEL, max_tokens=2)
    with full_queue():
        assert small.invoke(QUESTION).content


def embeddings(**fields):
    # Without check_embedding_ctx_length=False, langchain sends token ids of OpenAI's own tokenizer.
    return OpenAIEmbeddings(
        base_url=EMBED_URL, api_key="none", model=MODEL, check_embedding_ctx_length=False, **fields
    )


@check("embeddings: documents and a query")
def documents():
    assert_close(embeddings(chunk_size=7).embed_documents(EXPECTED["texts"]), EXPECTED["vectors"])
    assert_close(embeddings().embed_query(EXPECTED["texts"][0]), EXPECTED["vectors"][0])


@check("embeddings: dimensions")
def dimensions():
    found = embeddings(dimensions=EXPECTED["dimensions"]).embed_documents(EXPECTED["texts"])
    assert_close(found, EXPECTED["short"])


@check("embeddings: async")
def embeddings_async():
    found = asyncio.run(embeddings().aembed_documents(EXPECTED["texts"]))
    assert_close(found, EXPECTED["vectors"])


run()
