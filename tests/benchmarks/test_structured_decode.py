"""Tests benchmarks/structured/structured_decode.py. Times are not checked."""

import json
import sys

import pytest


@pytest.fixture
def benchmark(module, monkeypatch):
    monkeypatch.setattr(
        module("common.measure"), "use_threads", lambda threads: None
    )  # The real function limits this process's CPUs.
    return module("structured.structured_decode")


def test_an_interval_holds_its_median(benchmark):
    mid, low, high = benchmark.interval([0.8, 0.9, 1.0, 1.1, 3.0])
    assert mid == 1.0 and 0.8 <= low < mid < high <= 3.0
    assert benchmark.interval([0.5]) == (0.5, 0.5, 0.5)


def test_a_run_takes_all_ways_over_the_same_pictures(benchmark, tmp_path, monkeypatch, capsys):
    """The same requests run without a grammar, with a grammar, and with a grammar and drafts."""
    out, calls = tmp_path / "table.md", []
    for name in ("answered", "rounds_of"):
        real = getattr(benchmark, name)
        monkeypatch.setattr(
            benchmark, name, lambda *given, real=real: calls.append(real(*given)) or calls[-1]
        )
    sizes = ["--rounds", "1", "--pictures", "3", "--batch", "3"]
    monkeypatch.setattr(sys, "argv", ["structured_decode.py", *sizes, "--json", "--out", str(out)])
    benchmark.main()
    *_, last = capsys.readouterr().out.splitlines()
    targets = json.loads(last)["targets"]
    assert set(targets) == {"tokens a pass, batch 3", "time with drafts / free, batch 3"}
    assert "| drafts, batch 3 |" in out.read_text()
    (asks, num_other, num_right), *rounds = calls
    assert len(asks) + num_other == 3 and num_right >= 1 and len(rounds) == 2
    for found in rounds:
        ((free,), (grammar,), (drafts,)) = (found[way] for way in benchmark.WAYS)
        assert free.tokens == free.passes == grammar.tokens == grammar.passes
        assert drafts.passes < drafts.tokens and min(free.cpu_ns, grammar.cpu_ns, drafts.cpu_ns) > 0
