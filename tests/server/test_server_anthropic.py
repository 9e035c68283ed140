"""Tests /v1/messages with Anthropic's Python client and the included model."""

import asyncio
import base64
from typing import Literal

import anthropic
import pytest
from pydantic import BaseModel

from mmengine import AsyncEngine
from mmengine.server.chat.response_builder import ResponseBuilder
from mmengine.server.http.errors import shutdown_error
from tests.pictures import data_url, scene
from tests.serve.test_serve_chat import JSON_TEMPLATE, SHAPES
from tests.server.running import served

NAME = "shapes"
ASKED = {
    "model": NAME,
    "max_tokens": 100,
    "messages": [{"role": "user", "content": "What is a triangle?"}],
    "extra_body": {"temperature": 0},  # Newer clients have no parameter `temperature`.
}
TOOLS = [{"name": "area", "description": "Of a shape.", "input_schema": SHAPES, "strict": True}]
PICTURE = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(scene(1)).decode()}


@pytest.fixture(scope="module")
def server():
    with served(AsyncEngine(), names=(NAME,), chat_template=JSON_TEMPLATE) as one:
        yield one


@pytest.fixture(scope="module")
def client(server):
    address = f"http://127.0.0.1:{server.port}"
    with anthropic.Anthropic(base_url=address, api_key="none", max_retries=0) as one:
        yield one


def looking(source):
    content = [{"type": "image", "source": source}, {"type": "text", "text": "Describe the image."}]
    return {**ASKED, "messages": [{"role": "user", "content": content}]}


def test_a_message_and_its_stream_say_the_same(client):
    whole = client.messages.create(**ASKED, system="Be brief.")
    assert whole.stop_reason == "end_turn" and whole.content[0].text and whole.model == NAME
    with client.messages.stream(**ASKED, system="Be brief.") as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(texts) == whole.content[0].text == final.content[0].text
    assert len(texts) > 1 and final.stop_reason == "end_turn"
    told = [(each.usage.input_tokens + each.usage.cache_read_input_tokens) for each in (whole, final)]
    counted = client.messages.count_tokens(
        model=NAME, messages=ASKED["messages"], system="Be brief.", thinking={"type": "adaptive"}
    )
    assert told == [counted.input_tokens] * 2


def test_images_are_read_and_counted(client, server):
    said = client.messages.create(**looking(PICTURE))
    chat = server.chat(
        [
            {"type": "image_url", "image_url": {"url": data_url(1)}},
            {"type": "text", "text": "Describe the image."},
        ],
        temperature=0,
        max_tokens=100,
    )[2]
    assert said.content[0].text == chat["choices"][0]["message"]["content"] and said.content[0].text
    counted = client.messages.count_tokens(model=NAME, messages=looking(PICTURE)["messages"])
    assert counted.input_tokens == chat["usage"]["prompt_tokens"]
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\].*no image|not"):
        client.messages.create(**looking({**PICTURE, "data": "AAAA"}))


def test_tool_calls_and_results_round_trip(client):
    choice = {"type": "any", "disable_parallel_tool_use": True}
    first = client.messages.create(**ASKED, tools=TOOLS, tool_choice=choice)
    (call,) = first.content
    assert (call.type, call.name, first.stop_reason) == ("tool_use", "area", "tool_use")
    assert call.id.startswith("toolu_") and call.input["shape"] in ("square", "circle")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "4"}
    turns = [
        *ASKED["messages"],
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = client.messages.create(**{**ASKED, "messages": turns, "max_tokens": 8}, tools=TOOLS)
    assert second.usage.output_tokens > 0
    with client.messages.stream(**ASKED, tools=TOOLS, tool_choice=choice) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        assert stream.get_final_message().content[0].input == call.input
    assert len(pieces) > 1


class Thing(BaseModel):
    shape: Literal["square", "circle"]
    is_large: bool


def test_structured_output_and_stop_reasons(client):
    parsed = client.messages.parse(**ASKED, output_format=Thing)
    assert isinstance(parsed.parsed_output, Thing)
    text = client.messages.create(**ASKED).content[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    cut = client.messages.create(**ASKED, stop_sequences=[stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    short = client.messages.create(**{**ASKED, "max_tokens": 1})
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 1)
    begun = {"role": "assistant", "content": " ".join(text.split(" ")[:2])}
    goes_on = client.messages.create(**{**ASKED, "messages": [*ASKED["messages"], begun]})
    assert begun["content"] + goes_on.content[0].text == text


@pytest.mark.parametrize(
    ("asked", "kind", "says"),
    [
        ({"model": "claude"}, anthropic.NotFoundError, "claude"),
        ({"extra_body": {"top_p": -1}}, anthropic.BadRequestError, "top_p"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, anthropic.BadRequestError, "tools[0].type"),
        ({"thinking": {"type": "between_tools"}}, anthropic.BadRequestError, "thinking"),
        ({"extra_body": {"guided_json": {}}}, anthropic.BadRequestError, "guided_json"),
    ],
)
def test_errors_have_their_classes(client, asked, kind, says):
    with pytest.raises(kind) as found:
        client.messages.create(**{**ASKED, **asked})
    assert says in found.value.body["error"]["message"] and found.value.request_id


def test_the_asynchronous_client(server):
    async def many():
        address = f"http://127.0.0.1:{server.port}"
        async with anthropic.AsyncAnthropic(base_url=address, api_key="none") as client:
            calls = [client.messages.create(**{**ASKED, "max_tokens": 4}) for _ in range(4)]
            return await asyncio.gather(*calls)

    assert len({answer.id for answer in asyncio.run(many())}) == 4


def test_an_error_in_a_stream_raises(monkeypatch, client):
    def broken(self, told):
        return self.error_frames(shutdown_error(5)), "error"

    monkeypatch.setattr(ResponseBuilder, "take", broken)
    with pytest.raises(anthropic.APIStatusError, match="overloaded_error.*shutting down"):
        list(client.messages.create(**ASKED, stream=True))
