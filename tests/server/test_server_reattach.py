"""Tests calls that a client repeats after a disconnect or a server restart. The repeated call gets the whole
answer.
"""

import http.client
import json
import threading
import time

import pytest
from openai import OpenAI

from mmengine.core.resume import Resume
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from mmengine.serve.async_engine.admission import Admission
from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.server.calls import call_registry as calls
from tests.log_copies import copied
from tests.serve.serve_fakes import builder
from tests.server.openai_answers import events_of
from tests.server.running import LONG_CONTEXT, Lasting, SlowEcho, served, wait_for
from tests.server.test_server_shutdown import ends

CHAT = "/v1/chat/completions"
RETRY = {"x-stainless-retry-count": "1"}
TEXT = "a text of which the answer has all letters " * 3


def asked(text=TEXT, **fields):
    return {"messages": [{"role": "user", "content": text}], **fields}


class Leaving(SlowEcho):
    """A slow executor whose `close` does nothing, so a test may close the engine during a request."""

    pause_s = 0.004

    def close(self):
        pass


def begin(one, body, headers=None, path=CHAT):
    """Send a call, wait until its request runs, and return the connection. If the call streams, also read the
    first line.
    """
    before = set(one.engine._open.running)  # Requests that were just answered may still be in this set.
    connection = http.client.HTTPConnection("127.0.0.1", one.port, timeout=20)
    connection.request("POST", path, json.dumps(body), headers or {})
    if body.get("stream"):
        response = connection.getresponse()
        assert response.status == 200
        response.readline()
    wait_for(lambda: set(one.engine._open.running) - before)
    return connection


def message(answer):
    return answer["choices"][0]["message"]["content"]


def deltas(text):
    found = [json.loads(event) for event in events_of(text)[:-1]]
    return [each["choices"][0]["delta"] for each in found if "content" in each["choices"][0]["delta"]]


def is_unattended(one, name):
    """Return whether the call continues without a client."""
    return [call.is_live for call in one.app.calls.detached_calls() if call.request_id == name] == [False]


@pytest.fixture(scope="module")
def one():
    with served(executor_class=Leaving) as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_call_continues_after_a_disconnect(one, stream):
    body = asked(stream=stream, request_id=f"mine-{stream}")
    begin(one, body).close()
    wait_for(lambda: is_unattended(one, f"mine-{stream}"))
    assert one.engine._open.running
    status, headers, again = one.call(CHAT, body)
    assert (status, headers["x-request-id"]) == (200, f"mine-{stream}")
    assert one.call(CHAT, body)[2] == again, "a third call gets the same bytes"
    found = "".join(delta["content"] for delta in deltas(again)) if stream else message(again)
    assert found == TEXT.upper()


def test_unnamed_calls_are_cancelled_at_disconnect(one):
    begin(one, asked(stream=True)).close()
    wait_for(lambda: not one.engine._open.running)


def test_a_key_belongs_to_a_single_body(one):
    key = {"Idempotency-Key": "an order"}
    first = one.call(CHAT, asked("hello"), key)[2]
    assert one.call(CHAT, asked("hello"), key)[2] == first
    status, headers, found = one.call(CHAT, asked("hallo"), key)
    assert (status, found["error"]["code"], headers["x-should-retry"]) == (422, "key_reused", "false")
    assert one.call(CHAT, asked("hallo"), {"Idempotency-Key": "another"})[2]["id"] != first["id"]
    assert one.call(CHAT, asked("hello"))[2]["id"] != first["id"], "without the key it is another call"
    assert one.call(CHAT, asked("hello"), {"Idempotency-Key": "x" * 256})[0] == 400


def test_a_key_that_is_being_answered_is_409(one):
    connection = begin(one, asked(), {"Idempotency-Key": "held"})
    status, headers, found = one.call(CHAT, asked(), {"Idempotency-Key": "held"})
    assert (status, found["error"]["code"], headers["x-should-retry"]) == (409, "key_in_use", "false")
    assert connection.getresponse().status == 200
    connection.close()


def test_refused_calls_are_not_kept(one):
    key = {"Idempotency-Key": "refused"}
    assert one.call(CHAT, asked("bad"), key)[2]["error"]["code"] == "invalid_media"
    assert one.call(CHAT, asked("good"), key)[0] == 200


def test_kept_answers_are_limited_by_time_and_number(monkeypatch):
    with served(reattach_s=0.3) as server:
        first = server.chat("hello", request_id="a")[2]
        wait_for(lambda: not server.app.calls.detached_calls())
        again = server.chat("hallo", request_id="a")[2]
        assert again["choices"] != first["choices"]
    monkeypatch.setattr(calls, "MAX_KEPT_OUTPUTS", 60)
    with served() as server:
        for number in range(9):
            server.chat("hello", request_id=str(number))
        assert [call.request_id for call in server.app.calls.detached_calls()] == ["7", "8"]


def test_an_unclaimed_request_is_cancelled():
    with served(executor_class=Lasting, config=LONG_CONTEXT, reattach_s=0.2) as server:
        begin(server, asked(stream=True, request_id="gone")).close()
        wait_for(lambda: not server.engine._open.running)
        assert not server.app.calls.detached_calls()


# Tests in which the server's process ends.


def going_on(log, **settings):
    engine = AsyncEngine(builder=builder(executor_class=Leaving), log=log, resume=Resume())
    return served(engine, **settings)


@pytest.fixture
def left(tmp_path):
    """Return a function that sends bodies to a server, stops the server before the answers end, and returns
    the log.
    """

    def leave(*bodies, headers=None):
        log = tmp_path / "log"
        with served(executor_class=Leaving, drain_s=0, engine_options={"log": log}) as server:
            connections = [begin(server, body, headers) for body in bodies]
        for connection in connections:
            connection.close()
        return log

    return leave


def test_a_retry_continues_the_last_processs_call(left):
    log = left(asked("x" * 150), asked("y" * 150))
    with going_on(log) as server:
        assert server.call(CHAT, asked("x" * 150))[0] == 200  # A call without the retry header is a new call.
        first = server.call(CHAT, asked("x" * 150), RETRY)[2]
        assert server.call(CHAT, asked("x" * 150), RETRY)[2]["id"] != first["id"], (
            "the second retry must start a new call"
        )
        assert message(server.call(CHAT, asked("y" * 150), RETRY)[2]) == "Y" * 150
        names = [first["id"]]
    found = ends(log)
    assert len(found) == 4 and set(found.values()) == {"stop"}
    assert names[0].removeprefix("chatcmpl-") in list(found)[:2]


def test_a_broken_stream_is_repeated_from_its_start(left):
    body = asked("x" * 150, stream=True, seed=3)
    log = left(body)
    with going_on(log) as server:
        again = server.call(CHAT, body)[2]
    assert list(ends(log).values()) == ["stop"], "the request ran once"
    with served(executor_class=Leaving) as other:
        events = other.call(CHAT, body)[2]
    assert again.count("data: ") == events.count("data: ") > 150


@pytest.mark.parametrize("ends", ["killed while it streams", "answered before", "stored before"])
def test_a_stream_of_several_choices_is_repeated_byte_for_byte(tmp_path, ends):
    log, few_rows = tmp_path / "log", {"max_num_seqs": 2}
    body = asked("three choices, and rows for two " * 3, n=3, stream=True, request_id="three")
    storage = {"log": log} if ends == "stored before" else None
    options = {"executor_class": Leaving, "config": few_rows, "storage": storage}
    with served(drain_s=0, engine_options={"log": log}, **options) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        connection.request("POST", CHAT, json.dumps(body), {})
        response = connection.getresponse()
        if ends == "killed while it streams":
            sent = b"".join(response.readline() for _ in range(100))
        else:
            sent = response.read()
            assert server.call(CHAT, body)[2] == sent.decode()
    connection.close()
    choices = [json.loads(event)["choices"][0]["index"] for event in events_of(sent.decode())[3:30]]
    assert {0, 1} <= set(choices) and choices != sorted(choices), "the choices are interleaved"
    engine = AsyncEngine(builder=builder(executor_class=Leaving, **few_rows), log=log, resume=Resume())
    with served(engine, storage=storage) as server:
        again = server.call(CHAT, body, RETRY)[2].encode()
    assert again[: len(sent)] == sent
    assert len(again) > len(sent) or ends != "killed while it streams"


def test_a_key_finds_the_last_processs_call(left):
    headers = {"Idempotency-Key": "order", "x-request-id": "mine"}
    log = left(asked("x" * 150), headers=headers)
    with going_on(log) as server:
        assert (
            server.call(CHAT, asked("y" * 150), {"Idempotency-Key": "order"})[2]["error"]["code"]
            == "key_reused"
        )
        answer = server.call(CHAT, asked("x" * 150), {"Idempotency-Key": "order"})[2]
        assert answer["id"] == "chatcmpl-mine"
        assert server.call(CHAT, asked("x" * 150), {"Idempotency-Key": "order"})[2] == answer
    assert ends(log) == {"mine": "stop"}


def test_an_answer_survives_two_deaths(left):
    headers = {"x-request-id": "mine"}
    log = left(asked("x" * 150), headers=headers)
    with going_on(log, drain_s=0) as server:
        begin(server, asked("x" * 150), headers)
    with going_on(log) as server:
        assert message(server.call(CHAT, asked("x" * 150), headers)[2]) == "X" * 150
    assert ends(log) == {"mine": "stop"}


def test_unclaimed_recovered_calls_are_cancelled(left):
    log = left(asked("x" * 190))
    with going_on(log, reattach_s=0.3) as server:
        wait_for(lambda: not server.engine._engine.has_work)
        assert server.call(CHAT, asked("x" * 190), RETRY)[0] == 200
    assert sorted(ends(log).values()) == ["abort", "stop"]


def test_a_calls_prompts_are_recovered_together(left, tmp_path):
    body = {"prompt": ["x" * 100, "y" * 100], "max_tokens": 300}
    with served(executor_class=Leaving, drain_s=0, engine_options={"log": tmp_path / "log"}) as server:
        asking = threading.Thread(target=server.call, args=("/v1/completions", body))
        asking.start()
        wait_for(lambda: len(server.engine._open.running) == 2)
    asking.join()
    with going_on(tmp_path / "log") as server:
        answer = server.call("/v1/completions", body, RETRY)[2]
    assert [choice["text"] for choice in answer["choices"]] == ["X" * 100, "Y" * 100]
    assert list(ends(tmp_path / "log").values()) == ["stop", "stop"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stopped_engine_is_reported_after_all_output(stream, monkeypatch):
    with served(executor_class=SlowEcho) as one:
        step, steps = one.engine._engine.step, iter(range(100))

        def stops(**options):
            if next(steps) >= 5:
                time.sleep(0.2)  # Meanwhile the client reads the earlier output.
                raise RuntimeError("a bug")
            return step(**options)

        monkeypatch.setattr(one.engine._engine, "step", stops)
        connection = http.client.HTTPConnection("127.0.0.1", one.port, timeout=5)
        connection.request("POST", CHAT, json.dumps(asked(stream=stream)), {"idempotency-key": "a"})
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
    assert response.status == (200 if stream else 503)
    assert '"code":"engine_failed"' in (events_of(text)[-2] if stream else text)


def test_a_partly_logged_call_is_completed(tmp_path, monkeypatch):
    """The process died when only the first request was logged. The repeated call continues the first request
    and submits the second.
    """
    body, headers = {"prompt": ["x" * 100, "y" * 100], "max_tokens": 300}, {"x-request-id": "mine"}
    submit, died = Admission._submit, tmp_path / "died"

    def first_alone(self, request, result):
        if request.channel.options.request_id != "mine-1":
            submit(self, request, result)

    with served(executor_class=Leaving, drain_s=0, engine_options={"log": tmp_path / "log"}) as server:
        monkeypatch.setattr(Admission, "_submit", first_alone)
        asking = threading.Thread(target=server.call, args=("/v1/completions", body, headers))
        asking.start()
        wait_for(lambda: server.engine.stats().num_output_tokens > 10)
        copied(tmp_path / "log", died)
    asking.join()
    monkeypatch.undo()
    with going_on(died) as server:
        answer = server.call("/v1/completions", body, {**headers, **RETRY})[2]
    assert [choice["text"] for choice in answer["choices"]] == ["X" * 100, "Y" * 100]
    queued = [one.event.request_id for one in LogReader(died) if isinstance(one.event, ev.Queued)]
    assert queued == ["mine-0", "mine-1"], "each request is logged once"


@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
@pytest.mark.parametrize("headers", [{"Idempotency-Key": "k"}, {"X-Request-Id": "mine"}])
def test_a_call_is_repeated_without_its_deleted_image(tmp_path, headers, path):
    log = tmp_path / "log"
    with served(executor_class=Leaving, engine_options={"log": log}, storage={"log": log}) as one:
        with OpenAI(base_url=f"http://127.0.0.1:{one.port}/v1", api_key="none", max_retries=0) as client:
            file = client.files.create(file=("a.png", b"of an image"), purpose="vision")
            parts = [{"type": "file", "file": {"file_id": file.id}}, {"type": "text", "text": "a"}]
            if path != CHAT:
                parts = [{"type": "input_image", "file_id": file.id}, {"type": "input_text", "text": "a"}]
            body = {"messages" if path == CHAT else "input": [{"role": "user", "content": parts}]}
            first = one.call(path, body, headers)
            assert first[0] == 200, first
            assert client.files.delete(file.id).deleted
        assert one.call(path, body, headers)[2] == first[2]
        status, _, told = one.call(path, body)
        assert (status, told["error"]["code"]) == (404, "file_not_found"), (
            "a call that is not a repetition needs the image"
        )
