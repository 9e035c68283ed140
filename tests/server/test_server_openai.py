"""Tests of the server with OpenAI's Python client and the package's checkpoint."""

import asyncio
import base64
import enum
from typing import Annotated

import openai
import pytest
from pydantic import BaseModel, Field

from mmengine import AsyncEngine
from tests.pictures import data_url, looking
from tests.serve.hostile_media import video_of
from tests.server.running import served

ASKS = [{"role": "user", "content": "What is a triangle?"}]
NAME = "shapes"


@pytest.fixture(scope="module")
def server():
    with served(AsyncEngine(), names=(NAME,)) as one:
        yield one


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as one:
        yield one


Digit = Annotated[int, Field(ge=0, le=9)]


class Shape(enum.StrEnum):
    circle = "circle"
    star = "star"


class Thing(BaseModel):
    shape: Shape
    is_large: bool
    place: tuple[Digit, Digit] | None


class Things(BaseModel):
    things: list[Thing]


def test_chat_and_its_stream_say_the_same(client):
    whole = client.chat.completions.create(model=NAME, messages=ASKS, seed=1)
    choice = whole.choices[0]
    assert choice.finish_reason == "stop" and choice.message.role == "assistant" and choice.message.content
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = list(
        client.chat.completions.create(
            model=NAME, messages=ASKS, seed=1, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == choice.message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    # The next call accepts the client's message object.
    said = client.chat.completions.create(
        model=NAME, messages=[*ASKS, choice.message, {"role": "user", "content": "And a star?"}]
    )
    assert said.usage.prompt_tokens > whole.usage.total_tokens


def test_the_stream_helper_tells_of_events(client):
    with client.chat.completions.stream(
        model=NAME, messages=ASKS, logprobs=True, top_logprobs=1, stream_options={"include_usage": True}
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= kinds
    assert final.choices[0].message.content and final.usage.completion_tokens
    tokens = final.choices[0].logprobs.content
    assert b"".join(bytes(each.bytes) for each in tokens[:-1]).decode() == final.choices[0].message.content
    assert all(each.top_logprobs[0].logprob >= each.logprob for each in tokens)


def test_images_and_videos_are_read(client):
    def asked(*urls, **more):
        messages = [looking("Describe the image.", *urls)]
        return client.chat.completions.create(model=NAME, messages=messages, temperature=0, **more)

    one, two = asked(data_url(1)), asked(data_url(1), data_url(2, "JPEG"))
    assert one.choices[0].message.content
    assert 0 < one.usage.prompt_tokens_details.image_tokens < two.usage.prompt_tokens_details.image_tokens
    video = {"url": "data:video/mp4;base64," + base64.b64encode(video_of("mp4", "mpeg4")).decode()}
    parts = [{"type": "video_url", "video_url": video}, {"type": "text", "text": "What is seen?"}]
    messages = [{"role": "user", "content": parts}]
    shown = client.chat.completions.create(model=NAME, messages=messages, max_tokens=4)
    assert shown.usage.prompt_tokens_details.video_tokens > 0
    with pytest.raises(openai.BadRequestError) as found:
        asked("data:image/png;base64,AAAA")
    assert found.value.code == "invalid_media" and found.value.param.startswith("messages[0].content[0]")


def test_pydantic_models_come_back(client):
    asked = {"model": NAME, "messages": ASKS, "max_completion_tokens": 600}
    form = {**asked, "response_format": Thing}
    parsed = client.chat.completions.parse(**form).choices[0].message.parsed
    assert isinstance(parsed, Thing)
    with client.chat.completions.stream(**form) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Thing)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**{**form, "max_completion_tokens": 3})
    closing = {
        "type": "json_schema",
        "json_schema": {"name": "things", "schema": Things.model_json_schema()},
        "on_truncation": "close",
    }
    said = client.chat.completions.create(**{**asked, "max_completion_tokens": 12}, response_format=closing)
    Things.model_validate_json(said.choices[0].message.content)


def test_several_answers_and_seeds(client):
    whole = client.chat.completions.create(
        model=NAME, messages=ASKS, n=3, temperature=2.0, seed=7, max_tokens=8
    )
    again = client.chat.completions.create(
        model=NAME, messages=ASKS, n=3, temperature=2.0, seed=7, max_tokens=8
    )
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) > 1 and texts == [choice.message.content for choice in again.choices]


def test_completions(client):
    whole = client.completions.create(model=NAME, prompt=["The", "A"], n=2, max_tokens=4, logprobs=2, seed=1)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    for choice in whole.choices:
        marks = choice.logprobs
        assert len(marks.tokens) == len(marks.token_logprobs) == len(marks.text_offset) <= 4
        assert marks.text_offset[0] == 0 and marks.text_offset == sorted(marks.text_offset)
    texts = [""] * 4
    for chunk in client.completions.create(
        model=NAME, prompt=["The", "A"], n=2, max_tokens=4, seed=1, stream=True
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


def test_raw_responses_models_and_ids(client):
    raw = client.chat.completions.with_raw_response.create(
        model=NAME, messages=ASKS, max_tokens=1, extra_headers={"X-Request-Id": "mine"}
    )
    assert raw.headers["x-request-id"] == "mine" and raw.parse().id == "chatcmpl-mine"
    assert raw.parse()._request_id == "mine"
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "mmengine"
    with client.chat.completions.with_streaming_response.create(
        model=NAME, messages=ASKS, max_tokens=1
    ) as response:
        assert b'"chat.completion"' in response.read()


def test_the_asynchronous_client(server):
    async def many():
        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none"
        ) as client:
            stream = await client.chat.completions.create(
                model=NAME, messages=ASKS, max_tokens=40, stream=True
            )
            async for chunk in stream:
                assert chunk.choices[0].delta.role == "assistant"
                break
            await stream.close()
            calls = [
                client.chat.completions.create(model=NAME, messages=ASKS, max_tokens=4) for _ in range(8)
            ]
            return await asyncio.gather(*calls)

    assert len({answer.id for answer in asyncio.run(many())}) == 8


@pytest.mark.parametrize(
    "asked, kind, param",
    [
        ({"model": "gpt-5"}, openai.NotFoundError, "model"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"extra_body": {"guided_json": {}}}, openai.BadRequestError, "guided_json"),
        ({"stop": ["a"] * 99}, openai.BadRequestError, "stop"),
        ({"stop": ["a" * 999]}, openai.BadRequestError, "stop"),
        ({"logit_bias": {"-1": 1}}, openai.BadRequestError, "logit_bias"),
        ({"extra_body": {"stop_token_ids": [9] * 99}}, openai.BadRequestError, "stop_token_ids"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"modalities": ["text", "audio"]}, openai.BadRequestError, "modalities"),
    ],
)
def test_errors_have_their_classes(client, asked, kind, param):
    with pytest.raises(kind) as found:
        client.chat.completions.create(**{"model": NAME, "messages": ASKS, **asked})
    assert found.value.param == param and found.value.type and found.value.body["message"]


def test_a_prompt_that_is_too_long_has_the_code_that_clients_look_for(client):
    long = "a b " * 9000
    for asked, param in (
        (
            lambda: client.chat.completions.create(model=NAME, messages=[{**ASKS[0], "content": long}]),
            "messages",
        ),
        (lambda: client.completions.create(model=NAME, prompt=long), "prompt"),
    ):
        with pytest.raises(openai.BadRequestError) as found:
            asked()
        assert (found.value.code, found.value.param) == ("context_length_exceeded", param)
