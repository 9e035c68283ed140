"""Tests that a new Ray Data worker continues a dead worker's requests without recomputing tokens."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from mmengine.core.resume import Resume, read_resume_state
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from mmengine.events.segment import segment_name
from mmengine.replay.queries.fleet import logs_in, replica_paths
from mmengine_ray import batch
from mmengine_ray.batch import AnswerLines
from tests.events.logs import rewrite

WORKER = """
import json, sys
import numpy as np
from mmengine_ray.batch import AnswerLines
worker = AnswerLines(sys.argv[1], builder="tests.fleet.echo:build")
worker({"text": np.array(json.loads(sys.argv[2]), dtype=object)})
"""
SIZES = (10, 150)  # prompt lengths; the worker answers the short prompts and then dies


def lines(count, start=0):
    return [
        json.dumps(
            {
                "custom_id": f"r{n}",
                "messages": [{"role": "user", "content": f"{n} {'a' * SIZES[n % 4 > 1]}"}],
                "max_tokens": 200,
                "n": 2 if n == 7 else 1,
            }
        )
        for n in range(start, start + count)
    ]


def answers(worker, given):
    found = [json.loads(text) for text in worker({"text": np.array(given, dtype=object)})["text"]]
    return [(each["custom_id"], each.get("text") or [c["text"] for c in each["choices"]]) for each in found]


@pytest.mark.soak
def test_rows_of_a_dead_worker(tmp_path):
    root = tmp_path / "logs"
    given = lines(8)
    command = [sys.executable, "-c", WORKER, str(root), json.dumps(given)]
    house = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{house}{os.pathsep}{house / 'plugins'}"}
    with subprocess.Popen(command, cwd=house, env=environment) as process:
        end = time.monotonic() + 60
        while sum(path.stat().st_size for path in root.glob("*/*.mmlog")) < 2000:
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.005)
        process.kill()
    whole, other = (
        AnswerLines(str(folder), builder="tests.fleet.echo:build") for folder in (tmp_path / "w", root)
    )
    wanted = answers(whole, given)
    assert [name for name, _ in wanted] == [f"r{n}" for n in range(8)]
    assert answers(other, given) == wanted
    assert answers(other, lines(2, 8)) == answers(whole, lines(2, 8))
    for worker in (whole, other):
        worker._engine.close()
    ways, broken = replica_paths(logs_in(root))
    assert not broken and len(logs_in(root)) == 2
    taken = [way for name, way in ways.items() if len(way.hops) == 1 and way.end == "stop" and name < "r8"]
    gone_on = [way for way in ways.values() if len(way.hops) == 2 and way.hops[1].num_given]
    assert taken, "all complete answers were computed again"
    assert gone_on, "no answer was continued in the middle"
    for way in gone_on:
        assert way.hops[1].num_given == way.hops[0].num_said and way.num_computed == way.num_tokens


def line(name, text, **fields):
    return json.dumps(
        {"custom_id": name, "messages": [{"role": "user", "content": text}], "max_tokens": 60, **fields}
    )


ASKED = [line("whole", "short"), line("half", "a long one " * 3)]
OF_WHOLE, OF_HALF = ("whole", "SHORT"), ("half", "A LONG ONE " * 3)
NUM_STEPS = 4  # the worker dies this many steps after the end of the shorter answer


@pytest.fixture(scope="module")
def died(tmp_path_factory):
    """Return a worker's log records for `ASKED`, up to NUM_STEPS steps after the shorter answer's end."""
    root = tmp_path_factory.mktemp("before")
    worker = AnswerLines(str(root), builder="tests.fleet.echo:build")
    assert answers(worker, ASKED) == [OF_WHOLE, OF_HALF]
    worker._engine.close()
    records = list(LogReader(worker._log))
    ends = [place for place, each in enumerate(records) if isinstance(each.event, ev.Finished)]
    steps = [place for place, each in enumerate(records) if isinstance(each.event, ev.Executed)]
    assert [records[place].event.request_id for place in ends] == ["whole", "half"]
    last = [place for place in steps if place > ends[0]][NUM_STEPS - 1]
    assert last < ends[1]
    return records[: last + 1]


def num_left(log):
    """Return the number of tokens in the unfinished answer."""
    return len(read_resume_state(log, Resume()).answers["half"].token_ids)


def answered(root, given, **options):
    """Return the answers of a worker that finds the logs in `root`.

    Also returns how many tokens each computed request got from a dead worker's log.
    """
    worker = AnswerLines(str(root), builder="tests.fleet.echo:build", **options)
    found = answers(worker, given)
    worker._engine.close()
    queued = [each.event for each in LogReader(worker._log) if isinstance(each.event, ev.Queued)]
    return found, {each.request_id: len(each.outputs) // 4 for each in queued}


def test_a_dead_worker_s_answer_is_used_only_for_the_same_request(died, tmp_path):
    rewrite(died, tmp_path / "dead")
    assert num_left(tmp_path / "dead") > NUM_STEPS
    assert answered(tmp_path, ASKED) == ([OF_WHOLE, OF_HALF], {"half": num_left(tmp_path / "dead")})
    others = [line("whole", "a river"), line("half", "a planet")]
    assert answered(tmp_path, others) == (
        [("whole", "A RIVER"), ("half", "A PLANET")],
        {"whole": 0, "half": 0},
    )
    shorter = [line("whole", "short", max_tokens=3), line("half", "a long one " * 3, max_tokens=5)]
    assert answered(tmp_path, shorter) == ([("whole", "SHO"), ("half", "A LON")], {"whole": 0, "half": 0})
    (tmp_path / "media").mkdir()
    assert answered(tmp_path, ASKED, base_folder=str(tmp_path / "media"))[1] == {"whole": 0, "half": 0}


def begun_with(records, **fields):
    """Return the records, with `fields` replaced in the STARTED event."""
    first = records[0]
    return [replace(first, event=replace(first.event, **fields)), *records[1:]]


@pytest.mark.parametrize(
    "fields", [{"fingerprints": {"weights": "others"}}, {"config": {"of_another_version": 1}}]
)
def test_a_log_of_another_model_or_version_is_left_alone(died, tmp_path, fields):
    rewrite(begun_with(died, **fields), tmp_path / "dead")
    assert answered(tmp_path, ASKED) == ([OF_WHOLE, OF_HALF], {"whole": 0, "half": 0})


def test_an_unreadable_log_does_not_affect_others(died, tmp_path, monkeypatch):
    for name in ("a linked", "b refused", "dead"):
        rewrite(died, tmp_path / name)
    segment = tmp_path / "a linked" / segment_name(0)
    segment.symlink_to(segment.rename(tmp_path / "elsewhere"))
    read = batch.read_resume_state

    def refused(log, resume):
        if log.name == "b refused":
            raise PermissionError(13, "Permission denied", str(log))
        return read(log, resume)

    monkeypatch.setattr(batch, "read_resume_state", refused)
    assert answered(tmp_path, ASKED) == ([OF_WHOLE, OF_HALF], {"half": num_left(tmp_path / "dead")})
