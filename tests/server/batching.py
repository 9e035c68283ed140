"""Helpers that run a server with files and batches, and call it with OpenAI's client."""

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
def batching(folder, *, storage=None, key="none", **options):
    """Run a server with a log, and yield the server and a client."""
    log = {"engine_options": {"log": folder, **options.pop("engine_options", {})}}
    with served(storage={"log": folder, **(storage or {})}, **log, **options) as one:
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


class Failing:
    """A file whose first write stores half the data and raises OSError for a full disk."""

    def __init__(self, file):
        self._file, self._fails = file, True

    def __getattr__(self, name):
        return getattr(self._file, name)

    def write(self, data):
        if not self._fails:
            return self._file.write(data)
        self._fails = False
        self._file.write(data[: len(data) // 2])
        self._file.flush()
        raise OSError(28, "No space left on device")
