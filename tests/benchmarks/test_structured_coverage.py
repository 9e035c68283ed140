"""The coverage benchmark on a small suite of its own."""

import json
import sys

import pytest

GROUPS = {
    "type": [
        ({"type": "integer"}, [(1, True), ("1", False)]),  # exact
        ({"type": "integer"}, [(1.0, True), (1, True)]),  # over-restrictive: 1.0 is not written
    ],
    "not": [({"not": {"const": 1}}, [(1, False)])],  # refused
    "properties": [({"properties": {"a": {"type": "null"}}}, [({"a": None}, True), ({"a": 1}, False)])],
}


@pytest.fixture
def suite(tmp_path):
    folder = tmp_path / "tests" / "draft2020-12"
    folder.mkdir(parents=True)
    for name, groups in GROUPS.items():
        found = [
            {"description": name, "schema": s, "tests": [{"data": d, "valid": v} for d, v in tests]}
            for s, tests in groups
        ]
        (folder / f"{name}.json").write_text(json.dumps(found))
    return tmp_path


def run(module, monkeypatch, capsys, suite, *more: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["structured_coverage.py", "--suite", str(suite), *more])
    monkeypatch.setitem(module("structured_coverage").TARGETS, "exact", 2)
    code = module("structured_coverage").main()
    return code, capsys.readouterr().out


def test_each_verdict(module, monkeypatch, capsys, suite):
    code, out = run(module, monkeypatch, capsys, suite)
    assert "| type | 2 | 1 | 0 | 1 | 0 |" in out
    assert "| not | 1 | 0 | 1 | 0 | 0 |" in out
    assert "| **all** | 4 | 2 | 1 | 1 | 0 |" in out
    assert code == 0 and "held" in out


def test_without_the_gate_another_spelling_of_a_key_is_wrong(module, monkeypatch, capsys, suite):
    code, out = run(module, monkeypatch, capsys, suite, "--bare")
    assert "| properties | 1 | 0 | 0 | 0 | 1 |" in out
    assert code == 1 and "MISSED" in out
