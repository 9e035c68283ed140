"""/v1/files and /v1/batches, with OpenAI's own client."""

import json
import time
from contextlib import contextmanager

import openai

from tests.server.running import served

CHAT = "/v1/chat/completions"


def line(custom_id, content="hello", url=CHAT, **fields):
    body = {"messages": [{"role": "user", "content": content}], **fields}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode()


@contextmanager
def batching(folder, *, keep=None, key="none", **options):
    """A server with a log, and a client of it."""
    log = {"engine_options": {"log": folder, **options.pop("engine_options", {})}}
    with served(keep={"log": folder, **(keep or {})}, **log, **options) as one:
        yield one, client_of(one, key)


def client_of(server, key="none"):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=key, max_retries=0)


def begun(client, lines, endpoint=CHAT, **options):
    data = b"\n".join(lines)
    file = client.files.create(file=("requests.jsonl", data), purpose="batch")
    options = {"completion_window": "24h", **options}
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, **options)


def ended(client, batch, seconds=20):
    end = time.monotonic() + seconds
    while (found := client.batches.retrieve(batch.id)).status in (
        "validating",
        "in_progress",
        "finalizing",
        "cancelling",
    ):
        assert time.monotonic() < end, found
        time.sleep(0.02)
    return found


def lines_in(client, file_id):
    if file_id is None:
        return []
    return [json.loads(one) for one in client.files.content(file_id).read().splitlines()]


def test_a_batch_from_its_file_to_its_answers(tmp_path):
    with batching(tmp_path / "log") as (_, client):
        texts = {f"row {number}": "x" * (number % 7 + 1) for number in range(40)}
        lines = [line(name, text) for name, text in texts.items()]
        batch = begun(client, [lines[0], b"", *lines[1:]], metadata={"of": "me"})
        assert batch.object == "batch" and batch.status == "validating" and batch.metadata == {"of": "me"}
        assert batch.expires_at == batch.created_at + 86400
        found = ended(client, batch)
        assert found.status == "completed", found
        counts = found.request_counts
        assert (counts.total, counts.completed, counts.failed) == (40, 40, 0)
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
        assert stored.purpose == "batch_output" and stored.bytes == len(
            client.files.content(stored.id).read()
        )
        assert [each.id for each in client.batches.list()] == [batch.id]
