"""Tests batches in shards (`mmengine run --batch --shards`): a process resumes a killed process's shard, and
answers to another request file are refused.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mmengine.cli import batch_shards, supervisor
from mmengine.cli.batch_shards import Shards, answers_of, num_answer_bytes
from mmengine.errors import InvalidRequest, LogError
from mmengine.events.log import LogReader
from mmengine.serve.batch.request_file import RequestFile, Shard
from tests.cli.cli_process import call_cli
from tests.cli.shard_process import run
from tests.events.logs import begin_log

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
    lines[7]["custom_id"] = "r3"  # This id is already in another shard.
    lines[8].pop("custom_id")
    text = "\n\n".join(map(json.dumps, lines))
    (folder / "requests.jsonl").write_text(text)


def answers_in(folder):
    lines = map(json.loads, (folder / "answers.jsonl").read_text().splitlines())
    return sorted(((line["custom_id"], line.get("text"), line.get("error", "")) for line in lines), key=str)


@pytest.mark.parametrize("victim", [1])
def test_a_killed_process_loses_no_computed_answers(tmp_path, victim):
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
    assert "Recovered" in kinds, "the shard was not resumed from its log"
    before = (killed / "answers.jsonl").stat()
    assert run(killed, Shard(2, COUNT)) == 0, "a process that finds all shards answered returns 0"
    after = (killed / "answers.jsonl").stat()
    assert (before.st_ino, before.st_size) == (after.st_ino, after.st_size)
    assert num_answer_bytes(killed / "answers.jsonl", COUNT) == after.st_size
    assert answers_of(Path("a"), Shard(0, 2)).name == "a.shard-0-of-2"


def test_an_error_in_any_shard_is_in_the_exit_code(tmp_path, monkeypatch):
    # The command runs as the supervised process, which computes the answers.
    monkeypatch.setattr(supervisor, "is_supervised", lambda: True)
    monkeypatch.setattr(supervisor, "obey_supervisor", lambda: None)
    (tmp_path / "requests.jsonl").write_text('{"custom_id": "a"}\n{"custom_id": "b"}\n')
    words = ("run", "--batch", "requests.jsonl", "--out", "answers.jsonl", "--log", "logs", "--shards", "2")
    for shard in "01":  # The second process finds all lines answered.
        done = call_cli(*words, "--shard", shard, cwd=tmp_path)
        assert done.returncode == 1 and done.stderr.endswith("2 of them are errors\n"), done.stderr


def test_shards_split_the_lines_and_share_ids(tmp_path):
    requests_in(tmp_path, 10)
    seen = []
    for index in range(COUNT):
        with (tmp_path / "requests.jsonl").open("rb") as file:
            source = RequestFile(file, tmp_path, shard=Shard(index, COUNT))
            jobs = list(source)
        assert len(jobs) == Shard(index, COUNT).num_of(10) == len(source.custom_ids)
        seen += [job[1].request_id for job in jobs if isinstance(job, tuple)]
    assert sorted(seen) == sorted(f"r{n}" for n in range(10) if n not in (7, 8))
    with pytest.raises(InvalidRequest, match="--shard 3 is out of range"):
        run(tmp_path, Shard(3, 3))


def echoed(folder, *texts):
    """Answer requests with these texts in two shards, and return the answers in order."""
    requests_of(folder, texts)
    assert run(folder, Shard(0, 2)) == 0
    answers = {json.loads(line)["custom_id"]: json.loads(line)["text"] for line in lines_of(folder)}
    return [answers[f"r{n}"] for n in range(len(texts))]


def requests_of(folder, texts):
    asked = (
        {"custom_id": f"r{n}", "messages": [{"role": "user", "content": t}]} for n, t in enumerate(texts)
    )
    (folder / "requests.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in asked))


def lines_of(folder):
    return (folder / "answers.jsonl").read_text().splitlines()


def test_answers_to_another_request_file_are_not_reused(tmp_path):
    assert echoed(tmp_path, "aa", "bb", "cc", "dd") == ["AA", "BB", "CC", "DD"]
    whole = lines_of(tmp_path)
    requests_of(tmp_path, ["ww", "xx", "yy", "zz"])
    for own in (0, 1):
        with pytest.raises(LogError, match=rf"the log in .*/shard-{own}-of-2"):
            run(tmp_path, Shard(own, 2))
    assert lines_of(tmp_path) == whole
    (tmp_path / "logs").rename(tmp_path / "logs of before")
    assert echoed(tmp_path, "ww", "xx", "yy", "zz") == ["WW", "XX", "YY", "ZZ"], (
        "answers to the earlier request file were reused"
    )


def test_answers_of_another_batch_beside_a_log_are_refused(tmp_path):
    echoed(tmp_path, "aa", "bb")
    answers_of(tmp_path / "answers.jsonl", Shard(1, 2)).write_text('{"custom_id":"s1","text":"BB"}\n')
    with pytest.raises(InvalidRequest, match="line 1, does not answer a request of this batch"):
        run(tmp_path, Shard(0, 2))


def test_a_shard_with_a_new_log_is_not_answered(tmp_path, monkeypatch):
    """Another process has just begun the shard, so its log has no manifest yet."""
    requests_of(tmp_path, ["aa", "bb"])
    shards = Shards(tmp_path / "requests.jsonl", tmp_path / "answers.jsonl", tmp_path / "logs", Shard(0, 2))
    log, held = shards.log_of(Shard(0, 2)), []
    log.mkdir()
    begin_log(log)

    def asked(folder):
        """Replace `is_locked`: return False on the first call and True later, as if another process then took
        the lock.
        """
        found = bool(held)
        held.append(folder)
        return found

    monkeypatch.setattr(batch_shards, "is_locked", asked)
    assert not shards._is_answered(Shard(0, 2)) and held == [log] * 2


@pytest.mark.parametrize("texts", [(), ("aa",), ("aa", "bb")])
def test_a_shard_without_a_line_needs_no_process(tmp_path, texts):
    requests_of(tmp_path, texts)
    for own in (2, 0):
        assert run(tmp_path, Shard(own, 3)) == 0
        assert sorted(json.loads(line)["text"] for line in lines_of(tmp_path)) == sorted(
            map(str.upper, texts)
        )
    assert len(list((tmp_path / "logs").glob("shard-*"))) == len(texts)


def test_answers_never_overwrite_the_requests(tmp_path):
    requests = tmp_path / "requests.jsonl"
    requests.write_text("{}\n")
    with pytest.raises(InvalidRequest, match="request file itself"):
        Shards(requests, requests, tmp_path / "logs", Shard(0, 2))
    assert requests.read_text() == "{}\n"
