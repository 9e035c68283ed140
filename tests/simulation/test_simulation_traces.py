"""Tests that traces are read correctly: arrival times, lengths and shared prefixes."""

import gzip
import json

import numpy as np
import pytest
from simulated import run

from mmengine.errors import InvalidRequest
from mmengine.simulation.workload_files import load_workload

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,48,10
2023-11-16 18:17:04.0319600,30,0
2023-11-17 18:17:04.0319600,7,2
"""
MOONCAKE = [
    {"timestamp": 5, "input_length": 1030, "output_length": 2, "hash_ids": [1, 2, 3]},
    {"timestamp": 27, "input_length": 1100, "output_length": 3, "hash_ids": [1, 2, 4]},
    {"timestamp": 28, "input_length": 1100, "output_length": 3, "hash_ids": [9, 2]},
]
SERVEGEN = [
    {"t": 0.5, "client": 1, "text_tokens": 20, "image_tokens": 31, "image_count": 2, "output_tokens": 4},
    {"t": 1.25, "client": 1, "text_tokens": 3, "image_tokens": 0, "image_count": 0, "output_tokens": 1},
]


def write(folder, name, rows):
    path = folder / name
    path.write_text(rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_azure(tmp_path):
    work = load_workload(write(tmp_path, "a.csv", AZURE))
    first, second, third = work.requests
    assert work.timed and [each.num_prompt for each in work.requests] == [48, 30, 7]
    assert (first.arrival, second.arrival) == (0, 52_000_000)
    assert third.arrival - second.arrival == 86400 * 10**9
    assert second.max_tokens == 1  # 0 in the trace, but an engine generates at least one token
    assert not set(first.prompt().tolist()) & set(second.prompt().tolist())


def test_mooncake_blocks_are_shared_by_id(tmp_path):
    work = load_workload(write(tmp_path, "m.jsonl", MOONCAKE))
    one, two, three = (each.prompt() for each in work.requests)
    assert [len(one), len(two), len(three)] == [1030, 1100, 1100]
    assert np.array_equal(one[:1024], two[:1024]) and not np.array_equal(one[1024:], two[1024:1030])
    assert np.array_equal(two[512:1024], three[512:1024]) and not np.array_equal(two[:512], three[:512])
    assert [each.arrival for each in work.requests] == [5_000_000, 27_000_000, 28_000_000]


def test_mooncake_prefixes_hit_and_the_clock_is_simulated(tmp_path):
    report, records, _ = run(write(tmp_path, "m.jsonl", MOONCAKE), queues=False)
    assert records[0]["admit"] == {"r0": 0}
    assert sorted({**records[1]["admit"], **records[2].get("admit", {})}.items())[0] == ("r1", 1024)
    assert report.meter.ends == {"length": 3} and report.duration_ns > 28_000_000
    assert report.meter.num_output_tokens == 8


def test_servegen(tmp_path):
    work = load_workload(write(tmp_path, "s.jsonl", SERVEGEN))
    images, text = work.requests
    assert [item.runs for item in images.media] == [((0, 16),), ((16, 15),)]
    assert images.media[0].mm_hash != images.media[1].mm_hash
    assert len(images.prompt()) == images.num_prompt == 51 and text.media == () and text.num_prompt == 3
    assert images.arrival == 500_000_000
    report, records, _ = run(tmp_path / "s.jsonl", queues=False)
    assert records[0]["enc"] == {"r0": [0, 1]} and report.meter.ends == {"length": 2}


def test_limit_compressed_files_and_the_same_run_twice(tmp_path):
    path = tmp_path / "m.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in MOONCAKE).encode()))
    assert len(load_workload(path, limit=2).requests) == 2
    assert run(path, queues=False)[1] == run(path, queues=False)[1]


def test_latencies_are_those_of_the_cost_model(tmp_path):
    rows = [{"t": 1.0, "text_tokens": 10, "output_tokens": 3}]
    cost = {"step_ns": 1000, "token_ns": 10, "context_ns": 1, "embed_ns": 0}
    report, _, _ = run(write(tmp_path, "s.jsonl", rows), config={"cost": cost}, queues=False)
    steps = [1000 + 100 + 10, 1000 + 10 + 11, 1000 + 10 + 12]
    assert report.meter.ttft().p50 == steps[0]
    assert (report.meter.inter_token().p50, report.meter.inter_token().p99) == (steps[1], steps[2])
    assert report.meter.end_to_end().p90 == sum(steps) == report.duration_ns - 10**9


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "TIME,ContextTokens\n", "no column TIMESTAMP"),
        ("a.csv", AZURE + "yesterday,1,1\n", "line 5: 'yesterday' is not a time"),
        ("a.csv", AZURE + "2023-11-18 00:00:00,1,many\n", "line 5: 'many' is not a token count"),
        ("a.csv", AZURE + "2023-11-18 00:00:00,1\n", "line 5 has 2 columns"),
        ("a.csv", AZURE + "2023-11-18 00:00:00,0,1\n", "line 5: a prompt has 1 to"),
        ("a.csv", AZURE + "2020-01-01 00:00:00,1,1\n", "arrives before the first"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no request"),
        ("m.jsonl", [{**MOONCAKE[0], "hash_ids": [-1]}], "hash_ids must lie in"),
        ("m.jsonl", [{**MOONCAKE[0], "hash_ids": ["x"]}], "line 1: Expected `int`"),
        ("m.jsonl", [{**MOONCAKE[0], "input_length": 2**40}], "a prompt has 1 to"),
        ("s.jsonl", [{**SERVEGEN[0], "image_tokens": -5}], "out of range"),
        ("s.jsonl", [{**SERVEGEN[0], "t": -1}], "t must lie in"),
        ("s.jsonl", [{"what": 1}], "cannot be recognized"),
        ("s.jsonl", "{", "line 1 is not JSON"),
        ("s.txt.gz", "not gzip", "not a complete gzip file"),
        ("q.jsonl", [{"id": "a", "prompt": [["img", 2, 3]], "max_tokens": 1}], "a piece of the prompt"),
        ("q.jsonl", [{"id": "a", "prompt": [["img", 2]], "max_tokens": 1, "foo": 1}], "unknown field `foo`"),
        (
            "q.jsonl",
            [{"id": "a", "prompt": [["img", 2]], "max_tokens": 1}] * 2,
            "two requests are called 'a'",
        ),
        (
            "q.jsonl",
            [{"id": "a", "prompt": [["img", 2]], "max_tokens": 1, "arrival_step": -1}],
            "arrival_step",
        ),
        ("q.json", '{"requests": [], "steps": 3}', "unknown field `steps`"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, message):
    with pytest.raises(InvalidRequest, match=message):
        load_workload(write(tmp_path, name, content))
