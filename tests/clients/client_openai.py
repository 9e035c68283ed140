"""Checks for the Python package openai."""

import json

import openai
from checks import (
    BASE,
    EMBED_URL,
    EXPECTED,
    IMAGE,
    MODEL,
    QUESTION,
    SMALL,
    Shape,
    assert_close,
    check,
    full_queue,
    needs_tools,
    run,
)

client = openai.OpenAI(base_url=BASE, api_key="none")
ASKS = [{"role": "user", "content": QUESTION}]
TOOL = {
    "type": "function",
    "function": {"name": "paint", "description": "Paint.", "parameters": Shape.model_json_schema()},
}


def create(**fields):
    return client.chat.completions.create(**{"model": MODEL, "messages": ASKS, **fields})


@check("chat")
def chat():
    assert create().choices[0].message.content


@check("streams")
def stream():
    chunks = list(create(stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.total_tokens and chunks[-2].choices[0].finish_reason == "stop"


@check("images")
def image():
    parts = [{"type": "image_url", "image_url": {"url": IMAGE}}, {"type": "text", "text": "What is this?"}]
    assert create(messages=[{"role": "user", "content": parts}]).usage.prompt_tokens_details.image_tokens


@check("structured output")
def parsed():
    found = client.chat.completions.parse(model=MODEL, messages=ASKS, response_format=Shape)
    assert isinstance(found.choices[0].message.parsed, Shape)


@check("tools in a loop: by hand")
def tools():
    needs_tools()
    said = create(tools=[TOOL], tool_choice="required").choices[0]
    assert said.finish_reason == "tool_calls"
    results = []
    for call in said.message.tool_calls:
        Shape.model_validate_json(call.function.arguments)
        results.append({"role": "tool", "tool_call_id": call.id, "content": "painted"})
    again = create(messages=[*ASKS, said.message, *results], tools=[TOOL], tool_choice="none")
    assert again.choices[0].message.content and not again.choices[0].message.tool_calls


@check("tools in a loop: streamed")
def streamed_tools():
    needs_tools()
    named = {"type": "function", "function": {"name": "paint"}}
    with client.chat.completions.stream(
        model=MODEL,
        messages=ASKS,
        tools=[openai.pydantic_function_tool(Shape, name="paint")],
        tool_choice=named,
    ) as stream:
        kinds = {event.type for event in stream}
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert "tool_calls.function.arguments.delta" in kinds and isinstance(
        call.function.parsed_arguments, Shape
    )


@check("errors")
def errors():
    for fields, kind in (
        ({"model": "unknown"}, openai.NotFoundError),
        ({"temperature": -1}, openai.BadRequestError),
        ({"extra_body": {"zzz": 1}}, openai.BadRequestError),
    ):
        try:
            create(**fields)
        except kind as error:
            assert json.loads(error.response.text)["error"]["type"]
        else:
            raise AssertionError(f"{fields} was accepted")


@check("retries")
def retries():
    small = openai.OpenAI(base_url=SMALL, api_key="none")
    with full_queue():
        raw = small.chat.completions.with_raw_response.create(model=MODEL, messages=ASKS, max_tokens=2)
    assert raw.retries_taken and raw.parse().choices[0].message.content


def embed(given, **fields):
    found = openai.OpenAI(base_url=EMBED_URL, api_key="none").embeddings.create(
        model=MODEL, input=given, **fields
    )
    assert found.usage.prompt_tokens and [each.index for each in found.data] == list(range(len(found.data)))
    return [each.embedding for each in found.data]


@check("embeddings: base64, its default")
def embeddings():
    assert_close(embed(EXPECTED["texts"]), EXPECTED["vectors"])


@check("embeddings: numbers")
def numbers():
    assert_close(embed(EXPECTED["texts"][0], encoding_format="float"), EXPECTED["vectors"][:1])


@check("embeddings: dimensions")
def dimensions():
    assert_close(embed(EXPECTED["texts"], dimensions=EXPECTED["dimensions"]), EXPECTED["short"])


@check("embeddings: token ids")
def token_ids():
    assert_close(embed(EXPECTED["ids"]), [EXPECTED["of_ids"]])
    assert_close(embed([EXPECTED["ids"]] * 2), [EXPECTED["of_ids"]] * 2)


@check("errors: embeddings")
def embedding_errors():
    for given, fields in (([], {}), ("a", {"dimensions": 10_000}), ("word " * 3000, {})):
        try:
            embed(given, **fields)
        except openai.BadRequestError as error:
            assert json.loads(error.response.text)["error"]["message"]
        else:
            raise AssertionError(f"{fields} was accepted")


run()
