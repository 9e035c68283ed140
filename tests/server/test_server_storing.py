"""Tests stored responses: repeated and refused calls, deletion, kills, and a failing store."""

import asyncio
import base64
import gc
import http.client
import json
import threading
import time
import weakref
from contextlib import nullcontext

import openai
import pytest

from mmengine.errors import KeepFailed
from mmengine.events import vocabulary as ev
from mmengine.replay.checked_log import CheckedLog
from mmengine.request import SamplingParams
from mmengine.serve.stream.answer_record import AnswerRecord, RecordReader
from mmengine.serve.stream.request_stream import Stream
from mmengine.serve.stream.stored_answer import StoredAnswer, StoredChoice
from mmengine.serve.text.reasoning import NO_REASONING
from mmengine.server.calls import answer_writer as storing
from mmengine.server.calls.detached_call import DetachedCall
from tests.log_copies import copied
from tests.pictures import data_url
from tests.server.running import served, wait_for
from tests.server.test_server_reattach import Leaving
from tests.server.test_server_responses_kept import PATH, TEXT, begun, ended, events, going_on, look, text_of

PICTURE = {"type": "input_image", "image_url": data_url()}


def with_picture(text="what?"):
    return [{"role": "user", "content": [PICTURE, {"type": "input_text", "text": text}]}]


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log"


@pytest.fixture
def one(log):
    with served(executor_class=Leaving, engine_options={"log": log}, storage={"log": log}) as server:
        yield server


def in_store(server, what="SELECT id FROM responses"):
    """Return a query's rows from the store on the disk."""
    return asyncio.run(server.storage._database.read(lambda connection: connection.execute(what).fetchall()))


def unfinished(server):
    return in_store(server, "SELECT id FROM responses WHERE answer IS NULL")


class Store:
    """Makes a server's store fail and wait. While `fails` is true, the store refuses answers. New responses
    wait until `may_begin` is set.
    """

    def __init__(self, server, monkeypatch):
        self.fails, self.tries, self.may_begin = False, 0, threading.Event()
        self.may_begin.set()
        kept = server.storage.answers
        put_all, begin = kept.put_all, kept.begin

        async def put(made):
            self.tries += 1
            if self.fails:
                raise KeepFailed("the disk is full")
            await put_all(made)

        async def begun(*given):
            while not self.may_begin.is_set():
                await asyncio.sleep(0.005)
            await begin(*given)

        monkeypatch.setattr(kept, "put_all", put)
        monkeypatch.setattr(kept, "begin", begun)


def test_answers_that_end_together_share_a_write(one, monkeypatch):
    store = Store(one, monkeypatch)
    names = [one.call(PATH, {"input": f"a{number}"})[2]["id"] for number in range(8)]
    wait_for(lambda: len(in_store(one)) == 8)
    assert store.tries < 8 and all(look(one, name)[0] == 200 for name in names)


def test_a_stored_response_is_not_kept_in_memory(one, monkeypatch):
    made = []
    before = DetachedCall.__init__

    def init(self, *given):
        before(self, *given)
        made.append(weakref.ref(self))

    monkeypatch.setattr(DetachedCall, "__init__", init)
    gc.disable()  # The calls must be freed without the garbage collector.
    try:
        for number in range(5):
            one.call(PATH, {"input": f"a{number}", "stream": number % 2 == 0})
        wait_for(lambda: len(made) == 5 and not any(call() for call in made))
    finally:
        gc.enable()
    assert not one.app.calls._unread and not one.app.calls._num_unread


def test_a_calls_input_counts_in_the_stores_limit(one):
    """A call's input counts towards the limit for calls in memory that no client reads."""
    for number in range(3):
        call = {"input": [{"role": "user", "content": "x" * 100_000}, {"role": "user", "content": "a"}]}
        assert one.call(PATH, {**call, "request_id": f"large{number}"})[0] == 200
    wait_for(lambda: len(one.app.calls._unread) == 3)
    assert one.app.calls._num_unread > 3 * 100_000 / 256


def test_the_same_call_has_its_answer_from_the_store(log):
    body = {"input": "hi", "request_id": "mine"}
    with served(executor_class=Leaving, engine_options={"log": log}, storage={"log": log}) as server:
        first = server.call(PATH, body)[2]
    with going_on(log) as server:
        assert server.call(PATH, body)[2] == first
        computed = server.engine.stats().num_output_tokens
        status, _, other = server.call(PATH, {**body, "input": "other"})
        assert (status, other["error"]["code"]) == (422, "key_reused")
        assert look(server, "resp_mine")[2] == first
        assert server.engine.stats().num_output_tokens == computed == 0, "the answer was not computed again"


def test_one_id_with_two_keys_is_refused(one):
    body = {"input": TEXT, "background": True}
    first = one.call(PATH, body, {"Idempotency-Key": "a", "X-Request-Id": "x"})
    assert first[0] == 200
    assert one.call(PATH, body, {"Idempotency-Key": "a", "X-Request-Id": "y"})[2]["id"] == first[2]["id"]
    assert one.call(PATH, body, {"X-Request-Id": "x"})[2]["id"] == first[2]["id"]
    status, _, found = one.call(PATH, body, {"Idempotency-Key": "b", "X-Request-Id": "x"})
    assert (status, found["error"]["code"]) == (422, "key_reused")
    assert "Idempotency-Key" in found["error"]["message"]


@pytest.mark.parametrize("headers", [{"Idempotency-Key": "k"}, {"X-Request-Id": "x"}])
def test_a_concurrent_repeated_call_is_stored_once(one, monkeypatch, headers):
    store = Store(one, monkeypatch)
    store.may_begin.clear()
    found = []

    def ask():
        found.append(one.call(PATH, {"input": with_picture(TEXT)}, headers))

    callers = [threading.Thread(target=ask) for _ in range(3)]
    for caller in callers:
        caller.start()
    wait_for(lambda: one.app.admission.shares.num_open == 3 or len(found) == 2)
    store.may_begin.set()
    for caller in callers:
        caller.join()
    assert sorted(status for status, _, _ in found) == [200, 409, 409]
    wait_for(lambda: not unfinished(one))
    assert len(in_store(one)) == 1 and len(in_store(one, "SELECT sha FROM media")) == 1


def test_a_refused_response_leaves_no_row(one):
    for fields in ({"input": with_picture("bad")}, {"input": with_picture("a" * 9000)}):
        assert one.call(PATH, fields)[0] == 400
    wait_for(lambda: not in_store(one) and not in_store(one, "SELECT sha FROM media"))


def test_begun_but_unaccepted_responses_are_removed_at_startup(log, one):
    held = {"aa": b"bytes"}
    asyncio.run(one.storage.answers.begin("left", "", 1, b"{}", held))
    name = begun(one, input=with_picture(TEXT)).removeprefix("resp_")
    one.close()
    with going_on(log) as server:
        wait_for(lambda: ("left",) not in in_store(server))
        assert len(in_store(server, "SELECT sha FROM media")) == 1
        assert text_of(ended(server, f"resp_{name}")) == TEXT.upper()


def test_a_large_input_outlives_a_server_that_ends(log):
    text = "y" * 300_000
    items = [{"role": "user", "content": text}, {"role": "user", "content": TEXT}]
    with served(
        executor_class=Leaving, drain_s=0, engine_options={"log": log}, storage={"log": log}
    ) as server:
        name = begun(server, input=items)
    with going_on(log) as server:
        assert text_of(ended(server, name)) == TEXT.upper()
        wait_for(lambda: server.app.calls.response("", name.removeprefix("resp_")) is None)
        found = look(server, name, "/input_items?order=asc")[2]["data"]
        assert found[0]["content"][0]["text"] == text


def test_a_failing_store_is_retried(one, monkeypatch):
    monkeypatch.setattr(storing, "AGAIN_S", 0.05)
    monkeypatch.setattr(storing, "MAX_WAITING", 2)
    store = Store(one, monkeypatch)
    store.fails = True
    released, release = [], Stream.release
    monkeypatch.setattr(Stream, "release", lambda stream: released.append(stream) or release(stream))
    names = [one.call(PATH, {"input": "hi"})[2]["id"] for _ in range(2)]
    wait_for(lambda: store.tries >= 2)
    assert not released, "an answer is released in the log only when the store has it"
    status, headers, body = one.call(PATH, {"input": "hi"})
    assert status == 503 and "the disk is full" in body["error"]["message"], (
        "calls that would wait for the store are refused"
    )
    assert one.chat("hi")[0] == 200 and one.call(PATH, {"input": "hi", "store": False})[0] == 200
    assert [look(one, name)[2]["status"] for name in names] == ["completed"] * 2
    assert one.call(f"{PATH}/{names[0]}", method="DELETE")[0] == 200
    store.fails = False
    wait_for(lambda: in_store(one) == [(names[1].removeprefix("resp_"),)])
    assert one.call(PATH, {"input": "hi"})[0] == 200


def test_cancelled_and_deleted_responses_stay_so_after_a_kill(one, log, tmp_path):
    """The test copies the log and the store, as a kill would leave them."""
    cancelled, deleted = begun(one), begun(one)
    assert one.call(f"{PATH}/{cancelled}/cancel", {})[2]["status"] == "cancelled"
    assert one.call(f"{PATH}/{deleted}", method="DELETE")[0] == 200
    copy = copied(log, tmp_path / "copy")
    with going_on(copy) as server:
        assert look(server, cancelled)[2]["status"] == "cancelled"
        assert look(server, deleted)[0] == 404
        wait_for(lambda: not server.engine.recovered_requests())
        assert look(server, deleted)[0] == 404


def test_deletion_before_storage_survives_a_kill(one, log, tmp_path):
    for number in range(5):
        name = one.call(PATH, {"input": "hi"})[2]["id"]
        assert one.call(f"{PATH}/{name}", method="DELETE")[0] == 200
        copied(log, tmp_path / f"copy{number}")
    for number in range(5):
        events = [record.event for record in CheckedLog(tmp_path / f"copy{number}")]
        counts = [sum(isinstance(event, kind) for event in events) for kind in (ev.Queued, ev.Delivered)]
        assert counts == [number + 1] * 2


@pytest.mark.parametrize("headers", [{"Idempotency-Key": "k"}, {"X-Request-Id": "x"}])
def test_a_key_finds_a_running_background_response(one, headers):
    one.app.calls._reattach_s, one.executor.pause_s = 0.05, 0.02
    body = {"input": TEXT, "background": True}
    first = one.call(PATH, body, headers)[2]
    time.sleep(0.3)
    assert one.call(PATH, body, headers)[2]["id"] == first["id"]
    assert one.engine.stats().num_running == 1


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_repeated_read_gets_the_whole_response(one, log, goes_on):
    """The server keeps an answer while it is read, even if the read takes longer than reattach_s."""
    connection = http.client.HTTPConnection("127.0.0.1", one.port, timeout=20)
    connection.request("POST", PATH, json.dumps({"input": TEXT, "stream": True, "request_id": "slow"}))
    connection.getresponse().readline()
    if goes_on:
        one.close()
    connection.close()
    with going_on(log, reattach_s=0.3) if goes_on else nullcontext(one) as server:
        server.app.calls._reattach_s = 0.3
        server.executor.pause_s = 0.02
        wait_for(lambda: all(not call.is_live for call in server.app.calls.detached_calls()))
        assert '"type":"response.completed"' in events(server, "resp_slow")


@pytest.mark.parametrize("scores", [False, True])
def test_a_long_answer_is_read_in_parts(scores):
    """Rendering a long answer in a single call would block other clients."""
    tokens = list(range(5000))
    logprobs = [((token, -1.0),) for token in tokens] if scores else None
    sampling, asked = SamplingParams(max_tokens=5000), ("a", NO_REASONING, None, {}, 3)
    said = [StoredChoice(0, tokens, "stop", "eos", logprobs), StoredChoice(1, [7], "length")]
    reader, found = RecordReader(AnswerRecord(StoredAnswer(asked[0], sampling, *asked[1:], said))), []
    while not reader.is_over:
        some = reader.take()
        assert sum(len(output.token_ids) for output in some) < 256
        found += some
    first = [output for output in found if output.index == 0]
    assert [token for output in first for token in output.token_ids] == tokens
    assert [(output.finish_reason, output.detail) for output in first if output.finish_reason] == [
        ("stop", "eos")
    ]
    assert first[-1].finish_reason and found[-1].completion is reader.completion
    if scores:
        assert [entry for output in first for entry in output.logprobs] == logprobs


def test_deleting_a_response_deletes_its_images(one, log):
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{one.port}/v1", api_key="none", max_retries=0)
    file = client.files.create(file=("a.png", b"of an upload"), purpose="vision")
    parts = [PICTURE, {"type": "input_image", "file_id": file.id}, {"type": "input_text", "text": "a"}]
    first = one.call(PATH, {"input": [{"role": "user", "content": parts}]})[2]["id"]
    wait_for(lambda: not one.app.calls.detached_calls())
    one.close()
    with going_on(log) as server:
        second = server.call(PATH, {"input": "more", "previous_response_id": first})[2]
        assert text_of(second) == "MORE"
        told = look(server, first, "/input_items")[2]["data"][0]["content"]
        assert told[0]["image_url"].startswith("sha256:") and told[1]["file_id"] == file.id
        ((data,),) = in_store(server, "SELECT data FROM media")
        assert PICTURE["image_url"].endswith(base64.b64encode(data).decode())
        assert server.call(f"{PATH}/{first}", method="DELETE")[0] == 200
        assert look(server, second["id"])[0] == 200, "the response that continues it is not deleted"
        assert not in_store(server, "SELECT sha FROM media")
        assert server.call(f"{PATH}/{second['id']}", method="DELETE")[0] == 200
        for path in (log / "store").glob("answers.db*"):
            assert data[100:164] not in path.read_bytes(), path
