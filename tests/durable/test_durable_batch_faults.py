"""Tests that a batch survives when the server's process ends: at a commit to the store, while an answer line
is written to a file, or after a line. The next process finishes the batch, with each line once.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from mmengine.core.resume import Resume
from tests.server.batching import CHAT, batching, ended, lines_in

ROOT = Path(__file__).parents[2]
NUM_LINES = 12
DIES = """
import os, sys
from pathlib import Path
from mmengine.serve.batch.progress import AnswerFile
from tests.server.batching import CHAT, batching, begun, ended, line

folder, where, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

def reached(place):
    global count
    count -= place == where
    if count < 0:
        os._exit(9)

real = AnswerFile.write
def write(self, data, request_id):
    if where == "in a line" and count == 0:
        self._file.write(data[: len(data) // 2])
        self._file.flush()
    reached("in a line")
    real(self, data, request_id)
    reached("after a line")
AnswerFile.write = write

with batching(folder, storage={"fault": reached}, config={"max_num_seqs": 4}) as (_, client):
    ended(client, begun(client, [line(f"{n}", "a" * (n + 1)) for n in range(12)]))
print("it lived", flush=True)
"""
ALL = [(place, count) for place in ("before commit", "after commit") for count in range(5)]
ALL += [(place, count) for place in ("in a line", "after a line") for count in (0, 5, NUM_LINES - 1)]


@pytest.mark.soak
@pytest.mark.parametrize(("where", "count"), ALL)
def test_ended_anywhere_it_is_finished_by_the_next(tmp_path, where, count):
    folder = tmp_path / "log"
    ran = subprocess.run(
        [sys.executable, "-c", DIES, folder, where, str(count)], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 9 and "it lived" not in ran.stdout, ran.stderr
    with batching(folder, engine_options={"resume": Resume()}, config={"max_num_seqs": 4}) as (
        server,
        client,
    ):
        batches = list(client.batches.list())
        files = [each for each in client.files.list() if each.purpose == "batch"]
        if not batches:  # no client knows a batch
            assert (where, count) in [("before commit", 0), ("after commit", 0), ("before commit", 1)]
            assert len(files) == (count == 1 or where == "after commit")
            folder_holds = {path.name for path in server.storage.files.folder.iterdir()}
            assert folder_holds == {each.id for each in files}
            return
        found = ended(client, batches[0])
        assert found.status == "completed" and found.request_counts.completed == NUM_LINES
        answers = lines_in(client, found.output_file_id)
        assert sorted(int(each["custom_id"]) for each in answers) == list(range(NUM_LINES))
        texts = {
            each["custom_id"]: each["response"]["body"]["choices"][0]["message"]["content"]
            for each in answers
        }
        assert texts == {f"{n}": "A" * (n + 1) for n in range(NUM_LINES)}
        assert client.files.delete(found.output_file_id).deleted and client.files.delete(files[0].id).deleted
        again = client.files.create(file=("a.jsonl", b"{}"), purpose="batch")
        batch = client.batches.create(input_file_id=again.id, endpoint=CHAT, completion_window="1h")
        assert ended(client, batch).status == "failed"
