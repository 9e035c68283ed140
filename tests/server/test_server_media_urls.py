"""Tests messages with image URLs and local files. The hosts of the URLs are on the loopback interface."""

import base64

import pytest

from mmengine.serve.async_engine.async_engine import AsyncEngine
from tests.pictures import scene
from tests.processing.internet import NAME, PRIVATE, Internet, answer, redirect
from tests.server.running import served


@pytest.fixture(scope="module")
def picture():
    return scene()


@pytest.fixture(scope="module")
def net(picture):
    net = Internet()
    net.pages = {"/a.png?token=secret": answer(picture), "/moved": redirect(f"//{PRIVATE}:{net.port}/a.png")}
    yield net
    net.close()


@pytest.fixture(scope="module")
def root(tmp_path_factory, picture):
    folder = tmp_path_factory.mktemp("root")
    (folder / "below").mkdir()
    (folder / "below" / "a.png").write_bytes(picture)
    return folder


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return tmp_path_factory.mktemp("log") / "run.log"


@pytest.fixture(scope="module")
def server(net, root, log):
    with served(AsyncEngine(log=log), names=("shapes",), media_fetcher=net.fetcher(root=root)) as one:
        yield one


def ask(server, part, **fields):
    content = [part, {"type": "text", "text": "What is in the image?"}]
    return server.chat(content, temperature=0, max_tokens=12, **fields)


def image(url):
    return {"type": "image_url", "image_url": {"url": url}}


def said(answer):
    status, _, body = answer
    assert status == 200, body
    return body["choices"][0]["message"]["content"], body["usage"]["prompt_tokens"]


def test_an_image_url_is_answered_like_its_bytes(server, net, picture, log):
    sent = said(ask(server, image("data:image/png;base64," + base64.b64encode(picture).decode())))
    assert said(ask(server, image(net.url("/a.png?token=secret")))) == sent
    for name in (f"file://{server.media_fetcher.limits.root}/below/a.png", "file://below/a.png"):
        assert said(ask(server, image(name))) == sent
    assert said(ask(server, {"type": "image", "path": "below/a.png"})) == sent
    written = b"".join(path.read_bytes() for path in log.rglob("*") if path.is_file())
    assert b"secret" not in written and NAME.encode() not in written
    text = server.call("/metrics")[2]
    assert "mmengine_media_fetch_seconds_count 4.0" in text
    assert f"mmengine_media_fetch_bytes_total {4.0 * len(picture)}" in text
    assert "mmengine_media_fetch_held_bytes 0.0" in text and "mmengine_media_fetch_running 0.0" in text


def test_fetch_errors_name_the_part_and_no_address(server, net):
    status, _, body = ask(server, image(net.url("/moved")))
    assert status == 400 and body["error"]["code"] == "media_not_fetched"
    assert body["error"]["param"] == "messages[0].content[0]"
    assert "its address is not allowed" in body["error"]["message"]
    assert "127" not in body["error"]["message"] and net.num_connected[PRIVATE] == 0
    assert 'mmengine_media_fetch_refused_total{reason="address"} 1.0' in server.call("/metrics")[2]


@pytest.mark.parametrize(
    "url",
    [
        "http://pictures.example.org/a.png",
        "ftp://pictures.example.org/a.png",
        "file:///etc/passwd",
        "file://../a",
    ],
)
def test_other_schemes_and_other_files_are_refused(server, url):
    status, _, body = ask(server, image(url))
    assert status == 400 and "passwd" not in body["error"]["message"]


def test_a_call_cannot_enable_local_files(net):
    with served() as one:
        for url in (net.url("/a.png"), "file://below/a.png"):
            status, _, body = ask(one, image(url))
            assert status == 400 and body["error"]["param"] == "messages[0].content[0].image_url"
            assert "(--" in body["error"]["message"]
        status, _, body = ask(one, image("data:,"), mm_processor_kwargs={"urls": True})
        assert status == 400 and body["error"]["param"] == "mm_processor_kwargs.urls"


def test_text_without_media_is_answered_where_urls_are_allowed(server):
    hello = [{"role": "user", "content": "Hello"}]
    bodies = {
        "/v1/chat/completions": {"messages": hello, "max_tokens": 2},
        "/v1/responses": {"input": "Hello", "max_output_tokens": 2},
        "/v1/messages": {"messages": hello, "max_tokens": 2},
        "/tokenize": {"messages": hello},
    }
    for path, body in bodies.items():
        status, _, answer = server.call(path, {"model": "shapes", **body})
        assert status == 200, (path, answer)
