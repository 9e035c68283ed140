"""Tests stored responses: get, stream from any event, cancel, delete and continue, also after a restart."""

import http.client
import json
import threading
import time

import pytest

from mmengine.core.resume import Resume
from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.server.http.body_reader import SMALL_BODY
from mmengine.server.responses import routes as response_routes
from mmengine.server.responses.reader import ContinuationReader
from tests.serve.serve_fakes import builder
from tests.server.responses_answers import check_events
from tests.server.running import is_empty, served, wait_for
from tests.server.test_server_reattach import RETRY, Leaving
from tests.server.test_server_shutdown import ends

PATH = "/v1/responses"
TEXT = "a text of which the answer has all letters " * 3


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    log = tmp_path_factory.mktemp("responses") / "log"
    with served(executor_class=Leaving, engine_options={"log": log}, storage={"log": log}) as server:
        yield server


def going_on(log, **options):
    engine = AsyncEngine(builder=builder(executor_class=Leaving), log=log, resume=Resume())
    return served(engine, storage={"log": log}, **options)


def begun(server, **fields):
    """Start a background response, and return its id."""
    status, _, body = server.call(PATH, {"input": TEXT, "background": True, **fields})
    assert (status, body["status"], body["output"]) == (200, "queued", [])
    return body["id"]


def look(server, name, path=""):
    return server.call(f"{PATH}/{name}{path}")


def ended(server, name):
    wait_for(lambda: look(server, name)[2]["status"] not in ("queued", "in_progress"))
    return look(server, name)[2]


def text_of(body):
    return body["output"][0]["content"][0]["text"]


def events(server, name, after=-1):
    status, headers, text = look(server, name, f"?stream=true&starting_after={after}")
    assert (status, headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
    if after == -1:
        check_events(text)
    return text


def numbers(text):
    told = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(event)["sequence_number"] for event in told]


def test_a_background_response_is_polled_to_its_end(one):
    name = begun(one, metadata={"a": "b"})
    assert look(one, name)[2]["status"] in ("queued", "in_progress")
    body = ended(one, name)
    assert (body["status"], body["metadata"], text_of(body)) == ("completed", {"a": "b"}, TEXT.upper())
    # Wait until the store has the response.
    wait_for(lambda: one.app.calls.response("", name.removeprefix("resp_")) is None)
    assert look(one, name)[2] == body


def test_events_are_repeated_from_any_event_on(one):
    name = begun(one)
    live = events(one, name)
    wait_for(lambda: one.app.calls.response("", name.removeprefix("resp_")) is None)
    assert events(one, name) == live, "the store gives the same events as the running response"
    assert numbers(live) == list(range(len(numbers(live)))) and len(numbers(live)) > 100
    for after in (0, 1, 57, len(numbers(live)) - 2):
        frames = live.split("\n\n")
        assert events(one, name, after).split("\n\n") == frames[after + 1 :]
    connection = http.client.HTTPConnection("127.0.0.1", one.port, timeout=20)
    connection.request("GET", f"{PATH}/{name}?stream=true&starting_after={len(numbers(live)) - 1}")
    assert connection.getresponse().read() == b"", "no events follow the last"
    connection.close()


def test_a_stream_is_repeated_byte_for_byte(one):
    first = one.call(PATH, {"input": TEXT, "stream": True, "request_id": "again"})[2]
    assert events(one, "resp_again") == first
    wait_for(lambda: one.app.calls.response("", "again") is None)
    assert events(one, "resp_again") == first


def test_an_abandoned_stream_is_stored(one):
    connection = http.client.HTTPConnection("127.0.0.1", one.port, timeout=20)
    connection.request("POST", PATH, json.dumps({"input": TEXT, "stream": True, "request_id": "left"}))
    response = connection.getresponse()
    head = b"".join(response.readline() for _ in range(30))
    connection.close()
    body = ended(one, "resp_left")
    assert text_of(body) == TEXT.upper()
    assert events(one, "resp_left").encode().startswith(head)


def test_cancelling_is_idempotent(one):
    name = begun(one)
    for _ in range(2):
        status, _, body = one.call(f"{PATH}/{name}/cancel", {}, method="POST")
        assert (status, body["id"], body["status"]) == (200, name, "cancelled")
    assert ended(one, name)["status"] == "cancelled"
    whole = one.call(PATH, {"input": "hi"})[2]
    assert one.call(f"{PATH}/{whole['id']}/cancel", {}, method="POST")[2] == whole


def test_deleted_responses_are_gone(one):
    whole = one.call(PATH, {"input": "hi"})[2]
    running = begun(one)
    for name in (whole["id"], running):
        status, _, body = one.call(f"{PATH}/{name}", method="DELETE")
        assert (status, body) == (200, {"id": name, "object": "response", "deleted": True})
        again = one.call(f"{PATH}/{name}", method="DELETE")
        for call in (look(one, name), look(one, name, "/input_items"), again):
            assert (call[0], call[2]["error"]["code"]) == (404, "not_found")
    wait_for(lambda: not one.engine._open.running)


def test_a_response_continues_another_response(one):
    first = one.call(PATH, {"input": "one", "instructions": "be brief"})[2]
    second = one.call(PATH, {"input": "two", "previous_response_id": first["id"]})[2]
    assert second["previous_response_id"] == first["id"] and text_of(second) == "TWO"
    items = look(one, second["id"], "/input_items")[2]
    assert [item["content"][0]["text"] for item in items["data"]] == ["two"]
    for name in ("resp_none", "x" * 5000):
        status, _, body = one.call(PATH, {"input": "a", "previous_response_id": name})
        assert (status, body["error"]["code"]) == (400, "previous_response_not_found")
    running = begun(one)
    assert (
        one.call(PATH, {"input": "a", "previous_response_id": running})[2]["error"]["param"]
        == "previous_response_id"
    )


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("?stream=true&starting_after=--1", "starting_after"),
        ("?stream=true&starting_after=a", "starting_after"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?limit=101", "limit"),
        ("/input_items?limit=0000000201009999", "limit"),  # The first 8 digits alone would be valid.
        (f"/input_items?limit=000000001{'0' * 5000}", "limit"),
        ("/input_items?order=up", "order"),
        ("/input_items?after=msg_none", "after"),
    ],
)
def test_query_parameters_are_checked(one, query, param):
    name = one.call(PATH, {"input": "hi"})[2]["id"]
    status, _, body = look(one, name, query)
    assert (status, body["error"]["param"]) == (400, param)


def test_input_items_have_pages(one):
    given = [{"role": "user", "content": text} for text in "abc"]
    name = one.call(PATH, {"input": given})[2]["id"]
    pages = [look(one, name, f"/input_items?{query}")[2] for query in ("limit=2", "order=asc&limit=2")]
    texts = [[item["content"][0]["text"] for item in page["data"]] for page in pages]
    assert texts == [["c", "b"], ["a", "b"]] and all(page["has_more"] for page in pages)
    last = look(one, name, f"/input_items?after={pages[0]['last_id']}")[2]
    assert [item["id"] for item in last["data"]] == [pages[1]["first_id"]] and not last["has_more"]


def long_input(num_chars):
    return [{"role": "user", "content": text} for text in ("x" * num_chars, "a")]


def test_previous_items_are_read_beside_the_event_loop(one, monkeypatch):
    """Large previous items are read on a thread, even for a short call."""
    threads = []
    for owner, name in (
        (ContinuationReader, "read"),
        (response_routes, "_items"),
        (response_routes, "_page"),
    ):
        old = getattr(owner, name)

        def noted(*given, old=old, name=name):
            threads.append((name, threading.current_thread() is one._thread))
            return old(*given)

        monkeypatch.setattr(owner, name, noted)
    for given, on_loop in (("a", True), (long_input(SMALL_BODY), False)):
        name = one.call(PATH, {"input": given})[2]["id"]
        assert text_of(one.call(PATH, {"input": "b", "previous_response_id": name})[2]) == "B"
        assert look(one, name, "/input_items")[0] == 200
        assert threads == [("_items", on_loop), ("read", on_loop), ("_page", on_loop)]
        threads.clear()


def test_previous_items_count_as_body_bytes(tmp_path):
    log, room = tmp_path / "log", {"max_body_bytes": 12_000, "max_bodies_bytes": 25_000}
    with served(engine_options={"log": log}, storage={"log": log}, **room) as server:
        name = server.call(PATH, {"input": long_input(10_000)})[2]["id"]
        second = {"input": long_input(10_000), "previous_response_id": name}
        status, _, body = server.call(PATH, second)
        assert status == 200, "previous items do not count against the limit for one body"
        status, _, told = server.call(PATH, {"input": long_input(10_000), "previous_response_id": body["id"]})
        assert (status, told["error"]["code"]) == (429, "bodies_full")
        wait_for(lambda: is_empty(server))


def test_store_false_stores_nothing(one):
    body = one.call(PATH, {"input": "hi", "store": False})[2]
    assert not body["store"] and look(one, body["id"])[0] == 404


def test_without_a_log_nothing_is_stored():
    with served() as server:
        body = server.call(PATH, {"input": "hi"})[2]
        assert not body["store"] and look(server, body["id"])[0] == 404
        for field in ("store", "background"):
            status, _, found = server.call(PATH, {"input": "hi", field: True})
            assert (status, found["error"]["param"]) == (400, field) and "--log" in found["error"]["message"]


def test_recovered_responses_are_finished_and_stored(tmp_path):
    log = tmp_path / "log"
    with served(
        executor_class=Leaving, drain_s=0, engine_options={"log": log}, storage={"log": log}
    ) as server:
        names = [begun(server, request_id=name) for name in ("a", "b")]
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        connection.request("GET", f"{PATH}/{names[0]}?stream=true")
        response = connection.getresponse()
        before = b""
        while before.count(b"\n\n") < 20:
            before += response.readline()
    connection.close()
    last = max(numbers(before.decode()))
    with going_on(log) as server:
        after = events(server, names[0], last)
        whole = events(server, names[0])
        assert before.decode() + after == whole
        assert text_of(ended(server, names[1])) == TEXT.upper()
    with going_on(log) as server:
        assert events(server, names[0]) == whole, "the store of the previous process gives the same events"
    assert set(ends(log).values()) == {"stop"}


def test_unclaimed_stored_responses_are_cancelled(tmp_path):
    log = tmp_path / "log"
    options = {"engine_options": {"log": log}, "storage": {"log": log}}
    with served(executor_class=Leaving, reattach_s=0.1, **options) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        connection.request("POST", PATH, json.dumps({"input": TEXT, "stream": True, "request_id": "left"}))
        connection.getresponse().readline()
        connection.close()
        assert ended(server, "resp_left")["status"] == "cancelled"
        name = begun(server)
        time.sleep(0.2)
        assert ended(server, name)["status"] == "completed", (
            "a background response runs to its end without a client"
        )


def test_a_request_id_finds_a_stored_answer_after_a_death(tmp_path):
    """After a restart, a repeated call with the same request id gets the stored answer."""
    log, headers, body = tmp_path / "log", {"X-Request-Id": "mine"}, {"input": TEXT}
    with served(executor_class=Leaving, engine_options={"log": log}, storage={"log": log}) as server:
        first = server.call(PATH, body, headers)[2]
        wait_for(lambda: server.app.calls.response("", first["id"].removeprefix("resp_")) is None)
    with going_on(log) as server:
        assert server.call(PATH, body, headers)[2] == first
        streamed = server.call(PATH, {**body, "stream": True}, headers)
        assert (streamed[0], streamed[2]["error"]["code"]) == (422, "key_reused")
        assert server.call(PATH, body)[2]["id"] != first["id"]
    assert len(ends(log)) == 2


def test_a_key_finds_a_stored_answer_after_a_death(tmp_path):
    log, headers, body = tmp_path / "log", {"Idempotency-Key": "order 7"}, {"input": TEXT}
    with served(executor_class=Leaving, engine_options={"log": log}, storage={"log": log}) as server:
        server.call(PATH, {"input": "another"}, {"Idempotency-Key": "order 6"})
        first = server.call(PATH, body, headers)[2]
        wait_for(lambda: server.app.calls.response("", first["id"].removeprefix("resp_")) is None)
    with going_on(log) as server:
        assert server.call(PATH, body, headers)[2] == first
        other = server.call(PATH, {"input": "another"}, headers)
        assert (other[0], other[2]["error"]["code"]) == (422, "key_reused")
        named = {**headers, "X-Request-Id": first["id"].removeprefix("resp_")}
        assert server.call(PATH, body, named)[2] == first
        other = server.call(PATH, body, {**named, "Idempotency-Key": "order 8"})
        assert (other[0], other[2]["error"]["code"]) == (422, "key_reused")
        server.call(f"{PATH}/{first['id']}", method="DELETE")
        assert server.call(PATH, body, headers)[2]["id"] != first["id"], (
            "a deleted response is computed again"
        )
    assert len(ends(log)) == 3


def test_a_retry_continues_a_begun_response(tmp_path):
    """A retry without a request id and without an idempotency key finds the response."""
    log, body = tmp_path / "log", {"input": TEXT, "background": True}
    with served(
        executor_class=Leaving, drain_s=0, engine_options={"log": log}, storage={"log": log}
    ) as server:
        name = begun(server)
    with going_on(log) as server:
        assert server.call(PATH, body)[2]["id"] != name, "a call without the retry header is another call"
        assert server.call(PATH, body, RETRY)[2]["id"] == name
        assert server.call(PATH, body, RETRY)[2]["id"] != name, "a response is retried only once"
        assert text_of(ended(server, name)) == TEXT.upper()
