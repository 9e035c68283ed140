"""Tests /v1/responses with OpenAI's Python client and the model that the package contains."""

import asyncio
import json

import openai
import pytest

from mmengine import AsyncEngine
from mmengine.server.chat.response_builder import ResponseBuilder
from mmengine.server.http.errors import shutdown_error
from tests.pictures import data_url, scene
from tests.serve.test_serve_chat import JSON_TEMPLATE, TOOLS
from tests.server.running import served
from tests.server.test_server_openai import Thing

NAME = "shapes"
ASKED = {"model": NAME, "input": "What is a triangle?"}
FLAT = [{"type": "function", **each["function"]} for each in TOOLS]


@pytest.fixture(scope="module")
def server():
    with served(AsyncEngine(), names=(NAME,), chat_template=JSON_TEMPLATE) as one:
        yield one


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as one:
        yield one


def test_a_response_and_its_stream_say_the_same(client):
    whole = client.responses.create(**ASKED, extra_body={"seed": 1})
    assert whole.status == "completed" and whole.output_text and whole.model == NAME
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    events = list(client.responses.create(**ASKED, stream=True, extra_body={"seed": 1}))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == whole.output_text == events[-1].response.output_text
    assert events[-1].type == "response.completed"


def test_the_stream_helper_adds_it_up(client):
    with client.responses.stream(**ASKED, include=["message.output_text.logprobs"], top_logprobs=1) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert snapshots[-1] == final.output_text
    tokens = final.output[0].content[0].logprobs
    assert b"".join(bytes(each.bytes) for each in tokens).decode() == final.output_text
    assert all(each.top_logprobs[0].logprob >= each.logprob for each in tokens)


def test_models_of_pydantic_come_back(client):
    asked = {**ASKED, "max_output_tokens": 600, "text_format": Thing}
    assert isinstance(client.responses.parse(**asked).output_parsed, Thing)
    with client.responses.stream(**asked) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Thing)


def test_images_are_looked_at(client):
    image = {"type": "input_image", "image_url": data_url(1), "detail": "low"}
    parts = [{"type": "input_text", "text": "Describe the image."}, image]
    given = [{"role": "user", "content": parts}]
    said = client.responses.create(model=NAME, input=given, temperature=0)
    chat = client.chat.completions.create(
        model=NAME,
        temperature=0,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "Describe the image."},
                    {"type": "image_url", "image_url": {"url": data_url(1), "detail": "low"}},
                ],
            }
        ],
    )
    assert said.output_text == chat.choices[0].message.content and said.output_text
    assert said.usage.input_tokens == chat.usage.prompt_tokens
    image["image_url"] = "data:image/png;base64,AAAA"
    with pytest.raises(openai.BadRequestError) as found:
        client.responses.create(model=NAME, instructions="Look.", input=given)
    assert (found.value.code, found.value.param) == ("invalid_media", "input[0].content[1]")
    assert "input[0].content[1]" in found.value.message


def test_an_uploaded_image_is_that_of_a_data_url(tmp_path):
    log = tmp_path / "log"
    with (
        served(AsyncEngine(log=log), names=(NAME,), storage={"log": log}) as one,
        openai.OpenAI(base_url=f"http://127.0.0.1:{one.port}/v1", api_key="none", max_retries=0) as client,
    ):
        file = client.files.create(file=("a.png", scene(1)), purpose="vision")
        counts = []
        for image in ({"file_id": file.id}, {"image_url": data_url(1)}):
            given = [{"role": "user", "content": [{"type": "input_image", "detail": "low", **image}]}]
            said = client.responses.create(model=NAME, input=given, temperature=0, max_output_tokens=4)
            counts.append((said.usage.input_tokens, said.output_text))
        assert counts[0] == counts[1]
        given[0]["content"][0] = {"type": "input_image", "file_id": "file-" + "0" * 24}
        with pytest.raises(openai.NotFoundError) as found:
            client.responses.create(model=NAME, input=given)
        assert found.value.param == "input[0].content[0].file_id"


def test_tool_calls_and_results_round_trip(client):
    asked = {"tools": FLAT, "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
    asked |= {"text": {"format": {"type": "text", "on_truncation": "close"}}, "max_output_tokens": 96}
    first = client.responses.create(**ASKED, **asked)
    (call,) = first.output
    assert (
        call.type == "function_call" and call.status == "completed" and json.loads(call.arguments) is not None
    )
    back = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
    given = [{"role": "user", "content": ASKED["input"]}, *first.output, back]
    second = client.responses.create(model=NAME, input=given, max_output_tokens=8)
    assert second.usage.input_tokens > 0 and second.status in ("completed", "incomplete")
    with client.responses.stream(**ASKED, **asked) as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        assert "".join(deltas) == stream.get_final_response().output[0].arguments == call.arguments


@pytest.mark.parametrize(
    ("asked", "kind", "param"),
    [
        ({"model": "gpt-5"}, openai.NotFoundError, "model"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"tools": [{"type": "web_search"}]}, openai.BadRequestError, "tools[0].type"),
        ({"previous_response_id": "resp_x"}, openai.BadRequestError, "previous_response_id"),
        ({"background": True}, openai.BadRequestError, "background"),
        ({"conversation": "conv_1"}, openai.BadRequestError, "conversation"),
        ({"input": "a b " * 9000}, openai.BadRequestError, "input"),
        ({"extra_body": {"n": 2}}, openai.BadRequestError, "n"),
    ],
)
def test_errors_have_their_classes(client, asked, kind, param):
    with pytest.raises(kind) as found:
        client.responses.create(**{**ASKED, **asked})
    assert found.value.param == param and found.value.type and found.value.body["message"]


def test_the_asynchronous_client_and_ids(server):
    async def many():
        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none"
        ) as client:
            stream = await client.responses.create(**ASKED, stream=True, max_output_tokens=20)
            async for event in stream:
                assert event.type == "response.created"
                break
            await stream.close()
            calls = [client.responses.create(**ASKED, max_output_tokens=4) for _ in range(4)]
            raw = await client.responses.with_raw_response.create(
                **ASKED, max_output_tokens=1, extra_headers={"X-Request-Id": "mine"}
            )
            assert raw.headers["x-request-id"] == "mine" and raw.parse().id == "resp_mine"
            return await asyncio.gather(*calls)

    assert len({answer.id for answer in asyncio.run(many())}) == 4


def test_an_error_in_a_stream_raises(monkeypatch, client):
    """The client's event iterator raises an exception for an interrupted stream."""

    def broken(self, told):
        return self.error_frames(shutdown_error(5)), "error"

    monkeypatch.setattr(ResponseBuilder, "take", broken)
    with pytest.raises(openai.APIError, match="shutting down"):
        list(client.responses.create(**ASKED, stream=True))
