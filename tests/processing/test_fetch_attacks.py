"""Tests the media fetcher against hostile and broken hosts, on loopback sockets."""

import gzip
import threading

import pytest

from mmengine.processing.fetch.refusals import FetchRefused
from tests.processing.internet import (
    NAME,
    OTHER,
    PRIVATE,
    PUBLIC,
    UNSURE,
    Internet,
    answer,
    fetch,
    png,
    redirect,
)


@pytest.fixture(scope="module")
def shared():
    net = Internet()
    yield net
    net.close()


@pytest.fixture
def net(shared):
    shared.pages = {"/a.png": answer(png())}
    shared.names = {name: [PUBLIC] for name in (NAME, OTHER, UNSURE)}
    shared.heads, shared.lookups = [], []
    shared.num_connected.update({PUBLIC: 0, PRIVATE: 0})
    return shared


def refusal(fetcher, *names):
    with pytest.raises(FetchRefused) as caught:
        fetch(fetcher, *names)
    return caught.value.reason


def test_a_picture_comes_over_tls_with_the_name_of_its_host(net):
    assert fetch(net.fetcher(), net.url("/a.png")) == [png()]
    head = net.heads[0].lower()
    assert head.startswith("get /a.png http/1.1\r\n") and f"host: {NAME}:{net.port}\r\n" in head
    assert "accept-encoding: identity\r\n" in head and "cookie" not in head and "authorization" not in head


def test_without_tls_nothing_is_fetched_unless_it_is_allowed(net):
    assert refusal(net.fetcher(), net.url("/a.png", scheme="http")) == "scheme"
    assert net.num_connected[PUBLIC] == 0
    assert fetch(net.fetcher(http=True), net.url("/a.png", scheme="http")) == [png()]


def test_a_rebinding_name_is_resolved_once(net):
    net.names[NAME] = [[PUBLIC], [PRIVATE]]
    assert fetch(net.fetcher(), net.url("/a.png")) == [png()]
    assert net.lookups == [NAME] and net.num_connected == {PUBLIC: 1, PRIVATE: 0}


def test_a_name_that_rebinds_between_two_hops_is_refused(net):
    net.names[NAME] = [[PUBLIC], [PRIVATE]]
    net.pages["/a.png"] = redirect("/b.png")
    assert refusal(net.fetcher(), net.url("/a.png")) == "address"
    assert net.num_connected == {PUBLIC: 1, PRIVATE: 0}


@pytest.mark.parametrize("answers", [[PUBLIC, PRIVATE], [PRIVATE, PUBLIC], [PUBLIC, "::1"], [PUBLIC] * 65])
def test_one_bad_answer_of_many_refuses_all(net, answers):
    net.names[NAME] = answers
    assert refusal(net.fetcher(), net.url("/a.png")) == "address"
    assert net.num_connected == {PUBLIC: 0, PRIVATE: 0}


@pytest.mark.parametrize(
    "host",
    [
        *(PRIVATE, "[::1]", "[::ffff:127.0.0.2]", "[::127.0.0.2]", "[64:ff9b::7f00:2]", "[2002:7f00:2::]"),
        *("10.0.0.1", "169.254.169.254", "[fd00:ec2::254]", "0.0.0.0", "[::]", "224.0.0.1", "[ff02::1]"),
    ],
)
def test_addresses_that_are_not_public_are_refused_as_literals_and_behind_redirects(net, host):
    assert refusal(net.fetcher(), net.url("/a.png", host)) == "address"
    net.pages["/a.png"] = redirect(net.url("/a.png", host))
    assert refusal(net.fetcher(), net.url("/a.png")) == "address"
    assert net.num_connected == {PUBLIC: 1, PRIVATE: 0}


@pytest.mark.parametrize("host", ["0x7f.1", "0177.0.0.2", "2130706434", "127.2", "127.0.0.0x2", "１２７.2"])
def test_odd_spellings_of_addresses_are_refused(net, host):
    assert refusal(net.fetcher(), net.url("/a.png", host)) == "url"
    assert net.lookups == []


def test_an_open_and_a_closed_port_inside_read_alike(net):
    texts = set()
    for port in (net.port, 9):
        with pytest.raises(FetchRefused) as caught:
            fetch(net.fetcher(ports=(net.port, 9)), f"https://{PRIVATE}:{port}/a.png")
        texts.add(str(caught.value))
    net.names["inside.example.org"] = [PRIVATE]
    for host in ("inside.example.org", "unknown.example.org"):
        with pytest.raises(FetchRefused) as caught:
            fetch(net.fetcher(), net.url("/a.png", host))
        texts.add(str(caught.value))
    assert len(texts) == 1 and "127" not in texts.pop()
    assert net.num_connected == {PUBLIC: 0, PRIVATE: 0}


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("file:///etc/passwd", "scheme"),
        ("ftp://pictures.example.org/a.png", "scheme"),
        ("data:image/png;base64,AAAA", "scheme"),
        ("http://pictures.example.org/a.png", "scheme"),
        ("//user:secret@other.example.net/a.png", "userinfo"),
        ("https://other.example.net:22/a.png", "port"),
        ("https://pictures.example.org\\@evil.example/a.png", "url"),
    ],
)
def test_a_redirect_target_is_checked_like_a_url(net, target, reason):
    net.pages["/a.png"] = redirect(target)
    assert refusal(net.fetcher(), net.url("/a.png")) == reason
    assert net.num_connected == {PUBLIC: 1, PRIVATE: 0}


def test_redirects_are_followed_three_times(net):
    for number in range(4):
        net.pages[f"/{number}"] = redirect(net.url(f"/{number + 1}", OTHER), "307 Over there")
    net.pages["/3"] = answer(png())
    assert fetch(net.fetcher(), net.url("/0")) == [png()]
    net.pages["/3"], net.pages["/4"] = redirect("/4"), answer(png())
    assert refusal(net.fetcher(), net.url("/0")) == "redirects"
    net.pages["/round"] = redirect("/round")
    assert refusal(net.fetcher(), net.url("/round")) == "redirects"


def test_a_redirect_to_an_unlisted_host_is_refused(net):
    fetcher = net.fetcher(hosts=(NAME,))
    assert fetch(fetcher, net.url("/a.png")) == [png()]
    net.pages["/a.png"] = redirect(net.url("/b.png", OTHER))
    assert refusal(fetcher, net.url("/a.png")) == "host"
    assert refusal(fetcher, net.url("/a.png", OTHER)) == "host"


def test_a_certificate_for_another_name_is_refused(net):
    assert refusal(net.fetcher(), net.url("/a.png", UNSURE)) == "tls"
    assert net.heads == []


def test_a_host_that_speaks_no_tls_is_refused(net):
    assert refusal(net.fetcher(), f"https://{NAME}:{net.plain_port}/a.png") == "tls"


def drip(connection, closing):
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + png()[:200])
    while not closing.wait(0.05):
        connection.sendall(b"x")


def silent(connection, closing):
    closing.wait(20)


def dripping_head(connection, closing):
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    while not closing.wait(0.05):
        connection.sendall(b"A: b\r\n")


@pytest.mark.parametrize("page", [drip, silent, dripping_head])
def test_one_deadline_holds_for_all_of_it(net, page):
    """The deadline covers the whole fetch, not each read."""
    net.pages["/a.png"] = page
    assert refusal(net.fetcher(timeout_s=0.4), net.url("/a.png")) == "timeout"


def test_redirects_share_the_deadline(net):
    def late(connection, closing):
        closing.wait(0.3)
        connection.sendall(redirect("/a.png"))

    net.pages["/a.png"] = late
    assert refusal(net.fetcher(timeout_s=0.5), net.url("/a.png")) == "timeout"


def test_a_hanging_dns_lookup_does_not_block_others(net):
    release = threading.Event()
    fetcher = net.fetcher(timeout_s=0.3)
    fetcher._lookups._resolve = lambda name: release.wait(20) and []
    assert refusal(fetcher, net.url("/a.png")) == "timeout"
    release.set()


def endless(connection, closing):
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + png()[:200])
    while True:
        connection.sendall(bytes(2**16))


def endless_chunks(connection, closing):
    connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    connection.sendall(b"c8\r\n" + png()[:50].ljust(200, b"x") + b"\r\n")
    while True:
        connection.sendall(b"10000\r\n" + bytes(2**16) + b"\r\n")


@pytest.mark.parametrize("page", [endless, endless_chunks])
def test_an_endless_body_is_cut_at_the_limit(net, page):
    net.pages["/a.png"] = page
    assert refusal(net.fetcher(max_bytes=2**20), net.url("/a.png")) == "size"


def test_a_length_beyond_the_limit_is_refused_before_the_body(net):
    net.pages["/a.png"] = b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n"
    assert refusal(net.fetcher(), net.url("/a.png")) == "size"


@pytest.mark.parametrize(
    "head",
    [
        "Content-Length: 5000",
        "Content-Length: 10\r\nContent-Length: 20",
        "Content-Length: -1",
        "Content-Length: ten",
        "Transfer-Encoding: chunked\r\nContent-Length: 5",
        "Transfer-Encoding: gzip, chunked",
        "X: " + "y" * 2**17,
        "\r\n".join(f"X-{number}: y" for number in range(9000)),
        "no colon",
    ],
)
def test_invalid_and_huge_response_heads_are_refused(net, head):
    net.pages["/a.png"] = f"HTTP/1.1 200 OK\r\n{head}\r\n\r\n".encode() + png()
    assert refusal(net.fetcher(), net.url("/a.png")) == "protocol"


def test_bytes_after_the_content_length_are_ignored(net):
    body = png()
    net.pages["/a.png"] = answer(body) + b"HTTP/1.1 200 OK\r\n\r\nmore"
    assert fetch(net.fetcher(), net.url("/a.png")) == [body]


def test_heads_without_end_are_refused(net):
    def early(connection, closing):
        while not closing.is_set():
            connection.sendall(b"HTTP/1.1 103 Early\r\n\r\n" * 50)

    net.pages["/a.png"] = early
    assert refusal(net.fetcher(), net.url("/a.png")) == "protocol"


def test_a_body_in_tiny_pieces_is_refused(net):
    """The fetcher refuses a body in thousands of tiny chunks, because each chunk costs CPU time."""
    crumbs = b"".join(b"1\r\n%c\r\n" % byte for byte in png((200, 200)) * 30)
    net.pages["/a.png"] = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + crumbs + b"0\r\n\r\n"
    assert refusal(net.fetcher(), net.url("/a.png")) == "protocol"


def test_a_compressed_body_is_never_unpacked(net):
    bomb = gzip.compress(bytes(2**24))
    net.pages["/a.png"] = answer(bomb, "Content-Encoding: gzip")
    assert refusal(net.fetcher(), net.url("/a.png")) == "encoding"
    net.pages["/a.png"] = answer(bomb, "Content-Encoding: identity", "content-encoding: gzip")
    assert refusal(net.fetcher(), net.url("/a.png")) == "encoding"
    net.pages["/a.png"] = answer(bomb, "Content-Type: image/png")
    assert refusal(net.fetcher(), net.url("/a.png")) == "type"


@pytest.mark.parametrize(
    "body",
    [
        b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
        b"<!doctype html><title>picture</title>" * 20,
        b"#EXTM3U\nfile:///etc/passwd\n",
        b"%PDF-1.7",
        b"RIFF\0\0\1\0WAVEfmt ",
        b"SIMPLE  =                    T",
        b"",
        b"G" * 100,
    ],
)
def test_bytes_decide_the_type_and_not_the_header(net, body):
    net.pages["/a.png"] = answer(body, "Content-Type: image/png")
    assert refusal(net.fetcher(), net.url("/a.png")) == "type"


@pytest.mark.parametrize("status", ["204 None", "206 Part", "304 Same", "403 No", "500 Oh", "300 Many"])
def test_another_status_is_no_picture(net, status):
    net.pages["/a.png"] = answer(png(), status=status)
    assert refusal(net.fetcher(), net.url("/a.png")) in ("status", "protocol")


def test_proxies_of_the_environment_are_not_asked(net, monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, f"http://{PRIVATE}:{net.plain_port}")
    assert fetch(net.fetcher(), net.url("/a.png")) == [png()]
    assert net.num_connected[PRIVATE] == 0


def test_an_unreachable_host_is_reported(net):
    assert refusal(net.fetcher(ports=(9,)), f"https://{NAME}:9/a.png") == "connect"
