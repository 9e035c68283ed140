"""Tests the limits for clients and bodies, and the header Retry-After in refusals."""

import gc
import hmac
import socket
import threading
import weakref

import msgspec
import pytest

from mmengine.errors import QueueFull
from mmengine.events import vocabulary as ev
from mmengine.replay.checked_log import CheckedLog
from mmengine.server.batches.lines import check_lines
from mmengine.server.http import json_values as values
from mmengine.server.http.admission import FairShares
from mmengine.server.http.auth import ApiKeys
from mmengine.server.http.body_reader import BodyBudget
from mmengine.server.http.drain_rate import LONGEST_S, MEASURED, DrainRate
from tests.server.running import LONG_CONTEXT, Lasting, SlowEcho, opened, served, wait_for

SHORT = {"messages": [{"role": "user", "content": "a"}]}


def error(kind, message, param=None, code=None):
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@pytest.fixture(scope="module")
def server():
    with served() as one:
        yield one


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("one\nother\n")
    return path


def key(name):
    return {"authorization": f"Bearer {name}"}


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def test_the_drain_rate_measures_ended_calls():
    clock = Clock()
    rate = DrainRate(clock)
    assert rate.retry_after_s() == 1
    for _ in range(10):
        rate.begin()
    for _ in range(5):
        clock.now += 4
        rate.end()
    assert rate.retry_after_s() == 4 and rate.retry_after_s(5) == 20
    clock.now += 20
    assert rate.retry_after_s() == 8, "no call has ended for 20 s"
    clock.now += 10_000
    assert rate.retry_after_s() == LONGEST_S
    for _ in range(5):
        rate.end()
    clock.now += 3600
    assert rate.retry_after_s() == 1, "no call is open"
    rate.begin()
    rate.begin()
    clock.now += 2
    rate.end()
    assert rate.retry_after_s() == 2, "the idle hour does not lower the rate"


def test_the_drain_rate_uses_only_the_last_calls():
    clock = Clock()
    rate = DrainRate(clock)
    rate.begin()
    for pause_s in (30, *[2] * (3 * MEASURED)):
        rate.begin()
        clock.now += pause_s
        rate.end()
    assert rate.retry_after_s() == 2


def test_a_running_request_id_is_refused():
    with served(executor_class=Lasting, config=LONG_CONTEXT, reattach_s=0) as one:
        streams = threading.Thread(target=one.events, args=("a" * 300,), kwargs={"request_id": "mine"})
        streams.start()
        wait_for(lambda: one.engine._open.running)
        status, headers, body = one.chat(request_id="mine")
        one.executor.may_end.set()
        streams.join()
        assert one.chat(request_id="mine")[0] == 200
    assert (status, headers["x-should-retry"]) == (409, "false")
    assert (body["error"]["param"], body["error"]["code"]) == ("request_id", "request_id_in_use")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 200]}}}},
        {"structured_outputs": {"json": {"enum": ["x" * 200]}}},
        {"structured_outputs": {"regex": "x" * 200}},
    ],
)
def test_a_schema_has_a_size_limit(path, form):
    name = next(iter(form))
    with served(max_schema_bytes=200) as server:
        asked = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
        status, _, answer = server.call(path, {**asked, **form})
        error = answer["error"]
        assert (status, error["param"]) == (400, name)
        assert error["message"] == f"{name} has more than 200 bytes (max_schema_bytes); send a smaller schema"
        small = {"structured_outputs": {"regex": "x" * 190}}
        assert server.call(path, {**asked, **small, "max_tokens": 2})[0] == 200


MANY = b"[" + b"[]," * values.MAX_VALUES + b"[]]"


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", b"messages"),
        ("/v1/chat/completions", b"tools"),
        ("/v1/completions", b"prompt"),
        ("/v1/responses", b"input"),
        ("/v1/messages", b"messages"),
        ("/v1/messages/count_tokens", b"messages"),
        ("/v1/sessions", b"anchor"),
        ("/tokenize", b"messages"),
        ("/detokenize", b"tokens"),
    ],
)
def test_a_body_with_too_many_values_is_refused_unparsed(server, path, field):
    status, _, answer = server.call(path, b'{"%b":%b}' % (field, MANY))
    assert status == 413, answer
    assert answer["error"]["message"].startswith(f"the body has more than {values.MAX_VALUES} values")


def test_a_batch_line_with_too_many_values_is_refused(tmp_path):
    ids = b"[[%b],[%b]]" % ((b",".join([b"5"] * 2**17),) * 2)
    bodies = {
        b"a": b'{"prompt":"a","max_tokens":1}',
        b"b": b'{"prompt":%b}' % MANY,
        b"c": b'{"prompt":%b}' % ids,
    }
    row = b'{"custom_id":"%b","method":"POST","url":"/v1/completions","body":%b}'
    path = tmp_path / "lines"
    path.write_bytes(b"\n".join(row % each for each in bodies.items()))
    found = check_lines(path, "/v1/completions", 10)
    assert found.requests.custom_ids == ["a", "b", "c"] and not found.errors
    with path.open("ab") as file:
        file.write(b'\n{"custom_id":%b}\n' % MANY + row % (b"e", MANY))
    assert [(each.line, each.code) for each in check_lines(path, "/v1/completions", 10).errors] == [
        (4, "invalid_json_line"),
        (5, "invalid_body"),
    ]


def test_keys_are_compared_in_constant_time(key_file, monkeypatch):
    compared, compare = [], hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda *both: compared.append(both) or compare(*both))
    keys = ApiKeys(key_file)
    given = [*key_file.read_text().split(), "none of them"]
    owners = []
    for key in given:
        compared.clear()
        owners.append(keys.owner_of({b"authorization": f"Bearer {key}".encode()}))
        assert len(compared) == len(given) - 1 and len({len(each) for both in compared for each in both}) == 1
    assert owners[-1] is None and len(set(owners)) == len(given)


def test_all_bodies_together_have_a_limit():
    with served(max_bodies_bytes=2048) as one:
        status, headers, body = one.chat("a" * 3000)
        assert status == 429 and headers["retry-after"] == "1" and body["error"]["code"] == "bodies_full"
        assert one.chat("a")[0] == 200 and one.app.admission.bodies.num_bytes == 0


def test_a_key_is_limited_to_its_share_of_calls(tmp_path):
    (tmp_path / "keys").write_text("one\nother\n")
    limits = {"key_file": tmp_path / "keys", "key_share": 0.02}
    with served(executor_class=Lasting, config=LONG_CONTEXT, **limits) as one:
        body = {"messages": [{"role": "user", "content": "a" * 200}], "stream": True}
        keys = {name: {"authorization": f"Bearer {name}"} for name in ("one", "other", "third")}
        stream = threading.Thread(target=one.call, args=("/v1/chat/completions", body, keys["one"]))
        stream.start()
        wait_for(lambda: one.app.admission.shares.num_open)
        short = {"messages": [{"role": "user", "content": "a"}]}
        status, headers, found = one.call("/v1/chat/completions", short, keys["one"])
        assert (status, found["error"]["code"], headers["retry-after"]) == (429, "key_share_full", "1")
        assert one.call("/v1/chat/completions", short, keys["other"])[0] == 200
        assert one.call("/v1/chat/completions", short, keys["third"])[0] == 401
        one.executor.may_end.set()
        stream.join()
        assert one.call("/v1/chat/completions", short, keys["one"])[0] == 200


def test_a_deadline_in_the_queue_is_504_without_retry():
    with served(executor_class=SlowEcho) as one:
        one.executor.pause_s = 0.02
        busy = [opened(one) for _ in range(4)]  # These calls fill max_num_seqs.
        wait_for(lambda: one.engine._engine.stats().num_running == 4)
        status, headers, found = one.chat("a", deadline_s=0.1)
        assert one.engine._engine.stats().num_running == 4, "the refused request ran"
        assert (status, headers["x-should-retry"]) == (504, "false")
        assert found["error"]["code"] == "deadline_exceeded"
        assert "retry-after" not in headers
        for each in busy:
            each.close()


def opened_body(server, name, length):
    """Return a socket after sending a request without the body's last byte."""
    connection = socket.create_connection(("127.0.0.1", server.port))
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {name}\r\n"
        f"content-length: {length + 1}\r\n\r\n"
    )
    connection.sendall(head.encode() + b" " * length)
    return connection


def test_a_key_is_limited_to_its_share_of_body_bytes(key_file):
    with served(key_file=key_file, max_bodies_bytes=8192, key_share=0.5) as one:
        first = opened_body(one, "one", 3000)
        wait_for(lambda: one.app.admission.bodies.num_bytes == 3000)
        large = {"messages": [{"role": "user", "content": "a" * 2000}], "max_tokens": 2}
        status, headers, found = one.call("/v1/chat/completions", large, key("one"))
        assert (status, found["error"]["code"]) == (429, "key_share_full") and int(
            headers["retry-after"]
        ) >= 1
        assert "its share is 4096 (key_share)" in found["error"]["message"]
        assert one.call("/v1/chat/completions", SHORT, key("one"))[0] == 200, (
            "a body within the share is accepted"
        )
        assert one.call("/tokenize", {"prompt": "a" * 2000}, key("one"))[0] == 429
        assert one.call("/tokenize", {"prompt": "a" * 2000}, key("other"))[0] == 200
        first.close()
        wait_for(lambda: not one.app.admission.bodies.num_bytes)
        assert one.app.admission.shares.num_bytes == 0
        assert one.call("/tokenize", {"prompt": "a" * 5000}, key("one"))[0] == 200, (
            "the only body of a key is not limited by its share"
        )


def test_ids_of_different_keys_never_meet(key_file, tmp_path):
    # Two API keys may use the same request id at the same time, because the server puts the key's owner in
    # front of the id.
    limits = {"key_file": key_file, "engine_options": {"log": tmp_path / "log"}}
    with served(executor_class=Lasting, config=LONG_CONTEXT, **limits) as one:
        body = {"messages": [{"role": "user", "content": "a" * 200}], "stream": True, "request_id": "mine"}
        stream = threading.Thread(target=one.call, args=("/v1/chat/completions", body, key("one")))
        stream.start()
        wait_for(lambda: one.engine._open.running)
        asked = {**SHORT, "request_id": "mine"}
        status, headers, answer = one.call("/v1/chat/completions", asked, key("other"))
        assert (status, answer["id"], headers["x-request-id"]) == (200, "chatcmpl-mine", "mine")
        status, headers, found = one.call("/v1/chat/completions", asked, key("one"))
        text = "a request with the id 'mine' is running; ids must differ"
        assert status == 409 and headers["x-request-id"] == "mine"
        assert found == error("invalid_request_error", text, "request_id", "request_id_in_use")
        one.executor.may_end.set()
        stream.join()
    owners = [one.keys.owner_of({b"authorization": b"Bearer " + name}) for name in (b"one", b"other")]
    queued = [record.event for record in CheckedLog(tmp_path / "log") if isinstance(record.event, ev.Queued)]
    assert [each.request_id for each in queued] == [f"{owner}:mine" for owner in owners]
    assert [msgspec.json.decode(each.envelope)["owner"] for each in queued] == owners
    assert not any(name in owner for owner in owners for name in ("one", "other"))


def test_a_full_queue_is_429_with_a_time(server, monkeypatch):
    def full(*args, **options):
        raise QueueFull("9 requests are open already; try again later")

    monkeypatch.setattr(server.engine, "stream", full)
    status, headers, body = server.chat()
    assert status == 429 and int(headers["retry-after"]) >= 1
    text = "9 requests are open already; try again later"
    assert body == error("rate_limit_error", text, None, "queue_full")


def test_not_ready_is_503_with_the_reasons(server, monkeypatch):
    from mmengine.serve.requests.health import Readiness

    monkeypatch.setattr(server.engine, "readiness", lambda: Readiness(("the disk is full",)))
    status, headers, body = server.chat()
    assert status == 503 and headers["retry-after"] == "5"
    assert body == error("server_error", "not ready: the disk is full", None, "not_ready")
    for path in ("/health", "/health/ready"):
        assert server.call(path)[::2] == (503, {"status": "not ready", "reasons": ["the disk is full"]})
    assert server.call("/health/live")[0] == 200


def test_a_call_releases_its_body():
    """The garbage collector is disabled, because reference counting alone must free the body."""
    rate = DrainRate()
    bodies = BodyBudget(100, 100, 1.0, rate)
    shares = FairShares(4, 0.5, bodies, rate)
    gc.disable()
    try:
        with shares.reserve("one", is_alone=False) as held:
            bodies.add(held, 50)
            gone = weakref.ref(held)
            assert shares.num_bytes == 50
        del held
        assert gone() is None and shares.num_bytes == 0
    finally:
        gc.enable()
