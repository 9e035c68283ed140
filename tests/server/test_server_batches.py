"""Tests of /v1/files and /v1/batches with OpenAI's client."""

import asyncio
import json
import time

import openai
import pytest

from mmengine import AsyncEngine
from mmengine.cli.serve_checks import EMBEDDED_NAME
from mmengine.core.resume import Resume
from mmengine.events import vocabulary as ev
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.queries.request_names import find_requests
from tests.pictures import data_url, scene
from tests.project.doc_blocks import blocks
from tests.server.batching import CHAT, batching, begun, client_of, ended, line, lines_in
from tests.server.responses_answers import check_response
from tests.server.running import LONG_CONTEXT, Lasting, served, wait_for


def test_a_batch_from_its_file_to_its_answers(tmp_path):
    with batching(tmp_path / "log") as (_, client):
        texts = {f"row {number}": "x" * (number % 7 + 1) for number in range(15)}
        lines = [line(name, text) for name, text in texts.items()]
        batch = begun(client, [lines[0], b"", *lines[1:]], metadata={"of": "me"})
        assert batch.object == "batch" and batch.status == "validating" and batch.metadata == {"of": "me"}
        assert batch.expires_at == batch.created_at + 86400
        found = ended(client, batch)
        assert found.status == "completed", found
        counts = found.request_counts
        assert (counts.total, counts.completed, counts.failed) == (15, 15, 0)
        assert found.error_file_id is None and found.completed_at >= found.in_progress_at >= found.created_at
        answers = lines_in(client, found.output_file_id)
        assert sorted(each["custom_id"] for each in answers) == sorted(texts)
        for each in answers:
            assert each["error"] is None and each["response"]["status_code"] == 200
            body = each["response"]["body"]
            asked = client.chat.completions.create(
                model="echo", messages=[{"role": "user", "content": texts[each["custom_id"]]}]
            )
            assert body["choices"][0]["message"]["content"] == asked.choices[0].message.content
            assert body["object"] == "chat.completion" and body["usage"]["completion_tokens"]
        stored = client.files.retrieve(found.output_file_id)
        content = client.files.content(stored.id).read()
        assert stored.purpose == "batch_output" and stored.bytes == len(content)
        assert [each.id for each in client.batches.list()] == [batch.id]
    assert find_requests(tmp_path / "log", "row 0") == [f"{batch.id}-1"]


def test_the_error_file_holds_failed_requests(tmp_path):
    with batching(tmp_path / "log") as (server, client):
        lines = [
            line("good", max_tokens=3, logprobs=True, n=2),
            line("temperature", temperature=-1),
            line("unknown", guided_json={}),
            line("streams", stream=True),
            line("media", "bad"),
            line("model", model="another"),
            line("file", [{"type": "image_url", "image_url": {"url": f"file-{'0' * 24}"}}]),
        ]
        found = ended(client, begun(client, lines))
        counts = found.request_counts
        assert found.status == "completed" and (counts.total, counts.completed, counts.failed) == (7, 1, 6)
        (good,) = lines_in(client, found.output_file_id)
        assert len(good["response"]["body"]["choices"]) == 2
        errors = {each["custom_id"]: each["response"] for each in lines_in(client, found.error_file_id)}
        statuses = {name: each["status_code"] for name, each in errors.items()}
        assert statuses == {
            "temperature": 400,
            "unknown": 400,
            "streams": 400,
            "media": 400,
            "model": 404,
            "file": 404,
        }
        params = {name: each["body"]["error"]["param"] for name, each in errors.items()}
        assert params["temperature"] == "temperature" and params["streams"] == "stream"
        assert params["file"] == "messages[0].content[0].image_url"
        assert not server.engine._open and not server.engine.recovered_requests()
        told = server.call("/metrics")[2].splitlines()
        kept = sum(path.stat().st_size for path in server.storage.files.folder.iterdir())
        for line_of in (
            'mmengine_batch_lines_total{outcome="completed"} 1.0',
            'mmengine_batch_lines_total{outcome="failed"} 6.0',
            "mmengine_batches_live 0.0",
            f'mmengine_kept_bytes{{what="files"}} {float(kept)}',
        ):
            assert line_of in told


def test_invalid_lines_fail_the_batch_with_all_errors(tmp_path):
    with batching(tmp_path / "log", max_batch_lines=150) as (_, client):
        wrong = [
            line("a"),
            b"no json",
            line("a"),
            b'{"custom_id": "b", "url": "/v1/chat/completions", "body": {}}',
            line("c", url="/v1/completions"),
            b'{"custom_id": 5, "method": "POST", "url": "/v1/chat/completions", "body": {}}',
            b'{"custom_id": "d", "method": "GET", "url": "/v1/chat/completions", "body": {}}',
            b'{"custom_id": "e", "method": "POST", "url": "/v1/chat/completions", "body": []}',
            b'{"custom_id": "f", "method": "POST", "url": "/v1/chat/completions", "body": {}, "more": 1}',
            b"\xff{}",
        ]
        found = ended(client, begun(client, wrong))
        assert found.status == "failed" and found.failed_at and found.output_file_id is None
        told = {each.line: each.code for each in found.errors.data}
        assert told == {
            2: "invalid_json_line",
            3: "duplicate_custom_id",
            4: "missing_required_parameter",
            5: "mismatched_url",
            6: "invalid_custom_id",
            7: "invalid_method",
            8: "invalid_body",
            9: "unknown_parameter",
            10: "invalid_json_line",
        }
        long = "data:image/png;base64," + "A" * 40_000  # The custom_id looks like a data: URL.
        (error,) = ended(client, begun(client, [line(long)])).errors.data
        assert error.code == "invalid_custom_id"
        many = ended(client, begun(client, [b"{}"] * 140))
        assert many.status == "failed" and len(many.errors.data) == 100
        for lines, code in (([b"", b" "], "empty_file"), ([line("a")] * 151, "too_many_requests")):
            (error,) = ended(client, begun(client, lines)).errors.data
            assert error.code == code and error.line is None


def test_invalid_batches_are_refused(tmp_path):
    with batching(tmp_path / "log") as (_, client):
        images = client.files.create(file=("a.png", b"png"), purpose="vision")
        good = client.files.create(file=("a.jsonl", line("a")), purpose="batch")
        for asked, param in (
            ({"input_file_id": "file-none"}, "input_file_id"),
            ({"input_file_id": images.id}, "input_file_id"),
            ({"endpoint": "/v1/images"}, "endpoint"),
            ({"completion_window": "a day"}, "completion_window"),
            ({"completion_window": "15d"}, "completion_window"),
            ({"metadata": {"a": "b" * 513}}, "metadata[]"),
            ({"extra_body": {"unknown": 1}}, None),
        ):
            fields = {"input_file_id": good.id, "endpoint": CHAT, "completion_window": "24h", **asked}
            with pytest.raises(openai.APIStatusError) as refused:
                client.batches.create(**fields)
            assert refused.value.status_code in (400, 404) and refused.value.param == param, asked
        assert list(client.batches.list()) == []


def test_a_repeated_call_returns_the_same_batch(tmp_path):
    """The call is recognised by its Idempotency-Key or by the client's retry header, also after a restart of
    the server.
    """
    with batching(tmp_path / "log") as (_, client):
        file = client.files.create(file=("a.jsonl", line("a")), purpose="batch")
        asked = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "1h"}

        def create(**headers):
            return client.batches.create(**asked, extra_headers=headers).id

        first = create()
        assert create() != first  # Without a key and a retry header, the call is a new one.
        keyed = create(**{"Idempotency-Key": "k"})
        assert create(**{"Idempotency-Key": "k"}) == keyed != create(**{"Idempotency-Key": "l"})
        again = create(**{"x-stainless-retry-count": "1"})
        assert again in {each.id for each in client.batches.list()} - {first, keyed}
        asked["completion_window"] = "2h"
        with pytest.raises(openai.UnprocessableEntityError):
            create(**{"Idempotency-Key": "k"})
        assert create(**{"x-stainless-retry-count": "1"}) != again
        asked["completion_window"] = "1h"
    resume = {"engine_options": {"resume": Resume()}}
    with batching(tmp_path / "log", **resume) as (_, client):
        assert create(**{"Idempotency-Key": "k"}) == keyed
        assert create(**{"x-stainless-retry-count": "1"}) == again


def test_completions_and_responses_are_batches_too(tmp_path):
    def rows(url, *bodies):
        made = [
            {"custom_id": f"{n}", "method": "POST", "url": url, "body": body} for n, body in enumerate(bodies)
        ]
        return [json.dumps(each).encode() for each in made]

    def answers_of(url, *bodies):
        found = ended(client, begun(client, rows(url, *bodies), url))
        assert found.status == "completed"
        good, bad = lines_in(client, found.output_file_id), lines_in(client, found.error_file_id)
        return {each["custom_id"]: each["response"]["body"] for each in good + bad}

    with batching(tmp_path / "log") as (_, client):
        said = answers_of("/v1/completions", {"prompt": "ab"}, {"prompt": ["ab", "c"] * 2})
        assert [each["text"] for each in said["1"]["choices"]] == ["AB", "C"] * 2
        assert said["0"]["object"] == "text_completion"
        said = answers_of("/v1/responses", {"input": "hello"}, {"input": "a", "request_id": "mine"})
        check_response(200, said["0"])
        assert said["0"]["output"][0]["content"][0]["text"] == "HELLO"
        assert said["1"]["error"]["param"] == "request_id"


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """A server with the included model."""
    log = tmp_path_factory.mktemp("shapes") / "log"
    with served(AsyncEngine(log=log), names=(EMBEDDED_NAME,), storage={"log": log}) as one:
        yield one


def test_an_image_by_the_id_of_its_file_is_the_same_as_its_data(shapes):
    picture = scene()
    asked = {"max_tokens": 12, "temperature": 0}

    def content(part):
        return [part, {"type": "text", "text": "Which shapes are there?"}]

    with client_of(shapes) as client:
        file = client.files.create(file=("scene.png", picture), purpose="vision")
        data = data_url(picture)
        parts = {
            "data": {"type": "image_url", "image_url": {"url": data}},
            "url": {"type": "image_url", "image_url": {"url": file.id, "detail": "high"}},
            "file": {"type": "file", "file": {"file_id": file.id}},
        }
        said = {
            name: client.chat.completions.create(
                model=EMBEDDED_NAME, messages=[{"role": "user", "content": content(part)}], **asked
            )
            for name, part in parts.items()
        }
        texts = {each.choices[0].message.content for each in said.values()}
        assert len(texts) == 1 and len({each.usage.prompt_tokens for each in said.values()}) == 1
        found = ended(
            client, begun(client, [line(name, content(part), **asked) for name, part in parts.items()])
        )
        assert found.request_counts.completed == 3, lines_in(client, found.error_file_id)
        bodies = [each["response"]["body"] for each in lines_in(client, found.output_file_id)]
        assert {each["choices"][0]["message"]["content"] for each in bodies} == texts
        image = {"type": "input_image", "file_id": file.id, "detail": "high"}
        parts = [
            {"role": "user", "content": [image, {"type": "input_text", "text": "Which shapes are there?"}]}
        ]
        response = client.responses.create(
            model=EMBEDDED_NAME, input=parts, max_output_tokens=16, temperature=0
        )
        assert response.output_text.startswith(texts.pop())
        image["file_id"] = f"file-{'0' * 24}"
        with pytest.raises(openai.NotFoundError) as refused:
            client.responses.create(model=EMBEDDED_NAME, input=parts)
        assert refused.value.param.startswith("input[0].content[0]")
        log = client.files.create(file=("a.jsonl", b"{}"), purpose="batch")
        for wrong, status in ((log.id, 400), (f"file-{'0' * 24}", 404)):
            part = {"type": "file", "file": {"file_id": wrong}}
            with pytest.raises(openai.APIStatusError) as refused:
                client.chat.completions.create(
                    model=EMBEDDED_NAME, messages=[{"role": "user", "content": [part]}]
                )
            assert refused.value.status_code == status and "messages[0].content[0]" in refused.value.param
        named = {"type": "image_url", "image_url": {"url": file.id}}
        assert shapes.call("/tokenize", {"messages": [{"role": "user", "content": [named]}]})[0] == 400


def test_a_cancelled_batch_keeps_its_answers(tmp_path):
    with batching(tmp_path / "log", executor_class=Lasting, config=LONG_CONTEXT) as (server, client):
        batch = begun(client, [line("short"), *(line(f"long {n}", "a" * 60) for n in range(8))])
        wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed == 1)
        found = client.batches.cancel(batch.id)
        assert found.status in ("cancelling", "cancelled") and found.cancelling_at
        found = ended(client, batch)
        assert found.status == "cancelled" and found.cancelled_at and found.error_file_id is None
        assert [each["custom_id"] for each in lines_in(client, found.output_file_id)] == ["short"]
        # Cancelling a cancelled batch has no effect.
        assert client.batches.cancel(batch.id).status == "cancelled"
        wait_for(lambda: not server.engine.stats().num_running and not server.engine._open)
        whole = ended(client, begun(client, [line("a")]))
        with pytest.raises(openai.ConflictError, match="completed"):
            client.batches.cancel(whole.id)


def test_a_batch_can_be_cancelled_while_it_begins(tmp_path, monkeypatch):
    options = {"executor_class": Lasting, "config": LONG_CONTEXT}
    with batching(tmp_path / "log", **options) as (server, client):
        runner, batches = server.app._runner, server.storage.batches
        begin, save = runner._begin, batches.save

        async def saved(batch):
            if batch.status == "cancelling":  # The batch's run starts while the cancellation is being saved.
                monkeypatch.setattr(runner, "_begin", begin)
                runner._woken.set()
                await asyncio.sleep(0.3)
            await save(batch)

        monkeypatch.setattr(runner, "_begin", lambda: None)
        monkeypatch.setattr(batches, "save", saved)
        batch = begun(client, [line("long", "a" * 60)])
        assert client.batches.cancel(batch.id).status == "cancelling"
        found = ended(client, batch, seconds=3)
        assert found.status == "cancelled" and not found.in_progress_at


def test_expired_lines_are_reported(tmp_path):
    now = [1_000_000.0]
    clock = {"storage": {"clock": lambda: now[0]}}
    with batching(tmp_path / "log", executor_class=Lasting, config=LONG_CONTEXT, **clock) as (_, client):
        batch = begun(client, [line("short"), line("long", "a" * 60)], completion_window="90s")
        assert batch.expires_at == 1_000_090
        wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed == 1)
        now[0] -= 500  # Setting the clock back does not expire the batch.
        time.sleep(0.6)
        assert client.batches.retrieve(batch.id).status == "in_progress"
        now[0] += 590
        found = ended(client, batch)
        assert found.status == "expired" and found.expired_at == 1_000_090
        assert (found.request_counts.completed, found.request_counts.failed) == (1, 1)
        (late,) = lines_in(client, found.error_file_id)
        assert late["custom_id"] == "long" and late["response"] is None
        assert late["error"]["code"] == "batch_expired"
        assert [each["custom_id"] for each in lines_in(client, found.output_file_id)] == ["short"]


def test_calls_have_priority_over_batches(tmp_path):
    """A batch leaves a row free (max_num_seqs is 4), and its requests have a lower priority than calls."""
    config = {**LONG_CONTEXT, "max_num_seqs": 4, "policy": "priority"}
    with batching(tmp_path / "log", executor_class=Lasting, config=config) as (server, client):
        batch = begun(client, [line(f"{n}", "a" * 60) for n in range(20)])
        wait_for(lambda: server.engine.stats().num_running == 3)
        assert client.chat.completions.create(model="echo", messages=[{"role": "user", "content": "me"}])
        assert client.batches.retrieve(batch.id).request_counts.completed == 0
        assert server.engine.stats().num_running <= 4
        client.batches.cancel(batch.id)
        assert ended(client, batch).status == "cancelled"
    queued = [each.event for each in CheckedLog(tmp_path / "log") if isinstance(each.event, ev.Queued)]
    priorities = {each.request_id.startswith("batch_"): each.priority for each in queued}
    assert priorities == {True: 100, False: 0}


def test_calls_preempt_batches(tmp_path):
    config = {"num_blocks": 60, "max_model_len": 480, "max_num_seqs": 8, "policy": "priority"}
    with batching(tmp_path / "log", executor_class=Lasting, config=config) as (server, client):
        batch = begun(client, [line(f"{n}", "a" * 60) for n in range(30)])
        wait_for(lambda: server.engine.stats().num_preemptions > 2)
        whole = client.completions.create(model="echo", prompt="me" * 60, max_tokens=200)
        assert whole.usage.completion_tokens == 200
        assert client.batches.retrieve(batch.id).status == "in_progress"
        client.batches.cancel(batch.id)
        ended(client, batch)
    preempted = [
        each.event.request_id for each in CheckedLog(tmp_path / "log") if isinstance(each.event, ev.Preempted)
    ]
    assert len(preempted) > 2 and all(name.startswith("batch_") for name in preempted)


def test_files_and_batches_are_separate_for_each_key(tmp_path):
    (tmp_path / "keys").write_text("mine\nyours\n")
    with batching(tmp_path / "log", key="mine", key_file=tmp_path / "keys") as (server, client):
        other = client_of(server, "yours")
        batch = begun(client, [line("a")])
        found = ended(client, batch)
        file = found.output_file_id
        for asked in (
            lambda: other.files.retrieve(file),
            lambda: other.files.content(file),
            lambda: other.files.delete(file),
            lambda: other.batches.retrieve(batch.id),
            lambda: other.batches.cancel(batch.id),
            lambda: other.batches.create(
                input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                asked()
        assert list(other.files.list()) == [] and list(other.batches.list()) == []
        assert {each.id for each in client.files.list()} == {file, batch.input_file_id}


def test_without_a_log_the_routes_say_what_is_missing():
    with served() as one:
        for path, method in (("/v1/files", "GET"), ("/v1/batches", "GET"), ("/v1/batches/a/cancel", "POST")):
            status, _, body = one.call(path, method=method, body=b"" if method == "POST" else None)
            assert status == 404 and "--log" in body["error"]["message"]
        part = {"type": "file", "file": {"file_id": f"file-{'0' * 24}"}}
        status, _, body = one.chat([part])
        assert status == 400 and "--log" in body["error"]["message"]


def test_the_batch_page_matches_the_server(shapes, tmp_path, monkeypatch, capsys):
    """The code of docs/how-to/batches.md runs against this test's server."""
    monkeypatch.chdir(tmp_path)
    (requests,) = blocks("docs/how-to/batches.md", "json")
    (tmp_path / "requests.jsonl").write_text(requests.text)
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "image1.png").write_bytes(scene())
    client, pause = client_of(shapes), time.sleep
    monkeypatch.setattr(openai, "OpenAI", lambda base_url, api_key: client)
    monkeypatch.setattr(time, "sleep", lambda seconds: pause(min(seconds, 0.02)))
    scope = {}
    for block in blocks("docs/how-to/batches.md", "python"):
        exec(block.text, scope)
    (answer,) = map(json.loads, capsys.readouterr().out.strip().splitlines())
    assert answer["custom_id"] == "a" and answer["response"]["body"]["choices"][0]["message"]["content"]
