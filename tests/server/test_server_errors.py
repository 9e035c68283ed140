"""Tests the statuses, messages and params of the server's errors, with an engine that echoes prompts."""

import json
import socket

import pytest

from tests.server.running import served


@pytest.fixture(scope="module")
def server():
    with served(max_body_bytes=4096, max_header_bytes=2048) as one:
        yield one


def error(kind, message, param=None, code=None):
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


BAD = "invalid_request_error"
GOOD = b'{"messages": [{"role": "user", "content": "a"}]}'
REFUSED = (
    (
        {"temperatur": 1},
        400,
        "unknown field 'temperatur'; did you mean temperature?",
        "temperatur",
        "unknown_parameter",
    ),
    ({"zzz": 1}, 400, "unknown field 'zzz'; leave it out", "zzz", "unknown_parameter"),
    (
        {"guided_json": {}},
        400,
        "guided_json is not supported; use structured_outputs.json",
        "guided_json",
        "unsupported_parameter",
    ),
    (
        {"tools": [{}]},
        400,
        "tools[0].type must be function, not None",
        "tools[0].type",
        None,
    ),
    ({"max_tokens": "many"}, 400, "max_tokens: expected int | null, got str", "max_tokens", "invalid_type"),
    ({"max_tokens": 0}, 400, "max_tokens must be 1 to 10000000, not 0", "max_tokens", None),
    (
        {"temperature": -1},
        400,
        "temperature must be a number from 0.0 to 100.0, not -1.0",
        "temperature",
        None,
    ),
    ({"top_logprobs": 2}, 400, "top_logprobs requires logprobs=true", "top_logprobs", None),
    ({"stream_options": {}}, 400, "stream_options requires stream=true", "stream_options", None),
    (
        {"request_id": "a b"},
        400,
        "request_id must have 1 to 128 printable ASCII characters without spaces",
        "request_id",
        None,
    ),
    (
        {"structured_outputs": {"jsn": 1}},
        400,
        "structured_outputs.jsn is unknown; known are json, regex, choice, grammar, json_object, "
        "structural_tag, backend, whitespace_pattern, disable_any_whitespace, "
        "disable_additional_properties, disable_fallback",
        "structured_outputs.jsn",
        "invalid_structured_outputs",
    ),
    (
        {"structured_outputs": {"choice": []}},
        400,
        "structured_outputs.choice must be a list of 1 to 10000 strings",
        "structured_outputs.choice",
        None,
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "zzz"}}}},
        400,
        "schema refused: type at #/type: must be one of null, boolean, number, string, array, object, "
        'integer, or a list of them, not "zzz"',
        "response_format.json_schema.schema",
        None,
    ),
)


@pytest.mark.parametrize("fields, status, message, param, code", REFUSED)
def test_a_field_is_refused_by_its_name(server, fields, status, message, param, code):
    found, headers, body = server.chat(**fields)
    assert (found, body) == (status, error(BAD, message, param, code))
    assert headers["content-type"] == "application/json"


def test_an_unknown_model_error_lists_the_models(server):
    status, _, body = server.chat(model="gpt-5")
    text = "the model 'gpt-5' is not served; use one of echo, also-echo"
    assert (status, body) == (404, error("not_found_error", text, "model", "model_not_found"))
    assert server.chat(model="also-echo")[2]["model"] == "also-echo"
    assert server.chat()[2]["model"] == "echo"
    for path, fields in (
        ("/v1/completions", {"prompt": "a"}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [97]}),
    ):
        status, _, body = server.call(path, {**fields, "model": "gpt-5"})
        assert (status, body) == (404, error("not_found_error", text, "model", "model_not_found")), path
        for name in ("also-echo", "", None):
            assert server.call(path, {**fields, "model": name})[0] == 200
    status, _, body = server.call("/v1/models/gpt-5")
    assert (status, body) == (404, error("not_found_error", text, "model", "model_not_found"))


def test_other_routes_know_their_fields_too(server):
    for path, fields, message, param in (
        ("/tokenize", {"promt": "a"}, "unknown field 'promt'; did you mean prompt?", "promt"),
        ("/detokenize", {"tokenz": [1]}, "unknown field 'tokenz'; did you mean tokens?", "tokenz"),
        ("/tokenize", {"chat_template": "x"}, "chat_template is not supported", "chat_template"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"chat_template": "x"}},
            "chat_template_kwargs.chat_template is not supported",
            "chat_template_kwargs.chat_template",
        ),
    ):
        status, _, body = server.call(path, fields)
        assert status == 400 and body["error"]["param"] == param, body
        assert message in body["error"]["message"]


def test_null_is_absence_for_every_field(server):
    from mmengine.server.chat.field_tables import CHAT

    nulls = {field.name: None for field in CHAT if field.name != "messages"}
    status, _, body = server.chat("abc", **nulls, unheard_of=None)
    assert status == 200 and body["choices"][0]["message"]["content"] == "ABC"


def test_neutral_values_are_accepted(server):
    from mmengine.server.chat.field_tables import CHAT

    neutral = {field.name: field.neutral[0] for field in CHAT if field.neutral}
    assert {"functions", "store", "service_tier"} <= neutral.keys()
    assert server.chat("abc", **neutral)[0] == 200


def test_unknown_fields_may_be_ignored_and_are_named():
    with served(unknown_fields="ignore", max_messages=2) as one:
        status, headers, _ = one.chat(zzz=1, frobnicate=True, temperature=0)
        assert status == 200 and headers["x-mmengine-ignored-fields"] == "zzz, frobnicate"
        # Even with unknown_fields="ignore", a field that is known but not supported is refused.
        assert one.chat(guided_json={})[0] == 400
        for path, fields in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [97]})):
            status, headers, _ = one.call(path, {**fields, "zzz": 1})
            assert status == 200 and headers["x-mmengine-ignored-fields"] == "zzz"
        message = {"role": "user", "content": "a"}
        for path in ("/v1/chat/completions", "/tokenize"):
            assert one.call(path, {"messages": [message] * 2})[0] == 200
            status, _, body = one.call(path, {"messages": [message] * 3})
            text = "messages has 3 entries; the limit is 2 (max_messages)"
            assert (status, body) == (400, error(BAD, text, "messages"))


@pytest.mark.parametrize(
    "body, message",
    [
        (b"{", "the body is not valid JSON: DecodeError: Input data was truncated"),
        (b"[1]", "the body must be a JSON object with the fields of this route"),
        (b"{}", "messages"),
        (b'{"messages": []}', "messages: expected array of length >= 1"),
        (b"\xff", "the body is not valid JSON"),
        (b'{"messages": ' + b"[" * 3000, "the body is not valid JSON"),
        # Invalid JSON is found even in a field that is ignored.
        (GOOD[:-1] + b', "best_of": 1e999}', "Number out of range"),
        (GOOD[:-1] + b', "service_tier": "\xff"}', "the body is not valid JSON"),
    ],
)
def test_invalid_bodies(server, body, message):
    status, _, found = server.call("/v1/chat/completions", body)
    assert status == 400 and message in found["error"]["message"]
    assert found["error"]["type"] == BAD


def test_bodies_and_heads_have_limits(server):
    status, headers, body = server.chat("a" * 5000)
    assert status == 413 and body["error"]["code"] == "request_too_large" and headers["connection"] == "close"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n" + b"x-a: " + b"a" * 1500)
        connection.sendall(b"a" * 1500)
        answer = connection.recv(4096)
    assert answer.startswith(b"HTTP/1.1 431 ") and b'"type":"invalid_request_error"' in answer
    assert server.app.admission.bodies.num_bytes == 0


def test_a_compressed_body_is_415(server):
    headers = {"content-encoding": "gzip"}
    status, _, body = server.call("/v1/chat/completions", {"messages": []}, headers)
    text = "compressed bodies are not supported; send the body uncompressed"
    assert (status, body) == (415, error(BAD, text))


def test_invalid_http_gets_a_json_error(server):
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"hello\r\n\r\n")
        head, _, body = connection.recv(4096).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body) == error(BAD, "the bytes are not a valid HTTP request")


ASKING = (
    b"POST /v1/chat/completions HTTP/1.1\r\nConnection: %bUpgrade, HTTP2-Settings\r\n"
    b"Content-Length: %d\r\nHost: a\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\nUPGRADE: h2c\r\n\r\n"
)


@pytest.mark.parametrize("size", [1, 7, 100, 10**6])
def test_protocol_upgrades_are_ignored(server, size):
    """Three requests on one connection, each with `Upgrade`, are answered. They are sent in pieces of `size`
    bytes.
    """
    sent = b"".join(ASKING % (way, len(GOOD)) + GOOD for way in (b"", b"", b"close, "))
    if size > len(sent):
        sent += b"what comes behind the last one"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(10)
        for begin in range(0, len(sent), size):
            connection.sendall(sent[begin : begin + size])
        came = connection.makefile("rb").read()
    assert came.count(b"HTTP/1.1 200 ") == came.count(b'"content":"A"') == 3, came
    assert server.app.admission.bodies.num_bytes == 0


def test_unknown_routes_and_methods(server):
    status, _, body = server.call("/v1/moderations", {})
    text = "moderation is not supported"
    assert (status, body) == (404, error("not_found_error", text, None, "unknown_url"))
    assert server.call("/nowhere")[0] == 404
    status, headers, body = server.call("/v1/chat/completions")
    assert (status, headers["allow"]) == (405, "POST")
    assert body == error(BAD, "GET is not allowed on this route; use POST")
    assert server.call("/v1/models", {})[2] == error(BAD, "POST is not allowed on this route; use GET, HEAD")


def test_a_field_that_is_missing_is_named(server):
    for path, name in (("chat/completions", "messages"), ("completions", "prompt"), ("responses", "input")):
        status, _, body = server.call(f"/v1/{path}", {})
        wanted = error(BAD, f"{name} is missing", name, "missing_required_parameter")
        assert (status, body) == (400, wanted)
    tools = [{"type": "function", "function": {}}]
    asked = {"messages": [{"role": "user", "content": "a"}], "tools": tools}
    found = server.call("/v1/chat/completions", asked)[2]["error"]
    assert found["param"] == "tools[0].function.name", found


def test_media_urls_and_paths_are_refused(server):
    def told(part):
        return server.chat([{"type": "text", "text": "a"}, part])[2]["error"]

    for url, code in (
        ("https://example.com/a.png", "url_not_fetched"),
        ("HTTP://example.com/a.png", "url_not_fetched"),
        ("file:///etc/passwd", "url_not_allowed"),
        ("gopher://a", "url_not_allowed"),
    ):
        found = told({"type": "image_url", "image_url": {"url": url}})
        assert (found["param"], found["code"]) == ("messages[0].content[1].image_url", code)
    assert told({"type": "input_audio"})["param"] == "messages[0].content[1]"
    assert told({"type": "image", "path": "/etc/passwd"})["param"] == "messages[0].content[1].path"
    found = told({"type": "image_url", "image_url": {"url": "data:,", "detail": "huge"}})
    assert found["param"] == "messages[0].content[1].image_url.detail"


def test_a_deadline_is_504_without_retry(server, monkeypatch):
    told = []
    monkeypatch.setattr(server.app.metrics, "count_error", told.append)
    status, headers, body = server.chat("a" * 300, deadline_s=1e-6)
    assert status == 504 and headers["x-should-retry"] == "false"
    assert body["error"]["code"] == "deadline_exceeded"
    (error,) = told
    # A reference cycle would keep the error in memory until the garbage collector runs.
    assert error.__cause__ is not error


def test_an_unexpected_error_is_500_without_details(server, monkeypatch):
    def broken(*args, **options):
        raise ValueError("a bug")

    monkeypatch.setattr(server.engine, "stream", broken)
    status, _, body = server.chat()
    text = "the server failed (ValueError); the server's log says more"
    assert (status, body) == (500, error("server_error", text, None, "internal_error"))


@pytest.mark.parametrize("upgrade", [b"", b"Upgrade: h2c\r\nConnection: Upgrade\r\n"])
@pytest.mark.parametrize("line", [b"GET /health HTTP/1.1\r\nx-a: %b\r\n", b"GET /%b HTTP/1.1\r\n"])
def test_a_head_that_arrives_at_once_has_its_limit(server, line, upgrade):
    for size, status in ((1500, b"431"), (100, b"")):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(line % (b"a" * 2 * size) + upgrade + b"Host: a\r\n\r\n")
            answer = connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 431 ") == bool(status)


def chunked(server, trailers, method=b"POST /tokenize"):
    """Send the head, a chunked body and trailers together, and return the answer."""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = method + b" HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head + b'e\r\n{"prompt":"a"}' + b"\r\n0\r\n" + trailers + b"\r\n")
        return connection.recv(4096)


def test_trailers_have_the_limit_of_a_head(server):
    assert chunked(server, b"").startswith(b"HTTP/1.1 200 ")
    for trailers in (b"x-a: " + b"a" * 3000 + b"\r\n", b"x-a: a\r\n" * 400):
        assert chunked(server, trailers).startswith(b"HTTP/1.1 431 ")
    assert chunked(server, b"x-a: a\r\n" * 10).startswith(b"HTTP/1.1 200 ")


def test_trailers_are_no_headers(tmp_path):
    """A proxy may check only the headers and pass trailers on, so the server must not read trailers as
    headers.
    """
    (tmp_path / "keys").write_text("secret\n")
    with served(key_file=tmp_path / "keys") as one:
        assert chunked(one, b"authorization: Bearer secret\r\n").startswith(b"HTTP/1.1 401 ")
    with served() as one:
        assert chunked(one, b"content-encoding: gzip\r\n").startswith(b"HTTP/1.1 200 ")


def test_roles_and_stop_texts_are_checked(server):
    for role in ("root", "User", ""):
        body = {"messages": [{"role": role, "content": "a"}]}
        status, _, found = server.call("/v1/chat/completions", body)
        assert (status, found["error"]["param"]) == (400, "messages[0].role")
    for stop in ([""], ["a", ""]):
        status, _, found = server.chat(stop=stop)
        assert (status, found["error"]["param"]) == (400, "stop")
    assert [server.chat(stop=stop)[0] for stop in ([], "")] == [200, 200]


def test_top_p_0_is_greedy(server):
    answers = [server.chat(**fields)[2]["choices"] for fields in ({"top_p": 0}, {"temperature": 0})]
    assert answers[0] == answers[1]
