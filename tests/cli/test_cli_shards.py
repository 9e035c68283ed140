"""Batches in shards: who is killed is taken up by the others, half answers included."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mmengine.cli.batch_shards import answers_of, num_answer_bytes
from mmengine.errors import InvalidRequest
from mmengine.events.log import LogReader
from mmengine.serve.batchfile import RequestFile, Shard
from tests.cli.shard_process import run

COUNT = 3


def requests_in(folder, number=30):
    lines = [
        {
            "custom_id": f"r{n}",
            "messages": [{"role": "user", "content": f"{n} {'a' * 60}"}],
            "max_tokens": 100,
        }
        for n in range(number)
    ]
    lines[7]["custom_id"] = "r3"  # stands in another shard already
    lines[8].pop("custom_id")
    text = "\n\n".join(map(json.dumps, lines))
    (folder / "requests.jsonl").write_text(text)


def answers_in(folder):
    lines = map(json.loads, (folder / "answers.jsonl").read_text().splitlines())
    return sorted(((line["custom_id"], line.get("text"), line.get("error", "")) for line in lines), key=str)


@pytest.mark.parametrize("victim", [1])
def test_a_killed_process_costs_only_what_was_not_computed(tmp_path, victim):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
        requests_in(folder)
    assert run(whole, Shard(0, 1)) == 0
    command = [sys.executable, "-m", "tests.cli.shard_process", str(killed), str(victim), str(COUNT), "0.02"]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2]) as process:
        log, end = killed / "logs" / f"shard-{victim}-of-{COUNT}", time.monotonic() + 60
        while sum(path.stat().st_size for path in log.glob("*.mmlog")) < 2500:
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.01)
        process.kill()
    assert run(killed, Shard(0, COUNT)) == 0
    assert answers_in(killed) == answers_in(whole)
    assert [path.name for path in log.parent.iterdir() if path.is_dir()].__len__() == COUNT
    kinds = [type(record.event).__name__ for record in LogReader(log)]
    assert "Recovered" in kinds, "it was begun anew"
    before = (killed / "answers.jsonl").stat()
    assert run(killed, Shard(2, COUNT)) == 0, "there is nothing left to do"
    after = (killed / "answers.jsonl").stat()
    assert (before.st_ino, before.st_size) == (after.st_ino, after.st_size)
    assert num_answer_bytes(killed / "answers.jsonl", COUNT) == after.st_size
    assert answers_of(Path("a"), Shard(0, 2)).name == "a.shard-0-of-2"


def test_shards_share_the_lines_and_know_of_one_another(tmp_path):
    requests_in(tmp_path, 10)
    seen = []
    for index in range(COUNT):
        with (tmp_path / "requests.jsonl").open("rb") as file:
            source = RequestFile(file, tmp_path, shard=Shard(index, COUNT))
            jobs = list(source)
        assert len(jobs) == Shard(index, COUNT).num_of(10) == len(source.custom_ids)
        seen += [job[1].request_id for job in jobs if isinstance(job, tuple)]
    assert sorted(seen) == sorted(f"r{n}" for n in range(10) if n not in (7, 8))
    with pytest.raises(InvalidRequest, match="--shard 3 is none of --shards 3"):
        run(tmp_path, Shard(3, 3))
