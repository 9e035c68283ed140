"""Tests the media fetcher's limits: slots, bytes, and deadlines."""

import threading
import time
from collections import Counter
from contextlib import suppress

import pytest

from mmengine.processing.fetch.refusals import REASONS, FetchRefused
from mmengine.processing.workers.attempt import AttemptOver
from tests.processing.internet import NAME, OTHER, Internet, answer, fetch, png, redirect


@pytest.fixture
def net():
    net = Internet()
    yield net
    net.close()


class Busy:
    """A page that counts concurrent requests, and answers when `go` is set."""

    def __init__(self, body=None):
        self.go, self.now, self.most, self.lock = threading.Event(), Counter(), Counter(), threading.Lock()
        self.body = body or png()

    def __call__(self, connection, closing):
        with self.lock:
            self.now["all"] += 1
            self.most["all"] = max(self.now["all"], self.most["all"])
        self.go.wait(60)
        with self.lock:
            self.now["all"] -= 1
        connection.sendall(answer(self.body))


def eventually(check, limit_s=60):
    ends = time.monotonic() + limit_s
    while not check():
        assert time.monotonic() < ends
        time.sleep(0.005)


def test_fetches_at_once_are_bounded_in_all_for_a_host_and_for_a_prompt(net):
    page = net.pages["/a.png"] = Busy()
    for limits, most in (
        ({"max_fetches": 3}, 3),
        ({"max_fetches": 20, "max_fetches_a_host": 2}, 2),
        ({"max_fetches": 20, "max_fetches_a_host": 20, "max_bytes": 1000, "max_bytes_in_flight": 4000}, 4),
    ):
        net.pages.update({f"/{number}": page for number in range(8)})
        page.go.clear()
        page.most.clear()
        fetcher = net.fetcher(**limits)
        asked = [fetcher.begin([net.url(f"/{number}")]) for number in range(8)]
        eventually(lambda most=most: page.now["all"] == most)
        time.sleep(0.05)
        assert fetcher.num_running == most
        page.go.set()
        for each in asked:
            each.wait()
            assert each.error is None
            each.release()
        assert page.most["all"] <= most
        eventually(lambda fetcher=fetcher: fetcher.num_running == 0)
        assert fetcher.num_bytes == 0


def test_a_prompt_uses_half_of_the_slots_and_other_hosts_do_not_wait(net):
    slow, quick = Busy(), answer(png())
    net.pages.update({f"/{number}": slow for number in range(9)}, **{"/quick": quick})
    fetcher = net.fetcher(max_fetches=8, max_fetches_a_host=8)
    many = fetcher.begin([net.url(f"/{number}") for number in range(9)])
    eventually(lambda: slow.now["all"] == 4)
    assert fetch(fetcher, net.url("/quick")) == [png()]
    fetcher = net.fetcher(max_fetches=8, max_fetches_a_host=2)
    other = fetcher.begin([net.url("/0"), net.url("/1"), net.url("/2")])
    eventually(lambda: slow.now["all"] == 6)
    assert fetch(fetcher, net.url("/quick", OTHER)) == [png()]
    slow.go.set()
    for each in (many, other):
        each.wait()
        each.release()


def test_bytes_stay_held_until_they_are_released(net):
    """A fetch waits until enough bytes are released. The oldest prompt's fetches never wait, so prompts
    cannot deadlock.
    """
    net.pages.update({f"/{number}": answer(png()) for number in range(4)})
    size = len(png())
    fetcher = net.fetcher(max_bytes=size, max_bytes_in_flight=2 * size)
    first, second = fetcher.begin([net.url("/0")]), fetcher.begin([net.url("/1")])
    first.wait()
    second.wait()
    third = fetcher.begin([net.url("/2")])
    time.sleep(0.1)
    assert fetcher.num_bytes == 2 * size and not third.found and fetcher.num_running == 0
    second.release()
    third.wait()
    assert third.found == {net.url("/2"): png()}
    fourth = fetcher.begin([net.url("/3")])
    first.release()
    third.release()
    fourth.wait()
    assert fourth.found == {net.url("/3"): png()}
    fourth.release()
    assert fetcher.num_bytes == 0


def test_a_single_prompt_passes_with_a_small_byte_limit(net):
    net.pages["/a.png"] = answer(png())
    fetcher = net.fetcher(max_bytes=2**20, max_bytes_in_flight=1)
    asked = fetcher.begin([net.url("/a.png")])
    eventually(lambda: asked.found)
    asked.release()


def test_media_of_one_prompt_are_bounded_together(net):
    net.pages.update({f"/{number}": answer(png((64, 64)) + bytes(10_000)) for number in range(8)})
    fetcher = net.fetcher(max_bytes=20_000, max_bytes_in_flight=60_000)
    with pytest.raises(FetchRefused) as caught:
        fetch(fetcher, *(net.url(f"/{number}") for number in range(8)))
    assert caught.value.reason == "total"
    with pytest.raises(FetchRefused) as caught:
        net.fetcher(max_urls=2).begin([net.url(f"/{number}") for number in range(3)])
    assert caught.value.reason == "count"
    eventually(lambda: fetcher.num_bytes == 0)


def test_the_same_url_is_fetched_once(net):
    net.pages["/a.png"] = answer(png())
    assert fetch(net.fetcher(max_urls=1), *[net.url("/a.png")] * 5) == [png()] * 5
    assert len(net.heads) == 1


def test_a_cancelled_fetch_ends_at_once(net):
    page = net.pages["/a.png"] = Busy()
    fetcher, given_up = net.fetcher(timeout_s=30, max_fetches=1), threading.Event()
    ended = threading.Event()
    one = fetcher.begin([net.url("/a.png")], lambda fetching: ended.set(), given_up.is_set)
    eventually(lambda: page.now["all"] == 1)
    waiting = fetcher.begin([net.url("/a.png")])
    given_up.set()
    with suppress(AttemptOver):
        one.wait()
    assert ended.wait(60) and page.now["all"] == 1, "the page has not answered"
    assert isinstance(one.error[1], AttemptOver)
    one.release()
    waiting.release()
    eventually(lambda: fetcher.num_running == 0 and fetcher.num_bytes == 0)
    page.go.set()


def test_one_refusal_ends_the_others_of_its_prompt(net):
    page = net.pages["/slow"] = Busy()
    fetcher = net.fetcher(timeout_s=30)
    with pytest.raises(FetchRefused) as caught:
        fetch(fetcher, net.url("/slow"), net.url("/none"))
    assert caught.value.reason == "status" and page.now == page.most, "the page has not answered"
    eventually(lambda: fetcher.num_running == 0)
    page.go.set()


def test_each_outcome_is_reported_with_its_host_only(net):
    told = []
    net.pages["/a.png?key=secret"] = answer(png())
    net.pages["/b"] = redirect(net.url("/a.png?key=secret", OTHER))
    fetcher = net.fetcher()
    fetcher.on_fetched = told.append
    fetch(fetcher, net.url("/a.png?key=secret"), net.url("/b"))
    for wrong in (net.url("/none?key=secret"), "https://user:secret@a.b/"):
        eventually(lambda: fetcher.num_running == 0)
        with pytest.raises(FetchRefused):
            fetch(fetcher, wrong)
    eventually(lambda: len(told) == 4)
    assert [(each.host, each.reason) for each in told[2:]] == [(NAME, "status"), ("", "userinfo")]
    assert {each.reason for each in told} <= {"", *REASONS} and "secret" not in str(told)
    assert [each.num_bytes for each in told] == [len(png()), len(png()), 0, 0]


def test_invalid_dns_answers_fail_one_request(net):
    net.pages["/a.png"] = answer(png())
    net.names["broken.example.org"] = ["no address"]
    fetcher = net.fetcher()
    with pytest.raises(FetchRefused):
        fetch(fetcher, net.url("/a.png", "broken.example.org"))
    assert fetch(fetcher, net.url("/a.png")) == [png()]


def test_threads_without_work_go(net, monkeypatch):
    monkeypatch.setattr("mmengine.processing.fetch.fetcher._IDLE_S", 0.05)
    net.pages["/a.png"] = answer(png())
    fetcher = net.fetcher()
    assert fetch(fetcher, net.url("/a.png")) == [png()]
    eventually(lambda: fetcher._num_threads == 0)
    assert fetch(fetcher, net.url("/a.png")) == [png()]
