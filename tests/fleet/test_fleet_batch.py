"""Rows of a dead worker, given to another one as Ray Data does: what was computed is not computed again."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mmengine.replay.ask.fleet import logs_in, ways_in
from mmengine_ray.batch import AnswerLines

WORKER = """
import json, sys
import numpy as np
from mmengine_ray.batch import AnswerLines
worker = AnswerLines(sys.argv[1], builder="tests.fleet.echo:build")
worker({"text": np.array(json.loads(sys.argv[2]), dtype=object)})
"""
SIZES = (10, 150)  # of prompts; the first ones are answered when the worker dies


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
    ways, broken = ways_in(logs_in(root))
    assert not broken and len(logs_in(root)) == 2
    taken = [way for name, way in ways.items() if len(way.stops) == 1 and way.end == "stop" and name < "r8"]
    gone_on = [way for way in ways.values() if len(way.stops) == 2 and way.stops[1].num_given]
    assert taken, "an answer that was whole was computed again"
    assert gone_on, "none was half an answer"
    for way in gone_on:
        assert way.stops[1].num_given == way.stops[0].num_said and way.num_computed == way.num_tokens
