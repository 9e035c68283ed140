"""Tests benchmarks/drafts/spec.py: the targets in the output, and the pairs of runs with and without drafts.
Times are not checked.
"""

import json
import random

import pytest

from tests.benchmarks.test_throughput import call

pytest.importorskip("mmengine_shapes")


def test_answers_are_the_same_with_drafts_and_without():
    words = ["--rounds", "1", "--batch", "2", "--tasks", "schema", "--drafters", "auto", "--json"]
    targets = json.loads(call("spec", *words).splitlines()[-1])["targets"]
    assert targets["answers with the same tokens as without drafts"]["met"]
    assert "upper end, auto, schema, batch 2" in targets
    assert targets["prefix cache, tokens found with auto / without"]["met"]


def test_every_round_of_a_cell_has_requests_of_its_own(module):
    runs, seen = module("drafts.spec_runs"), []

    class Recorder:
        def __init__(self, name):
            self.name = name
            self.engine = type("Engine", (), {"processor": Processor()})

        def run(self, task, groups, *, shares=True):
            seen.append((self.name, tuple(each for group in groups for each in group)))
            return runs.Decoded(cpu_ns=2 if self.name == "plain" else 1, answers=[[1]])

    class Processor:
        def prepare(self, messages, images, videos):
            return repr((messages, [image.tobytes() for image in images]))

    sides = [Recorder(name) for name in "abc"]
    found = runs.paired(Recorder("plain"), sides, runs.DESCRIBE, 4, 3, random.Random(1), lambda: None)
    assert [name for name, _ in seen[:5]] == ["c", "plain", "b", "a", "plain"]
    for side in "abc":
        asked = [request for name, requests in seen if name == side for request in requests]
        assert len(asked) == 4 * 4 and len(set(asked)) == len(asked)
        assert found[side].ratios() == [2.0] * 3 and found[side].equal() == (3, 3)
