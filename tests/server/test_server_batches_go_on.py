"""Tests that batches continue after a full disk, an error in the store, or a restart."""

import json

import openai
import pytest

from mmengine.core.resume import Resume
from mmengine.events import vocabulary as ev
from mmengine.replay.checked_log import CheckedLog
from mmengine.serve.batch.progress import AnswerFile
from mmengine.serve.stream.request_stream import Stream
from mmengine.server.batches import run as batch_run
from mmengine.server.batches import runner as batch_runner
from tests.pictures import scene
from tests.server.batching import CHAT, Failing, batching, begun, ended, line, lines_in
from tests.server.running import SlowEcho, wait_for


class Leaving(SlowEcho):
    """A slow executor whose `close` does nothing, so a test may close the engine during a request."""

    pause_s = 0.01

    def close(self):
        pass


def test_a_full_disk_delays_a_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_run, "DISK_AGAIN_S", 0.05)
    real, refused = AnswerFile.write, []

    def write(self, data, request_id):
        if len(refused) < 3:
            refused.append(data)
            self._file = Failing(self._file)
        real(self, data, request_id)

    monkeypatch.setattr(AnswerFile, "write", write)
    with batching(tmp_path / "log") as (_, client):
        found = ended(client, begun(client, [line(f"{n}") for n in range(5)]))
        assert found.status == "completed" and len(refused) == 3
        answers = lines_in(client, found.output_file_id)
        assert sorted(each["custom_id"] for each in answers) == list("01234")


def test_a_failing_store_delays_a_batch(tmp_path, monkeypatch):
    """Each commit to the store fails once. Calls that wait for the commit get the error. The batch's own
    writes are retried.
    """
    monkeypatch.setattr(batch_runner, "AGAIN_S", 0.01)
    monkeypatch.setattr(batch_runner, "LOOK_S", 0.02)
    failed, commits = [], []

    def fault(place):
        if place == "before commit" and not (failed and failed[-1] == len(commits)):
            failed.append(len(commits))
            raise OSError(28, "No space left on device")
        commits.append(place)

    with batching(tmp_path / "log", storage={"fault": fault}) as (server, client):
        upload = {"file": ("a.jsonl", line("a")), "purpose": "batch"}
        with pytest.raises(openai.InternalServerError, match="No space left"):
            client.files.create(**upload)
        file = client.files.create(**upload)
        asked = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "1h"}
        with pytest.raises(openai.InternalServerError, match="No space left"):
            client.batches.create(**asked)
        found = ended(client, client.batches.create(**asked))
        assert found.status == "completed" and found.request_counts.completed == 1
        assert len(failed) >= 5 and len(lines_in(client, found.output_file_id)) == 1


@pytest.mark.parametrize(
    ("url", "is_heard"),
    [(CHAT, True), (CHAT, False), ("/v1/responses", True)],
    ids=["chat", "unheard", "responses"],
)
def test_a_batch_continues_after_a_restart(tmp_path, url, is_heard, monkeypatch):
    """The second server answers each remaining line once. `is_heard`: whether the first server knew that the
    engine had accepted its requests.
    """

    def lines_of(rows):
        if url == CHAT:
            return [line(name, text) for text, name in rows]
        rest = {"method": "POST", "url": url}
        return [
            json.dumps({"custom_id": name, "body": {"input": text}, **rest}).encode() for text, name in rows
        ]

    folder = tmp_path / "log"
    options = {"executor_class": Leaving, "drain_s": 0, "config": {"max_num_seqs": 4}}
    with batching(folder, **options) as (server, client):
        rows = [("a" * (5 + 2 * n), f"{n}") for n in range(20)]
        batch = begun(client, lines_of(rows), url)
        wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 5)
        if not is_heard:
            monkeypatch.setattr(Stream, "is_accepted", property(lambda stream: False))
        client.close()
    monkeypatch.undo()
    resumed = {"engine_options": {"resume": Resume()}, **options}
    with batching(folder, **resumed) as (server, client):
        found = client.batches.retrieve(batch.id)
        assert found.status == "in_progress"
        found = ended(client, batch)
        assert found.status == "completed" and found.request_counts.completed == 20
        names = [each["custom_id"] for each in lines_in(client, found.output_file_id)]
        assert sorted(names) == sorted(f"{n}" for n in range(20))
    queued = [each.event.request_id for each in CheckedLog(folder) if isinstance(each.event, ev.Queued)]
    assert len(queued) == len(set(queued)) == 20  # No line was submitted twice.


def test_a_logged_request_needs_no_image_file(tmp_path):
    options = {"executor_class": Leaving, "drain_s": 0, "config": {"max_num_seqs": 4}}
    with batching(tmp_path / "log", **options) as (server, client):
        image = client.files.create(file=("a.png", scene()), purpose="vision")
        content = [
            {"type": "image_url", "image_url": {"url": image.id}},
            {"type": "text", "text": "a" * 60},
        ]
        batch = begun(client, [line("a", content), line("b", content)])
        wait_for(lambda: server.engine.stats().num_output_tokens > 4)
        path = server.storage.files.path(image.id)
    path.unlink()
    with batching(tmp_path / "log", engine_options={"resume": Resume()}, **options) as (_, client):
        found = ended(client, batch)
        assert found.request_counts.completed == 2, lines_in(client, found.error_file_id)
