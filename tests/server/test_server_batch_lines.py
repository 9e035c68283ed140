"""Tests single batch lines: unexpected errors, and responses that are not stored."""

import json

import msgspec

from tests.server.batching import batching, begun, ended, lines_in
from tests.server.running import COMPLETIONS, RESPONSES


def test_an_unexpected_error_fails_only_its_line(tmp_path, monkeypatch, caplog):
    def asked(custom_id, prompt, **fields):
        body = {"prompt": prompt, "max_tokens": 2, **fields}
        found = {"custom_id": custom_id, "method": "POST", "url": COMPLETIONS, "body": body}
        return json.dumps(found).encode()

    def failing(old, when):
        def called(*args):
            if when in repr(args):
                raise ValueError("an unexpected error")
            return old(*args)

        return called

    with batching(tmp_path / "log") as (server, client):
        reader = server.app._runner._answers._reader
        monkeypatch.setattr(reader, "read_line", failing(reader.read_line, "unreadable"))
        monkeypatch.setattr(reader, "frames_of", failing(reader.frames_of, "-5'"))
        lines = [asked("huge", [10**18], echo=True), asked("negative", [-5], echo=True), asked("good", "a")]
        # The fifth line's request id ends in "-5", so `frames_of` fails for this line.
        lines += [asked("read", "unreadable"), asked("answer", "a")]
        found = ended(client, begun(client, lines, COMPLETIONS))
        assert found.status == "completed" and found.request_counts.completed == 1
        errors = {each["custom_id"]: each["response"] for each in lines_in(client, found.error_file_id)}
        statuses = {name: each["status_code"] for name, each in errors.items()}
        assert statuses == {"huge": 400, "negative": 400, "read": 500, "answer": 500}
        assert {errors[name]["body"]["error"]["param"] for name in ("huge", "negative")} == {"prompt"}
        assert not server.engine._open and not server.engine.recovered_requests()
    assert caplog.text.count("an unexpected error") == 2


def test_a_batch_response_is_stored_only_in_the_output_file(tmp_path):
    def asked(number, fields):
        found = {"custom_id": str(number), "method": "POST", "url": RESPONSES}
        return json.dumps({**found, "body": {"input": "a secret", **fields}}).encode()

    with batching(tmp_path / "log") as (server, client):
        bodies = ({}, {"store": False, "background": False}, {"store": True}, {"background": True})
        found = ended(client, begun(client, [asked(*each) for each in enumerate(bodies)], RESPONSES))
        assert found.request_counts.completed == found.request_counts.failed == 2
        for each in lines_in(client, found.output_file_id):
            body = each["response"]["body"]
            assert body["store"] is body["background"] is False
            assert server.call(f"/v1/responses/{body['id']}")[0] == 404
        errors = {each["custom_id"]: each["response"] for each in lines_in(client, found.error_file_id)}
        told = {name: (each["status_code"], each["body"]["error"]["param"]) for name, each in errors.items()}
        assert told == {"2": (400, "store"), "3": (400, "background")}
        assert "in a batch" in errors["2"]["body"]["error"]["message"]
        reader = server.app._runner._answers._reader
        for_the_log = reader.read_line(RESPONSES, b'{"input": "a secret"}', "name", "").envelope
        assert b"a secret" not in msgspec.json.encode(for_the_log)
