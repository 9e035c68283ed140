"""Tests the page /live, its event stream, and its routes for questions about the log."""

import hashlib
import http.client
import json
import socket
import time

import pytest

from mmengine.replay.queries.why import why
from mmengine.server.live import feed
from mmengine.server.live.routes import live_page
from tests.server.openai_answers import named_events
from tests.server.running import SlowEcho, served, wait_for

KEY = {"authorization": "Bearer secret"}
OWNER = hashlib.sha256(b"secret").hexdigest()[:16]  # The log prefixes this key's request ids with OWNER.


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("live")
    (folder / "keys").write_text("secret\n")
    log = folder / "log"
    kept = {"engine_options": {"log": log}, "storage": {"log": log}}
    with served(executor_class=SlowEcho, live=log, key_file=folder / "keys", **kept) as server:
        yield server, log


def ask(server, path, headers=KEY):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    connection.request("GET", path, headers=headers)
    return connection.getresponse()


def chat(server, name, text="a" * 40):
    body = {"messages": [{"role": "user", "content": text}], "request_id": name}
    return server.call("/v1/chat/completions", body, KEY)


def test_the_page_is_public_and_its_data_are_not(one):
    server, _ = one
    page = ask(server, "/live", {})
    text, policy = page.read().decode(), page.headers["content-security-policy"]
    assert page.status == 200 and (text, policy) == live_page()
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert text.count("<script") == 1 and "http://" not in text and "https://" not in text
    for path in ("/live/events", "/live/ask/why?request=a"):
        assert ask(server, path, {}).status == 401
    with served() as other:
        assert ask(other, "/live", {}).status == 404


def test_a_page_gets_past_and_new_events(one, monkeypatch):
    server, log = one
    monkeypatch.setattr(feed, "LINGER_S", 0.1)
    chat(server, "before")
    events = ask(server, "/live/events")
    assert events.status == 200 and events.headers["content-type"].startswith("text/event-stream")
    text, ids, begun = "", [], time.monotonic()
    while f"{OWNER}:while" not in ids:
        assert time.monotonic() < begun + 60, text
        text += events.readline().decode()
        if "before" in text and "while" not in text and not ids:
            chat(server, "while")
        if text.endswith("\n\n"):
            found = named_events(text)  # Skips pings, which are comments.
            assert not found or (found[0][0] == "begin" and found[0][1]["config"]["max_num_seqs"])
            ids = [name for kind, event in found if kind == "more" for name in event["lanes"]["ids"]]
    assert ids.index(f"{OWNER}:before") < ids.index(f"{OWNER}:while")
    monkeypatch.setattr(feed, "MAX_VIEWERS", 1)
    assert ask(server, "/live/events").status == 429
    events.close()
    wait_for(lambda: server.app._live._feed._following is None, 10)


@pytest.mark.parametrize("path", ["/live/events", "/v1/responses/resp_looked_at?stream=true"])
def test_the_head_of_a_stream_has_no_body(one, path):
    """A HEAD call for a stream gets only the headers, and leaves no stream open."""
    server, _ = one
    if "responses" in path:
        server.call("/v1/responses", {"input": "a", "request_id": "looked_at"}, KEY)
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        for method, name in (("HEAD", path), ("GET", "/health/live")):
            head = f"{method} {name} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer secret\r\n\r\n"
            connection.sendall(head.encode())
            answer = connection.recv(4096)
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert (b"text/event-stream" in answer and answer.endswith(b"\r\n\r\n")) == (method == "HEAD")
    wait_for(lambda: "mmengine_http_streams_open 0.0" in server.call("/metrics", headers=KEY)[2])


def test_shutdown_does_not_wait_for_live_pages(tmp_path):
    log = tmp_path / "log"
    with served(executor_class=SlowEcho, engine_options={"log": log}, live=log, drain_s=600) as server:
        events = ask(server, "/live/events")
        server.stop()
        server._thread.join(200)
        assert not server._thread.is_alive() and events.status == 200


def test_questions_about_a_request(one):
    server, log = one
    chat(server, "asked")
    told = json.loads(ask(server, f"/live/ask/why?request={OWNER}:asked").read())
    assert [each["text"] for each in told] == [claim.text for claim in why(log, f"{OWNER}:asked")]
    assert json.loads(ask(server, "/live/ask/drafts?request=asked").read()) == [0] * 41
    trace = ask(server, "/live/ask/trace")
    assert "attachment" in trace.headers["content-disposition"]
    assert f"{OWNER}:asked" in trace.read().decode()
    assert ask(server, "/live/ask/why?request=nobody").status == 404
    assert ask(server, "/live/ask/what?request=asked").status == 404
