"""Tests benchmarks/cpu/batch_invariant.py with few rows. Times are not checked."""

from tests.benchmarks.test_throughput import call


def test_it_prints_what_the_switch_costs(tmp_path):
    printed = call("batch_invariant", "--rounds", 1, "--most-rows", 2, "--out", tmp_path / "table.md")
    for work in ("a step of 1 rows", "a step of 2 rows", "2 mixed requests"):
        assert work in printed and work in (tmp_path / "table.md").read_text()
