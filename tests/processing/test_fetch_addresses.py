"""Tests which addresses are public, and how URLs are parsed."""

import ipaddress

import pytest

from mmengine.errors import ConfigError
from mmengine.processing.fetch.addresses import is_public
from mmengine.processing.fetch.limits import FetchLimits, hosts_of
from mmengine.processing.fetch.refusals import FetchRefused
from mmengine.processing.fetch.urls import parse_url

INSIDE = [
    *("0.0.0.0", "0.1.2.3", "10.0.0.1", "10.255.255.255", "100.64.0.1", "100.100.100.200", "127.0.0.1"),
    *("127.255.255.254", "169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.1", "192.0.0.8"),
    *(
        "192.0.0.170",
        "192.0.0.192",
        "192.0.2.1",
        "192.88.99.1",
        "192.168.0.1",
        "198.18.0.1",
        "198.19.255.255",
    ),
    *("198.51.100.1", "203.0.113.1", "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255"),
    "168.63.129.16",
]
OUTSIDE = [
    *("1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "126.255.255.255"),
    *("128.0.0.0", "169.253.255.255", "172.15.255.255", "172.32.0.0", "192.0.1.1", "192.167.255.255"),
    *("198.17.255.255", "198.20.0.0", "223.255.255.255"),
]
INSIDE_6 = [
    *("::", "::1", "::8.8.8.8", "::127.0.0.1", "fe80::1", "fec0::1", "fc00::1", "fd00:ec2::254", "ff02::1"),
    *("ff0e::1", "100::1", "2001::1", "2001:db8::1", "2001:10::1", "2001:20::1", "2002:808:808::1"),
    *(
        "2002:7f00:1::",
        "3fff::1",
        "4000::1",
        "5f00::1",
        "64:ff9b:1::808:808",
        "64:ff9b::7f00:1",
        "64:ff9b::a00:1",
    ),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::ffff:0:127.0.0.1", "fe80::1%eth0"),
    "2606:4700:4700::1111%1",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2",  # Teredo.
]
OUTSIDE_6 = ["2606:4700:4700::1111", "2a00:1450::1", "::ffff:8.8.8.8", "64:ff9b::808:808", "2400::1"]


@pytest.mark.parametrize("text", INSIDE + INSIDE_6)
def test_private_addresses_are_refused(text):
    assert not is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize("text", OUTSIDE + OUTSIDE_6)
def test_addresses_of_the_internet_are_allowed(text):
    assert is_public(ipaddress.ip_address(text))


def test_wrapped_addresses_are_unwrapped():
    for text in INSIDE + OUTSIDE:
        number = int(ipaddress.IPv4Address(text))
        for wrap in ("::ffff:0:0", "64:ff9b::"):
            wrapped = ipaddress.IPv6Address(int(ipaddress.IPv6Address(wrap)) + number)
            assert is_public(wrapped) == (text in OUTSIDE), wrapped


def test_this_machines_own_address_is_not_the_internets(monkeypatch):
    """If this machine owns an address, packets to the address also have it as their source address. Such an
    address is not public. The patches make the loopback address look public otherwise.
    """
    monkeypatch.setattr("mmengine.processing.fetch.addresses._SPECIAL_4", ())
    monkeypatch.setattr(ipaddress.IPv4Address, "is_global", True)
    assert not is_public(ipaddress.ip_address("127.0.0.1"))
    assert is_public(ipaddress.ip_address("8.8.8.8"))


@pytest.mark.parametrize(
    ("text", "host", "port", "target"),
    [
        ("https://Example.ORG", "example.org", 443, "/"),
        ("https://example.org./a?b=c#d", "example.org", 443, "/a?b=c"),
        ("http://example.org:8080/a b".replace(" ", "%20"), "example.org", 8080, "/a%20b"),
        ("https://bücher.example/ü?ä", "xn--bcher-kva.example", 443, "/%C3%BC?%C3%A4"),
        ("https://faß.example/", "xn--fa-hia.example", 443, "/"),
        ("https://xn--bcher-kva.example/", "xn--bcher-kva.example", 443, "/"),
        ("https://1.1.1.1/", "1.1.1.1", 443, "/"),
        ("https://１.1.1.1/", "1.1.1.1", 443, "/"),
        ("https://[2606:4700::1111]:443/", "2606:4700::1111", 443, "/"),
        ("HTTPS://a_b.example.org/", "a_b.example.org", 443, "/"),
        ("https://example.org/%00?x=%0d%0a", "example.org", 443, "/%00?x=%0d%0a"),
        ("https://example.org//double/../up", "example.org", 443, "//double/../up"),
    ],
)
def test_a_url_is_read(text, host, port, target):
    found = parse_url(text)
    assert (found.host, found.port, found.target) == (host, port, target)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "https://",
            "https:///a.png",
            "https:a.png",
            "https://.",
            "https://a..b/",
            "https://.a/",
            "https://a b/",
        ),
        *(
            "https://exa\tmple.org/",
            "https://example.org/\r\nHost: x",
            "https://example.org/\0",
            " https://a.b/",
        ),
        *("https://example.org\\@evil.example/", "https://a%2eb/", "https://a.b:port/", "https://a.b:99999/"),
        *("https://a.b:80:90/", "https://[::1/", "https://[::1]x/", "https://[::g]/", "https://[1.1.1.1]/"),
        *(
            "https://[fe80::1%25eth0]/",
            "https://[v1.x]/",
            "https://0x7f.1/",
            "https://0177.0.0.1/",
            "https://127.1/",
        ),
        *(
            "https://2130706433/",
            "https://0x7f000001/",
            "https://1.1.1.1.1/",
            "https://1.1.1.256/",
            "https://0x/",
        ),
        *("https://127.0.0.1%2f/", "https://-a.example/", "https://a-.example/", "https://a!.example/"),
        *(
            "https://" + "a" * 64 + ".example/",
            "https://" + "a." * 200 + "example/",
            "https://exa\u00admple../",
        ),
        *("https://a.b/" + "a" * 9000, "https://a.b/\ud800", "https://℀.example/", "https://1.1.1.08/"),
    ],
)
def test_ambiguous_urls_are_refused(text):
    with pytest.raises(FetchRefused) as caught:
        parse_url(text)
    assert caught.value.reason == "url"


@pytest.mark.parametrize(
    "text", ["ftp://a.b/", "file:///etc/passwd", "gopher://a.b/", "javascript:1", "//a.b/", "a.png"]
)
def test_other_schemes_are_refused(text):
    with pytest.raises(FetchRefused) as caught:
        parse_url(text)
    assert caught.value.reason == "scheme"


@pytest.mark.parametrize(
    "text", ["https://user@a.b/", "https://user:secret@a.b/", "https://@a.b/", "https://a.b@c.d/"]
)
def test_names_of_users_are_refused(text):
    with pytest.raises(FetchRefused) as caught:
        parse_url(text)
    assert caught.value.reason == "userinfo" and "secret" not in str(caught.value)


def test_hosts_are_names_and_all_names_below_one():
    limits = FetchLimits(hosts=hosts_of(["Images.Example.org.", "*.bücher.example"]))
    assert limits.allows_host("images.example.org") and limits.allows_host("a.b.xn--bcher-kva.example")
    for name in ("example.org", "a.images.example.org", "xn--bcher-kva.example", "evilimages.example.org"):
        assert not limits.allows_host(name)
    assert hosts_of(True) is None and hosts_of("public") is None and hosts_of(["public"]) is None
    assert hosts_of(False) == () == hosts_of(None) and hosts_of("a.b") == ("a.b",)
    for wrong in (
        ["https://a.b"],
        ["a.b:443"],
        ["*"],
        ["*.*.a"],
        [1],
        5,
        {"a": 1},
        ["a.b", "a b"],
        ["/"],
        ["public", "a.b"],
    ):
        with pytest.raises(ConfigError):
            hosts_of(wrong)


def test_limits_out_of_range_are_refused():
    for wrong in ({"timeout_s": 0}, {"max_bytes": -1}, {"ports": (0,)}, {"max_urls": 0}):
        with pytest.raises(ConfigError):
            FetchLimits(**wrong)
