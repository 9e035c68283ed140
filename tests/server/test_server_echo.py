"""Tests of echoed prompts with logprobs, and of the `usage` in streams, with the included checkpoint."""

import json
import threading

import pytest

from mmengine.config import EngineConfig
from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.serve.engine.engine import Engine
from mmengine.serve.prompt.prompt import Prompt
from mmengine.server.chat.completion_frames import CompletionFrames
from tests.server.running import served

TEXTS = ["The red triangle is small.", "An é and a 星 too, and a star."]
IMAGE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU"
    "5ErkJggg=="
)


@pytest.fixture(scope="module")
def server():
    with served(AsyncEngine(config=EngineConfig(spec="grammar", draft_policy="all")), names=("m",)) as one:
        yield one


@pytest.fixture(scope="module")
def scored():
    with Engine() as engine:
        return engine.generate([Prompt(text=text) for text in TEXTS], max_tokens=1, prompt_logprobs=2)


def chunks(text):
    events = [each.removeprefix("data: ") for each in text.split("\n\n") if each.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return [json.loads(each) for each in events[:-1]]


def close_to(one, two):
    assert len(one) == len(two)
    for mine, theirs in zip(one, two, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or mine == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_each_of_several_answers_echoes_the_prompt_with_its_logprobs(server, scored, max_tokens):
    """The answers to a prompt have consecutive indices, with and without streaming."""
    asked = {"prompt": TEXTS, "echo": True, "logprobs": 2, "max_tokens": max_tokens, "n": 3, "seed": 5}
    asked |= {"temperature": 1.5, "ignore_eos": True}
    status, _, body = server.call("/v1/completions", asked)
    assert status == 200, body
    streamed = chunks(server.call("/v1/completions", {**asked, "stream": True})[2])
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    for choice in body["choices"]:
        text, wanted = TEXTS[choice["index"] // 3], scored[choice["index"] // 3]
        said, count = choice["logprobs"], len(wanted.prompt_token_ids)
        assert choice["text"].startswith(text) and 0 <= len(said["tokens"]) - count <= max_tokens
        entries = wanted.prompt_logprobs
        close_to(said["token_logprobs"][:count], [None if each is None else each[0][1] for each in entries])
        events = [each for event in streamed for each in event["choices"]]
        mine = [each for each in events if each["index"] == choice["index"]]
        assert "".join(each["text"] for each in mine) == choice["text"]
        for name in ("tokens", "text_offset"):
            parts = [each["logprobs"][name] for each in mine if each["logprobs"] is not None]
            assert [one for part in parts for one in part] == said[name]
        parts = [each["logprobs"]["token_logprobs"] for each in mine if each["logprobs"] is not None]
        close_to([one for part in parts for one in part], said["token_logprobs"])
    answers = {choice["text"] for choice in body["choices"][:3]}
    assert (len(answers) > 1) == bool(max_tokens)


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_a_harness_finds_the_prompts_logprobs(server, scored, max_tokens):
    # An evaluation harness reads prompt logprobs from echoed prompts, with max_tokens 0 or more.
    asked = {
        "prompt": TEXTS,
        "echo": True,
        "logprobs": 2,
        "max_tokens": max_tokens,
        "temperature": 0,
        "seed": 1,
    }
    status, _, body = server.call("/v1/completions", asked)
    assert status == 200, body
    assert body["usage"]["completion_tokens"] == sum(
        len(choice["logprobs"]["tokens"]) for choice in body["choices"]
    ) - sum(len(each.prompt_token_ids) for each in scored)
    for choice, text, wanted in zip(body["choices"], TEXTS, scored, strict=True):
        said, count = choice["logprobs"], len(wanted.prompt_token_ids)
        assert choice["text"].startswith(text) and (max_tokens or choice["text"] == text)
        assert len({len(each) for each in said.values()}) == 1
        assert 0 <= len(said["tokens"]) - count <= max_tokens
        entries = wanted.prompt_logprobs
        close_to(said["token_logprobs"][:count], [None if each is None else each[0][1] for each in entries])
        assert said["top_logprobs"][0] is None
        for place in range(1, count):
            best = max(said["top_logprobs"][place].values())
            assert best == pytest.approx(max(logprob for _, logprob in entries[place]), abs=1e-4)
        ends = [*said["text_offset"], len(choice["text"])]
        pieces = [choice["text"][a:b] for a, b in zip(ends, ends[1:], strict=False)][:count]
        assert [a for a, b in zip(pieces, said["tokens"], strict=False) if "\ufffd" not in b] == [
            each for each in said["tokens"][:count] if "\ufffd" not in each
        ]
        assert "".join(pieces) == text
    if not max_tokens:
        assert [choice["finish_reason"] for choice in body["choices"]] == ["length"] * 2


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_stream_echoes_what_the_whole_answer_does(server, max_tokens):
    asked = {"prompt": TEXTS, "echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0, "n": 1}
    whole = server.call("/v1/completions", asked)[2]
    found = chunks(server.call("/v1/completions", {**asked, "stream": True})[2])
    for choice in whole["choices"]:
        mine = [each["choices"][0] for each in found if each["choices"][0]["index"] == choice["index"]]
        assert "".join(each["text"] for each in mine) == choice["text"]
        for name, values in choice["logprobs"].items():
            said = [value for each in mine if each["logprobs"] for value in each["logprobs"][name]]
            if name == "token_logprobs":
                close_to(said, values)
            elif name != "top_logprobs":
                assert said == values
        assert [each["finish_reason"] for each in mine if each["finish_reason"]] == [choice["finish_reason"]]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_prompts_are_written_beside_the_event_loop(server, monkeypatch, stream):
    found, old = [], CompletionFrames._logprobs

    def noted(self, entries, *args, **keywords):
        if len(entries) > 1:
            found.append(threading.current_thread())
        return old(self, entries, *args, **keywords)

    monkeypatch.setattr(CompletionFrames, "_logprobs", noted)
    asked = {"prompt": TEXTS, "echo": True, "logprobs": 2, "max_tokens": 2, "n": 2, "stream": stream}
    assert server.call("/v1/completions", asked)[0] == 200
    assert len(found) == 4 and server._thread not in found


def test_echo_of_the_prompt_alone_needs_echo(server):
    status, _, body = server.call("/v1/completions", {"prompt": "a", "max_tokens": 0})
    assert status == 400 and body["error"]["param"] == "max_tokens"
    _, _, body = server.call("/v1/completions", {"prompt": "a b", "max_tokens": 0, "echo": True})
    assert body["choices"][0]["text"] == "a b" and body["choices"][0]["logprobs"] is None
    assert body["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("echo", [True, False])
@pytest.mark.parametrize("prompt", [[10**18], [-5], [[1], [10**6]], [10**30], [2**31, 1]])
def test_invalid_token_ids_are_refused_before_decoding(server, prompt, echo):
    status, _, body = server.call("/v1/completions", {"prompt": prompt, "echo": echo})
    assert (status, body["error"]["param"][:6]) == (400, "prompt"), body


def chat(server, content, **fields):
    asked = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 24, **fields}
    return server.call("/v1/chat/completions", asked)


def test_usage_of_a_stream_is_that_of_the_whole_answer(server):
    content = [
        {"type": "text", "text": "What is this? " * 12},
        {"type": "image_url", "image_url": {"url": IMAGE}},
    ]
    form = {"structured_outputs": {"regex": "(a red star ){5}"}, "max_tokens": 64}
    chat(server, content)  # Puts the prompt into the prefix cache.
    whole = chat(server, content, **form)[2]["usage"]
    found = chunks(chat(server, content, stream=True, stream_options={"include_usage": True}, **form)[2])
    told = found[-1]["usage"]
    assert told == whole and found[-1]["choices"] == []
    assert whole["prompt_tokens_details"]["cached_tokens"] > 0
    assert whole["prompt_tokens_details"]["image_tokens"] > 0
    drafts = whole["completion_tokens_details"]
    assert drafts["accepted_prediction_tokens"] + drafts["rejected_prediction_tokens"] > 0


def test_continuous_usage_counts_up_to_the_last(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = chunks(
        chat(server, "What is a star?", stream=True, stream_options=options, n=2, temperature=1)[2]
    )
    last = found[-1]["usage"]
    counts = {0: [], 1: []}
    for each in found[:-1]:
        usage = each["usage"]
        assert usage["prompt_tokens"] == last["prompt_tokens"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        counts[each["choices"][0]["index"]].append(usage["completion_tokens"])
    assert all(each[0] == 0 and each == sorted(each) for each in counts.values())
    assert sum(each[-1] for each in counts.values()) == last["completion_tokens"]
    status, _, body = chat(server, "a", stream=True, stream_options={"continuous_usage_stats": True})
    assert status == 400 and body["error"]["param"] == "stream_options.continuous_usage_stats"
