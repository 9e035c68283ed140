"""Tests the confidences of an answer's fields in the server's APIs."""

import http.client
import json
import threading

import pytest

from mmengine import AsyncEngine
from mmengine.core.resume import Resume
from mmengine.serve.text import choice_deltas
from tests.server.openai_answers import CHAT, events_of, named_events
from tests.server.running import served

pytest.importorskip("mmengine_shapes")

SCHEMA = {
    "type": "object",
    "properties": {"corners": {"enum": [3, 4]}, "sides": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["corners", "sides"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}, "field_confidence": True}
FLAT = {"type": "json_schema", "name": "it", "schema": SCHEMA, "field_confidence": True}
ASKED = {"temperature": 0, "model": "shapes"}


@pytest.fixture(scope="module")
def server():
    with served(AsyncEngine(), names=("shapes",)) as one:
        yield one


@pytest.fixture(scope="module")
def expected(server):
    status, _, answer = server.chat(response_format=FORM, **ASKED)
    assert status == 200, answer
    message = answer["choices"][0]["message"]
    fields = message["field_confidence"]
    assert (
        fields.keys() == {"/corners", "/sides"}
        and json.loads(message["content"]).keys() == SCHEMA["properties"].keys()
    )
    for field in fields.values():
        assert field.keys() == {"p", "min", "entropy", "others"} and 0 < field["p"] <= field["min"] <= 1
    corners = json.loads(message["content"])["corners"]
    (other,) = fields["/corners"]["others"]
    assert other["value"] == 7 - corners and 0 <= other["p"] < 1 and other.keys() == {"p", "value"}
    return fields


def test_a_stream_has_them_in_its_last_chunk(server, expected):
    *events, last = map(json.loads, server.events(response_format=FORM, **ASKED)[:-1])
    assert last["choices"][0]["delta"] == {"field_confidence": expected}
    assert not any("field_confidence" in each["choices"][0]["delta"] for each in events)


def test_long_answers_compute_them_beside_the_event_loop(server, expected, monkeypatch):
    threads, compute = [], choice_deltas.answer_confidence

    def answer_confidence(*given):
        threads.append(threading.current_thread())
        return compute(*given)

    monkeypatch.setattr(choice_deltas, "answer_confidence", answer_confidence)
    for most, is_beside in ((0, True), (choice_deltas.MANY_SCORED_TOKENS, False)):
        threads.clear()
        monkeypatch.setattr(choice_deltas, "MANY_SCORED_TOKENS", most)
        _, _, answer = server.chat(response_format=FORM, **ASKED)
        assert answer["choices"][0]["message"]["field_confidence"] == expected
        last = json.loads(server.events(response_format=FORM, **ASKED)[-2])
        assert last["choices"][0]["delta"] == {"field_confidence": expected}
        assert [thread is not server._thread for thread in threads] == [is_beside] * 2


def test_a_message_with_them_may_be_sent_back(server, expected):
    _, _, answer = server.chat(response_format=FORM, **ASKED)
    message, sizes = answer["choices"][0]["message"], set()
    for said in (message, {name: message[name] for name in ("role", "content")}):
        body = {"messages": [{"role": "user", "content": "hello"}, said, {"role": "user", "content": "Why?"}]}
        status, _, again = server.call("/v1/chat/completions", {**body, "max_tokens": 3, **ASKED})
        assert status == 200, again
        sizes.add(again["usage"]["prompt_tokens"])
    assert len(sizes) == 1  # the chat template does not write confidences


def test_choices_and_logprobs_beside_them(server, expected):
    asked = {"response_format": FORM, "model": "shapes", "temperature": 1.5, "n": 3, "seed": 1}
    _, _, plain = server.chat(**asked)
    _, _, both = server.chat(logprobs=True, top_logprobs=2, **asked)
    for one, other in zip(plain["choices"], both["choices"], strict=True):
        assert one["logprobs"] is None and other["logprobs"]["content"]
        fields = other["message"]["field_confidence"]
        assert one["message"]["content"] == other["message"]["content"]
        for pointer, field in one["message"]["field_confidence"].items():
            assert fields[pointer]["p"] == pytest.approx(field["p"], rel=0.05)
        # Logprobs are normalized over the whole vocabulary, so they are below 0 even if the grammar allows a
        # single token.
        mass = sum(token["logprob"] for token in other["logprobs"]["content"])
        assert mass < 0
    assert len({choice["message"]["content"] for choice in plain["choices"]}) > 1


def test_other_apis_have_the_same_confidences(server, expected):
    status, _, answer = server.respond(text={"format": FLAT}, **ASKED)
    assert status == 200, answer
    assert answer["output"][0]["content"][0]["field_confidence"] == expected
    _, _, text = server.respond(text={"format": FLAT}, stream=True, **ASKED)
    ended = dict(named_events(text))["response.completed"]["response"]
    assert ended["output"][0]["content"][0]["field_confidence"] == expected
    message = {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 100,
        "output_config": {"format": {name: value for name, value in FLAT.items() if name != "name"}},
        **ASKED,
    }
    status, _, answer = server.call("/v1/messages", message)
    assert status == 200 and answer["field_confidence"] == expected, answer
    _, _, text = server.call("/v1/messages", {**message, "stream": True})
    assert json.dumps(expected, separators=(",", ":")) in text
    asked = {"prompt": "hello", "response_format": FORM, "max_tokens": 100, **ASKED}
    status, _, answer = server.call("/v1/completions", asked)
    assert status == 200 and "/corners" in answer["choices"][0]["field_confidence"], answer
    _, _, text = server.call("/v1/completions", {**asked, "stream": True})
    (*_, last, _) = events_of(text)
    assert json.loads(last)["choices"][0]["field_confidence"] == answer["choices"][0]["field_confidence"]


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_stream_asked_again_after_a_restart_is_the_same(tmp_path, is_killed):
    log, many = tmp_path / "log", {"type": "array", "items": {"enum": [3, 4]}, "minItems": 60, "maxItems": 60}
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": many}, "field_confidence": True}
    body = {
        "messages": [{"role": "user", "content": "hello"}],
        "response_format": form,
        "stream": True,
        **ASKED,
    }
    body |= {"temperature": 1, "seed": 3, "n": 2}
    headers = {"x-request-id": "mine"}
    with served(AsyncEngine(log=log), names=("shapes",), storage={"log": log}, drain_s=0) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("POST", CHAT, json.dumps(body), headers)
        response = connection.getresponse()
        sent = b"".join(response.readline() for _ in range(40)) if is_killed else response.read()
    connection.close()
    engine = AsyncEngine(log=log, resume=Resume())
    with served(engine, names=("shapes",), storage={"log": log}) as server:
        again = server.call(CHAT, body, {**headers, "x-stainless-retry-count": "1"})[2].encode()
    assert again[: len(sent)] == sent and (len(again) > len(sent)) == is_killed
    deltas = [json.loads(event)["choices"][0] for event in events_of(again.decode())[:-1]]
    fields = {each["index"]: each["delta"]["field_confidence"] for each in deltas if each["finish_reason"]}
    assert fields.keys() == {0, 1} and all(len(each) == 60 for each in fields.values())


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"response_format": {"type": "text", "field_confidence": True}}, "response_format.field_confidence"),
        ({"response_format": {**FORM, "field_confidence": 1}}, "response_format.field_confidence"),
        ({"response_format": {**FORM, "on_truncation": "close"}, "stop": ["x"]}, "stop"),
        ({"field_confidence": True}, "field_confidence"),
        (
            {"structured_outputs": {"json": SCHEMA, "field_confidence": True}},
            "structured_outputs.field_confidence",
        ),
    ],
)
def test_formats_without_fields_are_refused(server, fields, param):
    status, _, answer = server.chat(**fields, **ASKED)
    assert status == 400 and answer["error"]["param"] == param, answer
