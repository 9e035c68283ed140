"""Tests benchmarks/structured/structured_decode.py. Times are not checked."""

import json
import sys

import pytest


@pytest.fixture
def benchmark(module, monkeypatch):
    monkeypatch.setattr(
        module("common.measure"), "use_threads", lambda threads: None
    )  # The real function would limit this test process.
    return module("structured.structured_decode")


def test_an_interval_holds_its_median(benchmark):
    mid, low, high = benchmark.interval([0.8, 0.9, 1.0, 1.1, 3.0])
    assert mid == 1.0 and 0.8 <= low < mid < high <= 3.0
    assert benchmark.interval([0.5]) == (0.5, 0.5, 0.5)


def test_a_round_takes_all_ways_over_the_same_pictures(benchmark):
    ways = benchmark.Ways()
    asks, num_other, num_right = benchmark.answered(ways, benchmark.pictures(ways, 3, seed=3))
    assert len(asks) + num_other == 3 and num_right >= 1
    found = benchmark.rounds_of(ways, asks, batch=2, rounds=2)
    ways.close()
    for number in range(2):
        free, grammar, drafts = (found[way][number] for way in benchmark.WAYS)
        assert free.tokens == free.passes == grammar.tokens == grammar.passes
        assert drafts.passes < drafts.tokens and min(free.cpu_ns, grammar.cpu_ns, drafts.cpu_ns) > 0


def test_a_run_ends_with_a_table_and_its_targets(benchmark, tmp_path, monkeypatch, capsys):
    out = tmp_path / "table.md"
    sizes = ["--rounds", "1", "--pictures", "3", "--batch", "3"]
    monkeypatch.setattr(sys, "argv", ["structured_decode.py", *sizes, "--json", "--out", str(out)])
    benchmark.main()
    *_, last = capsys.readouterr().out.splitlines()
    targets = json.loads(last)["targets"]
    assert set(targets) == {"tokens a pass, batch 3", "time with drafts / free, batch 3"}
    assert "| drafts, batch 3 |" in out.read_text()
