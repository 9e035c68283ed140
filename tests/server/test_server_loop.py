"""Tests that long work runs on threads and not on the event loop. Also tests how large media and token ids
are removed from a body before parsing, how many values a body may have, and how a backlog is sent.
"""

import asyncio
import base64
import json
import os
import random
import re
import threading

import pytest

from mmengine.errors import RequestFailed
from mmengine.request import SamplingParams
from mmengine.serve.prompt.options import Options
from mmengine.serve.prompt.prompt import Prompt
from mmengine.serve.stream import request_stream as stream
from mmengine.serve.text.output_text import OutputText
from mmengine.serve.text.request_output import RequestOutput
from mmengine.server.app import openapi
from mmengine.server.chat import chat_reader as chat_request
from mmengine.server.chat import token_texts
from mmengine.server.chat.chat_frames import ChatFrames
from mmengine.server.chat.completion_reader import CompletionReader
from mmengine.server.chat.parsed_request import Envelope, ParsedRequest, SamplingDefaults
from mmengine.server.chat.response_builder import ResponseBuilder
from mmengine.server.http import body_reader
from mmengine.server.http import json_values as values
from mmengine.server.http import media_payloads as payloads
from mmengine.server.http import token_id_lists as token_ids
from mmengine.server.http.errors import ApiError, api_error, decode_body
from mmengine.server.http.media_payloads import take_out
from tests.serve.serve_fakes import EchoProcessor
from tests.server.running import LONG_CONTEXT, served

DEFAULTS = SamplingDefaults({}, "none")
LONG = "word " * body_reader.SMALL_BODY
RAW = os.urandom(3 * payloads.MIN_CHARS)
URL = "data:image/png;base64," + base64.b64encode(RAW).decode()


def test_long_work_runs_beside_the_event_loop(monkeypatch):
    found = {}

    def watch(owner, name, key):
        old = getattr(owner, name)

        def noted(*args, **keywords):
            found.setdefault(key, []).append(threading.current_thread())
            return old(*args, **keywords)

        monkeypatch.setattr(owner, name, noted)

    watch(token_texts.TokenTexts, "__init__", "vocabulary")
    with served(config=LONG_CONTEXT) as one:
        assert len(found.pop("vocabulary")) == 1  # The vocabulary is read once, before the server listens.
        watch(chat_request.ChatReader, "read", "read")
        watch(payloads, "take_out", "payloads")
        watch(openapi, "document", "openapi")
        watch(ChatFrames, "whole", "whole")
        watch(CompletionReader, "_text_of", "echo")
        assert one.chat("short")[0] == 200
        # Small bodies are parsed on the event loop, because a switch of threads would take longer.
        assert found.pop("read") == found.pop("whole") == [one._thread]
        assert one.chat("a", logprobs=True, top_logprobs=2)[0] == 200
        assert found.pop("read") == [one._thread]
        assert one.chat(LONG)[2]["error"]["code"] == "context_length_exceeded"
        prompt = [100] * (body_reader.SMALL_BODY // 4)
        assert one.call("/v1/completions", {"prompt": prompt, "echo": True, "max_tokens": 1})[0] == 200
        assert one.call("/openapi.json")[0] == 200
    assert found.keys() == {"read", "payloads", "openapi", "whole", "echo"}
    assert not any(one._thread in each for each in found.values()), found


def body(*parts, **fields):
    return json.dumps({"messages": [{"role": "user", "content": [*parts]}], **fields}).encode()


def image(url):
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.mark.parametrize("space", ["", " ", "\n"])
def test_media_are_removed_from_a_body(space):
    given = body(image(URL), image(URL), {"type": "image", "image": URL}, image("data:image/png;base64,AAAA"))
    small, found = take_out(given.replace(b": ", b":" + space.encode()))
    assert len(small) < 2000
    parts = json.loads(small)["messages"][0]["content"]
    urls = [(each.get("image_url") or {"url": each.get("image")})["url"] for each in parts]
    assert not found.are_all_used
    assert [found.of(url) for url in urls] == [RAW, RAW, RAW, None]
    assert found.are_all_used and all(url.startswith("data:image/png;base64,") for url in urls)


@pytest.mark.parametrize(
    "text",
    [
        f'say "{URL}"',  # The URL is in a text, between escaped quotes.
        f'\\\\"{URL}"',
        URL[:60000] + "\\" + URL[60000:],
        URL[:60000] + " " + URL[60000:],
        URL[:60000] + "=" + URL[60000:],
        URL[:-1],
        URL.replace("image/png", "image/" + "g" * 200),
        URL.replace("image/png", "a,b"),
        "data:image/png;base64," + "é" * payloads.MIN_CHARS,
    ],
)
def test_invalid_base64_stays_in_the_body(text):
    given = body(image(text), image("nothing"))
    assert take_out(given)[0] == given
    assert take_out(given[: len(given) // 2])[0] == given[: len(given) // 2]  # The string has no end.


@pytest.mark.parametrize("count", range(6))
def test_backslashes_before_a_quote_are_counted(count, monkeypatch):
    # The search reads 7 bytes at a time. The media span several of these reads.
    monkeypatch.setattr(payloads, "_LOOKED_THROUGH", 7)
    given = b'["' + b"\\" * count + b'"' + URL.encode() + b'"]'
    assert (take_out(given)[0] == given) == (count % 2 == 1)


def test_a_text_that_looks_like_media_stays_a_text():
    with served() as one:
        reader = one.app._endpoints["POST", "/v1/chat/completions"].__self__.readers.chat
        asked = reader.read(body({"type": "text", "text": URL}, image(URL)), "a")
        text, picture = asked.prompts[0].messages[0]["content"]
        assert text["text"] == URL and picture["image_url"]["url"] == URL
        asked = reader.read(body(image(URL)), "a")
        assert asked.prompts[0].messages[0]["content"][0]["image_url"]["url"] == RAW


def signs_outside(text):
    """Count commas and opening brackets outside strings, with a regular expression."""
    return sum(map(re.sub(r'"(?:[^"\\]|\\.)*"', "", text).count, ",[{"))


@pytest.mark.parametrize("piece", [2, 3, 64])
def test_values_are_counted_outside_of_texts(piece, monkeypatch):
    monkeypatch.setattr(values, "_PIECE", piece)
    chosen = random.Random(piece)
    for _ in range(200):
        texts = ["".join(chosen.choices('a"\\,[{\n', k=chosen.randrange(9))) for _ in range(4)]
        text = json.dumps([{texts[0]: texts[1:]}, 1, []])
        assert values.count_of_values(text.encode()) == signs_outside(text), text


@pytest.mark.parametrize("signs", [b"[],", b'{"a":0},', b"1,", b'"a",'])
def test_a_body_of_many_values_is_never_parsed(signs):
    num_signs = sum(map(signs.count, (b",", b"[", b"{")))
    most = b"[" + signs * (values.MAX_VALUES // num_signs - 1) + b"0]"
    assert not values.has_too_many_values(most)
    assert values.has_too_many_values(most.replace(b"0]", signs + b"0]"))

    def parse(data):
        raise AssertionError("the body was parsed")

    with pytest.raises(ApiError) as found:
        decode_body(most * 2, parse)
    assert found.value.status == 413 and found.value.body.code == "request_too_large"
    assert decode_body(b'"' + b",[{" * values.MAX_VALUES + b'"', len), "a string is one value"


@pytest.mark.parametrize("piece", [2, 3, 5, token_ids.MIN_BYTES])
def test_token_ids_are_removed_from_a_body(piece, monkeypatch):
    monkeypatch.setattr(token_ids, "_PIECE", piece)
    monkeypatch.setattr(token_ids, "MIN_BYTES", 1)

    def taken(given):
        whole = f'{{"a": "\\"prompt\\":[7]", "prompt" : {given}, "n": 1}}'
        small, ids = token_ids.take_out(whole.encode(), b"prompt", may_nest=True)
        assert not ids.lists or json.loads(small) == {**json.loads(whole), "prompt": ids.stands}
        return [list(each) for each in ids.lists]

    assert taken("[ 1,22 ,\n333]") == [[1, 22, 333]]
    assert taken("[[1], [ ] ,[22,3] ]") == [[1], [], [22, 3]]
    assert taken(f"[{2**31 - 1},-5,{2**31},{10**18}]") == [[2**31 - 1, -5, -1, -1]], (
        "integers beyond 32 bits become -1"
    )
    for other in ("[1,,2]", "[1,2,]", "[,1]", "[[1],]", "[[1]2]", "[1,[2]]", "[[[1]]]", "[[1][2]]", "[01]"):
        assert not taken(other), other
    for other in ("[1.5]", '["a"]', "[1]]", '"a"', "[1, null]"):
        assert not taken(other), other


def test_prompts_may_have_more_ids_than_the_value_limit():
    reader = CompletionReader(DEFAULTS, EchoProcessor.tokenizer, 4, 10**6, False, max_prompt_tokens=2**18)
    ids = [each % 250 for each in range(2**18)]

    def prompts(given, **fields):
        found = reader.read(json.dumps({"prompt": given, **fields}).encode(), "r").prompts
        return [list(prompt.token_ids) for prompt in found]

    assert prompts(ids) == [ids] and prompts([ids, [1], ids]) == [ids, [1], ids]
    wrongs = [([*ids, 1], 400), ([*ids[1:], 10**18], 400), ([ids] * 5, 400), ([*ids, "a"], 413)]
    for wrong, status in wrongs:
        with pytest.raises(ApiError) as found:
            prompts(wrong)
        assert found.value.status == status
    with pytest.raises(ApiError) as found:
        prompts("a", mm_processor_kwargs={"prompt": ids})
    assert found.value.status == 413, "only the prompt's ids are removed before parsing"


def filled(sampling):
    """Return an answer source with 3 * TAKEN_AT_ONCE - 1 unread outputs, followed by an error."""
    channel = stream.Channel(Options(sampling), OutputText(EchoProcessor.tokenizer, sampling))
    channel.accepted.set()
    channel.items.extend(RequestOutput("r", 0, "", [97]) for _ in range(3 * stream.TAKEN_AT_ONCE - 1))
    channel.items.append(RequestFailed("it broke"))
    return stream.Stream(channel, lambda channel: None, lambda channel: None)


def test_a_backlog_is_sent_in_parts_before_its_error():
    asked = ParsedRequest([Prompt(text="a")], SamplingParams(max_tokens=999), "r", Envelope("chat", 1, "m"))

    async def told():
        frames = ChatFrames("r", asked.envelope, None)
        answering = ResponseBuilder(asked, frames, [filled(asked.sampling)], EchoProcessor.tokenizer)
        await answering.open()
        pieces = [answering.take(api_error)]
        while answering.has_more:
            pieces.append(answering.take(api_error))
        return pieces

    pieces = asyncio.run(told())
    counts = [data.count(b'"content":"a"') for data, _ in pieces]
    assert counts[:-1] == [stream.TAKEN_AT_ONCE, stream.TAKEN_AT_ONCE, stream.TAKEN_AT_ONCE - 1]
    assert [how for _, how in pieces] == ["", "", "", "error"] and b"it broke" in pieces[-1][0]
