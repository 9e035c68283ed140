"""Tests of streams: they equal answers without streaming, end if their reader disconnects, and release their
resources.
"""

import base64
import json
import random
import socket
import threading
import time
from contextlib import contextmanager

import pytest
from starlette.responses import FileResponse, Response

from mmengine.server.transport.sse import LINE
from tests.server.running import (
    SlowEcho,
    events_past_the_deadline,
    is_empty,
    leave_at_random,
    opened,
    served,
    wait_for,
)


@pytest.fixture(scope="module")
def slow():
    with served(
        executor_class=SlowEcho, ping_s=0.05, slow_reader_s=0.3, max_backlog=1000, reattach_s=0
    ) as one:
        yield one


def chunks(events):
    assert events[-1] == "[DONE]"
    return [json.loads(each) for each in events[:-1]]


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_equals_the_whole_answer(slow, n):
    whole = slow.chat("hello there", n=n, request_id="a")[2]
    found = chunks(slow.events("hello there", n=n, request_id="a", stream_options={"include_usage": True}))
    for index in range(n):
        mine = [
            each["choices"][0] for each in found if each["choices"] and each["choices"][0]["index"] == index
        ]
        assert "".join(each["delta"].get("content", "") for each in mine) == "HELLO THERE"
        assert whole["choices"][index]["message"]["content"] == "HELLO THERE"
        assert [each["finish_reason"] for each in mine if each["finish_reason"]] == ["stop"]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
    assert [each["usage"] for each in found[:-1]] == [None] * (len(found) - 1)
    assert found[-1]["choices"] == [] and found[-1]["usage"].keys() == whole["usage"].keys()
    assert found[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 12 * n
    assert {each["id"] for each in found} == {whole["id"]} == {"chatcmpl-a"}


def test_created_and_ids_come_from_the_log(tmp_path):
    import msgspec

    from mmengine.events import vocabulary as ev
    from mmengine.replay.checked_log import CheckedLog

    with served(engine_options={"log": tmp_path / "log"}) as one:
        answer = one.chat("hello", request_id="mine", n=2)[2]
    queued = [record.event for record in CheckedLog(tmp_path / "log") if isinstance(record.event, ev.Queued)]
    assert [each.request_id for each in queued] == ["mine/0", "mine/1"]
    kept = msgspec.json.decode(queued[0].envelope)
    assert len(base64.b64decode(kept.pop("digest"))) == 16
    assert kept == {"api": "chat", "created": answer["created"], "model": "echo"}


def test_stream_usage_is_optional(slow):
    assert all("usage" not in each for each in chunks(slow.events("hi")))
    assert all("usage" not in each for each in chunks(slow.events("hi", stream_options={})))


def test_completions_with_several_prompts_echo_and_streams(slow):
    asked = {"prompt": ["ab", "cd"], "n": 2, "echo": True}
    status, _, whole = slow.call("/v1/completions", asked)
    assert status == 200 and [each["index"] for each in whole["choices"]] == [0, 1, 2, 3]
    assert [each["text"] for each in whole["choices"]] == ["abAB", "abAB", "cdCD", "cdCD"]
    assert whole["usage"]["prompt_tokens"] == 4
    status, _, text = slow.call("/v1/completions", {**asked, "stream": True})
    said = {}
    for each in chunks(
        [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data:")]
    ):
        for choice in each["choices"]:
            said[choice["index"]] = said.get(choice["index"], "") + choice["text"]
    assert said == {0: "abAB", 1: "abAB", 2: "cdCD", 3: "cdCD"}
    tokens = slow.call("/v1/completions", {"prompt": list(b"xyz")})[2]
    assert tokens["choices"][0]["text"] == "XYZ"
    assert slow.call("/v1/completions", {"prompt": [999]})[0] == 400


def test_a_stop_string_beside_a_form_ends_with_length(slow):
    """A stop string that may cut structured output short gives the finish reason "length"."""
    answer = slow.chat("ab!cd", stop="!", structured_outputs={"regex": ".*"})[2]["choices"][0]
    assert answer["message"]["content"] == "AB"
    assert (answer["finish_reason"], answer["stop_reason"]) == ("length", "!")
    answer = slow.chat("ab!cd", stop=["!"])[2]["choices"][0]
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", "!")
    wait_for(lambda: is_empty(slow))


def test_disconnects_at_random_leak_nothing(slow):
    threads = [
        threading.Thread(target=leave_at_random, args=(slow, 25, random.Random(seed))) for seed in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_for(lambda: is_empty(slow))
    metrics = slow.call("/metrics")[2]
    assert "mmengine_http_streams_open 0.0" in metrics
    assert 'mmengine_http_streams_total{how="left"}' in metrics
    assert slow.chat("still there")[2]["choices"][0]["message"]["content"] == "STILL THERE"


@contextmanager
def paused(server, pause_s):
    """Set a step's duration to `pause_s` seconds until the context ends."""
    before, server.executor.pause_s = server.executor.pause_s, pause_s
    try:
        yield
    finally:
        server.executor.pause_s = before


def test_a_silent_stream_pings(slow):
    with paused(slow, 0.2):
        _, _, text = slow.chat("ab", stream=True)
    assert ": ping\n\n" in text and text.endswith("data: [DONE]\n\n")


def test_a_slow_reader_is_cut(slow, monkeypatch):
    from mmengine.server.chat.chat_frames import ChatFrames

    def wide(self, index, delta):
        return b": " + b"x" * 400_000 + b"\n\n"

    monkeypatch.setattr(ChatFrames, "delta", wide)
    connection = opened(slow)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    wait_for(lambda: 'how="slow reader"' in slow.call("/metrics")[2])
    wait_for(lambda: is_empty(slow))
    connection.close()


class Large:
    """A route with a large answer. `paces`: whether the server waits for the reader between writes, instead
    of buffering the whole answer.
    """

    BODY = bytes(8_000_000)

    def __init__(self, path, paces):
        self._path, self._paces, self.was_asked = path, paces, False
        if path is not None:
            path.write_bytes(self.BODY)

    async def __call__(self, request):
        self.was_asked = True
        if not self._paces:
            line = request.scope["extensions"][LINE]["line"]
            line.transport.set_write_buffer_limits(2 * len(self.BODY))
        return FileResponse(self._path) if self._path is not None else Response(self.BODY)


def asked_for(server, large, monkeypatch, headers=b""):
    monkeypatch.setitem(server.app._endpoints, ("GET", "/version"), large)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(b"GET /version HTTP/1.1\r\nhost: a\r\n" + headers + b"\r\n")
    return connection


@pytest.mark.parametrize("what", ["a file", "an answer", "one that was closed behind", "one closed, unpaced"])
def test_a_reader_that_stops_is_disconnected(slow, what, monkeypatch, tmp_path):
    large = Large(tmp_path / "file" if what == "a file" else None, "unpaced" not in what)
    headers = b"connection: close\r\n" if "closed" in what else b""
    with asked_for(slow, large, monkeypatch, headers):
        wait_for(lambda: large.was_asked and not slow.server.server_state.connections)


def test_a_slow_but_steady_reader_gets_everything(monkeypatch):
    """Reading the answer takes longer than slow_reader_s, which limits only the wait of each write."""
    with served(slow_reader_s=0.3) as one, asked_for(one, Large(None, True), monkeypatch) as connection:
        came = connection.makefile("rb")
        while came.readline() != b"\r\n":
            pass
        begun = time.monotonic()
        for _ in range(8):
            time.sleep(0.1)
            assert len(came.read(len(Large.BODY) // 8)) == len(Large.BODY) // 8
        assert time.monotonic() - begun > 2 * one.settings.slow_reader_s


def test_a_stream_error_is_an_event_without_details(caplog):
    class Broken(SlowEcho):
        def collect(self):
            found = super().collect()
            if self._steps > 5:
                raise RuntimeError("the device fell over")
            return found

    with served(executor_class=Broken) as one:
        events = one.events("hello there", request_id="mine")
        status, headers, whole = one.chat("hello there", request_id="other")
    assert "".join(json.loads(each)["choices"][0]["delta"]["content"] for each in events[:-2]) == "HELLO"
    error = json.loads(events[-2])["error"]
    assert error["message"] == "request mine failed; the server's log says why"
    assert error["type"] == "server_error"
    assert error["param"] is None and error["code"] == "request_failed" and events[-1] == "[DONE]"
    assert (status, headers["x-request-id"]) == (500, "other")
    assert whole["error"]["message"] == "request other failed; the server's log says why"
    told = [each for each in caplog.messages if "request failed" in each]
    assert len(told) == 2 and all("RuntimeError: the device fell over" in each for each in told)


def test_a_deadline_in_a_stream_is_an_event(slow):
    events = events_past_the_deadline(slow)
    assert len(events) > 2, "the answer had begun"
    assert json.loads(events[-2])["error"]["code"] == "deadline_exceeded" and events[-1] == "[DONE]"
