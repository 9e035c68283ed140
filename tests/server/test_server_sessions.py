"""Tests of /v1/sessions: open, append, ask and close; owners, limits, refusals, and repeated calls."""

import base64
import io
import json
import socket
import threading

import pytest
from PIL import Image

from mmengine.core.resume import Resume
from mmengine.errors import InvalidMedia
from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.server.sessions import registry as open_sessions
from tests.serve.serve_fakes import TurnEcho, builder
from tests.server.batching import client_of
from tests.server.openai_answers import events_of
from tests.server.running import SlowEcho, served, wait_for

KEYS = {"authorization": "Bearer one"}, {"authorization": "Bearer two"}


def url(colour="red"):
    data = io.BytesIO()
    Image.new("RGB", (32, 32), colour).save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


class Looking(TurnEcho):
    """A processor that checks frames and uploaded images."""

    def prepare_turn(self, content, **options):
        for part in content:
            assert part.get("type") != "image_url" or isinstance(part["image_url"]["url"], bytes)
            frames = part["video"][0] if part.get("type") == "video" else []
            if not all(frame.startswith("data:image/png") for frame in frames):
                raise InvalidMedia("a frame is no image")
        return super().prepare_turn(content, **options)


class Slower(SlowEcho):
    pause_s = 0.05


def echo(log=None, resume=None, executor_class=SlowEcho, **config):
    build = builder(executor_class=executor_class, processor=Looking(), **config)
    options = {} if log is None else {"log": log, "resume": resume}
    return AsyncEngine(builder=build, **options)


@pytest.fixture(scope="module")
def server():
    with served(echo()) as one:
        yield one


class Sessions:
    """A session on a server. Calling the object with `way` sends a request to the session's route `way`."""

    def __init__(self, server, body=None, headers=None):
        self.server, self.headers = server, headers
        status, _, self.opened = server.call("/v1/sessions", body or {}, headers)
        assert status == 200, self.opened
        self.path = f"/v1/sessions/{self.opened['id']}"

    def __call__(self, way="", body=None, method=None):
        return self.server.call(f"{self.path}/{way}" if way else self.path, body, self.headers, method)

    def ask(self, content, **fields):
        return self("ask", {"content": content, "max_tokens": 30, "temperature": 0, **fields})


def said_in(text):
    """Return the text of a stream."""
    events = [json.loads(event) for event in events_of(text)[:-1]]
    return "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"])


def test_a_session_appends_and_answers(server):
    one = Sessions(server, {"system": "s", "anchor": "ab"})
    assert one.opened["tokens"] == 4 and one.opened["requests"] == 1 and one.opened["model"] == "echo"
    status, _, told = one("append", {"content": [{"type": "text", "text": "cd"}]})
    assert (status, told["tokens"], told["requests"]) == (200, 6, 2)
    status, _, told = one("frame", {"image": url(), "seconds": 1.0})
    assert (status, told["frames_held"], told["requests"]) == (200, 1, 2)
    status, _, told = one("frame", {"image": url("blue"), "seconds": 1.5})
    assert (status, told["frames_held"], told["requests"], told["tokens"]) == (200, 0, 3, 7)
    status, headers, answer = one.ask("q")
    assert status == 200 and answer["choices"][0]["message"]["content"] == "S<ABCDFQ>"
    assert answer["usage"]["prompt_tokens"] == 9 and "x-request-id" in headers
    status, _, text = one.ask("r", stream=True, stream_options={"include_usage": True})
    assert status == 200
    assert said_in(text) == "S<ABCDFQ>S<ABCDFQ>><R>"
    assert one()[2]["requests"] == 5
    assert one(method="DELETE")[2]["deleted"] and one()[0] == 404
    assert one.ask("s")[2]["error"]["code"] == "session_not_found"


def test_repeated_calls_change_nothing(server):
    one = Sessions(server)
    assert one("append", {"content": "ab", "index": 0})[2]["tokens"] == 3
    assert one("append", {"content": "ab", "index": 0})[2]["tokens"] == 3
    first = one.ask("q", index=1)[2]["choices"]
    assert one.ask("q", index=1)[2]["choices"] == first
    assert said_in(one.ask("q", index=1, stream=True)[2]) == "<ABQ>"
    status, _, told = one("append", {"content": "x", "index": 7})
    assert (status, told["error"]["code"]) == (409, "session_index")
    assert one("append", {"content": "x", "index": 0})[0] == 409
    assert one()[2]["requests"] == 2


def test_a_repeated_question_has_the_same_answer():
    with served(echo(reasoning_start="<", reasoning_end="Q")) as server:
        one = Sessions(server)
        one("append", {"content": "ab"})
        for index, fields in enumerate(
            (
                {},
                {"stop": ["R"]},
                {"max_tokens": 4},
                {"response_format": {"type": "json_object"}, "max_tokens": 12},
                {"include_reasoning": False, "stop": "B"},
            ),
            1,
        ):
            first, again = (one.ask("qr", index=index, **fields)[2] for _ in range(2))
            assert again["choices"] == first["choices"] and again["usage"] == first["usage"]
            assert fields.get("stop") != ["R"] or first["choices"][0]["stop_reason"] == "R"
            assert index > 1 or first["choices"][0]["message"]["reasoning_content"] == "AB"
        one.ask("q", index=6, logprobs=True)
        status, _, told = one.ask("q", index=6, logprobs=True)
        assert status == 409 and "logprobs" in told["error"]["message"]
        form = {"type": "json_object", "field_confidence": True}
        status, _, told = one.ask("q", index=6, response_format=form)
        assert status == 409 and "field_confidence" in told["error"]["message"]
        assert one.ask("q", index=6)[0] == 200 and one()[2]["requests"] == 7


def test_a_repeated_question_has_the_same_answer_after_a_crash(tmp_path):
    folder = tmp_path / "log"
    marks = {"reasoning_start": "<", "reasoning_end": "Q"}
    asked = {"stop": ["R"]}, {"max_tokens": 4}, {}, {"response_format": {"type": "json_object"}}
    answers = []
    with served(echo(folder, **marks)) as server:
        many = [Sessions(server) for _ in asked]
        for one, fields in zip(many, asked, strict=True):
            answers.append(one.ask("qr", index=0, **fields)[2]["choices"])
        cut = Sessions(server)
        cut.ask("qr", index=0, response_format={"type": "json_object"}, max_tokens=3)
    with served(echo(folder, Resume(), **marks)) as server:
        for one, fields, answer in zip((*many, cut), (*asked, None), (*answers, None), strict=True):
            one.server = server
            if answer is not None:
                assert one.ask("qr", index=0, **fields)[2]["choices"] == answer
        status, _, told = cut.ask("qr", index=0, response_format={"type": "json_object"}, max_tokens=3)
        assert status == 409 and "the server restarted" in told["error"]["message"]


def test_session_fields_are_refused_in_questions(server):
    one, function = Sessions(server), {"type": "function", "function": {"name": "f"}}
    for name, value, nothing in (
        ("messages", [], None),
        ("n", 2, 1),
        ("tools", [function], []),
        ("tool_choice", "auto", "none"),
        ("chat_template_kwargs", {"enable_thinking": False}, {}),
        ("mm_processor_kwargs", {"max_pixels": 1024}, {}),
        ("continue_final_message", True, False),
        ("add_generation_prompt", False, True),
        ("cache_salt", "x", ""),
        ("request_id", "abc", ""),
    ):
        status, _, told = one.ask("q", **{name: value})
        assert (status, told["error"]["param"]) == (400, name)
        assert one.ask("q", max_tokens=1, **{name: nothing})[0] == 200


def test_uploaded_images_are_taken(tmp_path):
    image = base64.b64decode(url().partition(",")[2])
    with served(echo(tmp_path / "log"), storage={"log": tmp_path / "log"}) as server:
        file = client_of(server).files.create(file=("a.png", image), purpose="vision")
        part = {"type": "file", "file": {"file_id": file.id}}
        by_url = {"type": "image_url", "image_url": {"url": file.id}}
        one = Sessions(server, {"anchor": [part]})
        assert one("append", {"content": [by_url, part], "index": 1})[2]["tokens"] == 4
        status, _, answer = one.ask([{"type": "text", "text": "q"}, part])
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "<FFFQF>")
        missing = {"type": "file", "file": {"file_id": "file-" + "0" * 24}}
        told = one("append", {"content": [missing]})[2]
        assert told["error"]["code"] == "file_not_found"
        assert not server.app.admission.bodies.num_bytes


def test_an_invalid_frame_is_refused_at_once(server):
    one = Sessions(server)
    assert one("frame", {"image": "data:text/plain,none", "seconds": 0})[0] == 400
    assert [one("frame", {"image": url(), "seconds": second})[0] for second in (1, 2, 3)] == [200] * 3
    assert one("frame", {"image": "data:text/plain,none", "seconds": 4})[0] == 400
    assert one()[2]["frames_held"] == 1
    assert one.ask("q")[2]["choices"][0]["message"]["content"] == "<FFQ>"


def test_a_failed_question_keeps_the_frame():
    with served(echo(executor_class=Slower)) as server:
        one = Sessions(server)
        one("frame", {"image": url(), "seconds": 0})
        assert one.ask("bad")[0] == 400 and one.ask("q", n=2)[0] == 400
        assert one.ask("q" * 50, max_tokens=80, deadline_s=0.02)[0] == 504
        assert one.ask("bad", stream=True)[0] == 400
        body = json.dumps({"content": "q" * 50, "stream": True, "max_tokens": 80}).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as line:
            head = f"POST {one.path}/ask HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n"
            line.sendall(head.encode() + body)
            assert line.recv(100).startswith(b"HTTP/1.1 200")
        assert one("append", {"content": "x"})[2]["requests"] == 1
        told = one()[2]
        assert (told["frames_held"], told["tokens"]) == (0, 3)
        assert one.ask("q", max_tokens=4)[2]["choices"][0]["message"]["content"] == "<FXQ"


def test_a_repeated_waiting_frame_is_not_paired_with_itself(server):
    one, frame = Sessions(server), {"image": url(), "seconds": 1.0, "index": 0}
    for _ in range(3):
        told = one("frame", frame)[2]
        assert (told["requests"], told["frames_held"]) == (0, 1)
    told = one("frame", {**frame, "seconds": 2.0})[2]
    assert (told["requests"], told["frames_held"]) == (1, 0)
    for again in (frame, {**frame, "seconds": 2.0}):
        told = one("frame", again)[2]
        assert (told["requests"], told["frames_held"]) == (1, 0)
    one("frame", {"image": url(), "seconds": 3.0})
    assert one("frame", {"image": url(), "seconds": 3.0})[2]["frames_held"] == 0, (
        "frames without an index are not recognised as repeated"
    )


def test_invalid_session_calls_are_refused(server):
    one = Sessions(server)
    for way, body, param in (
        ("append", {"content": "a", "zzz": 1}, None),
        ("append", {}, None),
        ("append", {"content": [{"type": "image_url", "image_url": {"url": "http://a/b"}}]}, None),
        ("frame", {"image": "/etc/passwd", "seconds": 1}, "image"),
        ("frame", {"image": url(), "seconds": -1}, "seconds"),
        ("ask", {"question": "a"}, "content"),
        ("ask", {"content": None}, "content"),
        ("ask", {"content": ["a"]}, "content[0]"),
        ("ask", {"content": "a", "messages": []}, "messages"),
        ("ask", {"content": "a", "n": 2}, None),
        ("ask", {"content": "a", "zzz": 2}, "zzz"),
        ("append", {"content": "bad"}, None),
    ):
        status, _, told = one(way, body)
        assert status == 400, (way, body, told)
        assert param is None or told["error"]["param"] == param
    assert one()[2]["tokens"] == 0
    assert server.call("/v1/sessions", {"length": 10**9})[0] == 400
    for idle_s in (0, -1, 1e-10, 0.09):
        assert server.call("/v1/sessions", {"idle_s": idle_s})[0] == 400, (
            "such times are refused, since they could round to 0, which means never"
        )
    assert server.call("/v1/sessions", {"chat_template_kwargs": {"a": [2**64]}})[0] == 400
    assert server.call("/v1/sessions", {"model": "other"})[0] == 404
    assert server.call("/v1/sessions/nobody/ask", {"content": "a"})[0] == 404
    assert one("append", None, "PUT")[0] == 405


def test_too_many_waiting_calls_are_refused(server):
    one, found = Sessions(server), []
    threads = [
        threading.Thread(target=lambda: found.append(one.ask("q" * 20, max_tokens=5)[0])) for _ in range(24)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {200, 409}


def test_a_session_belongs_to_its_key(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    with served(echo(max_sessions=4), key_file=keys) as server:
        mine = [Sessions(server, headers=KEYS[0]) for _ in range(2)]
        other = Sessions(server, headers=KEYS[1])
        assert server.call(mine[0].path, headers=KEYS[1])[0] == 404
        assert [each["id"] for each in server.call("/v1/sessions", headers=KEYS[1])[2]["data"]] == [
            other.opened["id"]
        ]
        status, _, told = server.call("/v1/sessions", {}, KEYS[0])
        assert (status, told["error"]["code"]) == (429, "key_share_full")


def test_a_keys_share_holds_for_calls_at_once(tmp_path):
    """The limit also applies to calls that arrive before the engine has opened a session."""
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    with served(echo(max_sessions=8, executor_class=Slower), key_file=keys) as server:
        busy = {"messages": [{"role": "user", "content": "a" * 80}], "max_tokens": 12}
        threads = [threading.Thread(target=server.call, args=("/v1/chat/completions", busy, KEYS[1]))]
        threads[0].start()
        wait_for(lambda: server.engine.stats().num_running)
        found = []
        for _ in range(12):
            call = threading.Thread(target=lambda: found.append(server.call("/v1/sessions", {}, KEYS[0])[0]))
            call.start()
            threads.append(call)
        for thread in threads:
            thread.join()
        assert sorted(found) == [200] * 4 + [429] * 8
        assert server.call("/v1/sessions", {}, KEYS[1])[0] == 200
        assert not server.app._sessions._turns


def test_the_number_of_sessions_is_bounded():
    with served(echo(max_sessions=1)) as server:
        Sessions(server)
        assert server.call("/v1/sessions", {})[2]["error"]["code"] == "queue_full"


def test_closing_a_session_releases_its_memory(monkeypatch):
    monkeypatch.setattr(open_sessions, "FORGET_EVERY_S", 0.02)
    with served(echo()) as server:
        known = server.app._sessions._open
        assert server.call("/v1/sessions", {"anchor": "bad"})[0] == 400 and not known
        for _ in range(3):
            Sessions(server, {"idle_s": 0.3})("frame", {"image": url(), "seconds": 0})
        other = Sessions(server)
        wait_for(lambda: len(known) == 1)
        assert other("append", {"content": "a"})[0] == 200


def waiting(letters=400):
    return {"image": "data:image/png" + "x" * letters, "seconds": 0}


def test_frames_that_wait_have_a_limit():
    with served(echo(session_media_bytes=0), max_body_bytes=1024) as server:
        one, two, three = (Sessions(server) for _ in range(3))
        assert one("frame", waiting())[0] == two("frame", waiting())[0] == 200
        status, _, told = three("frame", waiting())
        assert (status, told["error"]["code"]) == (429, "queue_full")
        assert three()[2]["frames_held"] == 0
        assert one("frame", waiting())[2]["frames_held"] == 0, "both frames of the pair have arrived"
        assert three("frame", waiting())[0] == 200
        two(method="DELETE")
        assert one("frame", waiting())[0] == 200


def test_waiting_frames_are_limited_by_key(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    with served(echo(session_media_bytes=0), key_file=keys, max_body_bytes=1024) as server:
        one, two, other = (Sessions(server, headers=KEYS[which]) for which in (0, 0, 1))
        assert one("frame", waiting())[0] == 200
        status, _, told = two("frame", waiting())
        assert (status, told["error"]["code"]) == (429, "key_share_full")
        assert other("frame", waiting())[0] == 200


def test_sessions_outlive_a_server(tmp_path):
    with served(echo(tmp_path / "log")) as server:
        one = Sessions(server, {"system": "s"})
        assert one("append", {"content": "abc"})[0] == 200
        answer = one.ask("q", index=1)[2]["choices"]
    with served(echo(tmp_path / "log", Resume())) as server:
        one.server = server
        told = one()[2]
        assert told["requests"] == 2 and told["created"] == one.opened["created"]
        assert one.ask("q", index=1)[2]["choices"] == answer
        assert one.ask("r")[2]["choices"][0]["message"]["content"].endswith("><R>")


def test_sessions_are_refused_with_several_replicas(server):
    class Elsewhere:
        """An engine without sessions, like an engine whose replicas are other processes."""

        def __init__(self, engine):
            self._inner = engine

        def __getattr__(self, name):
            if name == "attach_session":
                raise AttributeError(name)
            return getattr(self._inner, name)

    engine = echo()
    with served(Elsewhere(engine)) as other:
        assert other.call("/v1/sessions", {})[2]["error"]["code"] == "no_sessions"
