"""Tests calls from web pages against the Fetch standard's CORS rules."""

import http.client

import pytest

from mmengine.errors import ConfigError
from mmengine.server.http.cors import EXPOSED
from mmengine.server.settings import ServerSettings
from tests.server.running import served

PAGE = "https://chat.example.org"
CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hello"}]}
WANTED = {"access-control-request-method": "POST"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("secret\n")
    with served(key_file=keys, cors_origins=(PAGE, "http://localhost:3000")) as one:
        yield one


def preflight(server, origin, **headers):
    given = {"origin": origin, **WANTED, "access-control-request-headers": "authorization,content-type"}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("OPTIONS", CHAT, headers=given | headers)
    response = connection.getresponse()
    connection.close()
    return response.status, {name.lower(): value for name, value in response.getheaders()}


def test_a_preflight_needs_no_key(server):
    status, headers = preflight(server, PAGE)
    assert status == 200 and headers["access-control-allow-origin"] == PAGE
    assert "POST" in headers["access-control-allow-methods"] and "Origin" in headers["vary"]
    assert {"authorization", "content-type"} <= set(headers["access-control-allow-headers"].split(","))
    assert "access-control-allow-credentials" not in headers


@pytest.mark.parametrize("origin", ["https://evil.example", f"{PAGE}.evil.example", "null", PAGE.upper()])
def test_other_origins_get_no_permission(server, origin):
    status, headers = preflight(server, origin)
    assert status == 400 and "access-control-allow-origin" not in headers
    key = {"origin": origin, "authorization": "Bearer secret"}
    assert "access-control-allow-origin" not in server.call(CHAT, BODY, key)[1]


def test_a_public_page_may_call_a_server_in_a_private_network(server):
    """Chromium sends the header below in a preflight to a private address."""
    asked = {"access-control-request-private-network": "true"}
    status, headers = preflight(server, PAGE, **asked)
    assert status == 200 and headers["access-control-allow-private-network"] == "true"
    assert preflight(server, "https://evil.example", **asked)[0] == 400


def test_scripts_may_read_the_headers_that_clients_use():
    """Without x-should-retry, OpenAI's browser client repeats calls in vain."""
    assert {"x-should-retry", "retry-after", "x-request-id", "content-disposition"} <= set(EXPOSED)


@pytest.mark.parametrize("key", ["secret", "wrong"])
@pytest.mark.parametrize("stream", [False, True])
def test_answers_and_errors_may_be_read(server, key, stream):
    given = {"origin": PAGE, "authorization": f"Bearer {key}"}
    status, headers, _ = server.call(CHAT, {**BODY, "stream": stream}, given)
    assert status == (200 if key == "secret" else 401)
    assert headers["access-control-allow-origin"] == PAGE and "Origin" in headers["vary"]
    assert headers["access-control-expose-headers"].split(", ") == list(EXPOSED)


def test_no_page_may_call_by_default():
    with served() as one:
        status, headers = preflight(one, PAGE)
        assert status == 405 and "access-control-allow-origin" not in headers
        assert "access-control-allow-origin" not in one.call(CHAT, BODY, {"origin": PAGE})[1]


@pytest.mark.parametrize("origin", ["chat.example.org", f"{PAGE}/", "HTTPS://A.org", "", "https://*.a.org"])
def test_an_origin_that_no_browser_sends_is_refused(origin):
    with pytest.raises(ConfigError, match="cors_origins"):
        ServerSettings.of({"cors_origins": [origin]})
