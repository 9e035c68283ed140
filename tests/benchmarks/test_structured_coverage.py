"""Tests the coverage benchmark with a small suite and with a few schemas."""

import json
import os
import sys
import time

import pytest

SUITE = {
    "type": [
        ({"type": "integer"}, [(1, True), ("1", False)]),  # Every value gets the right verdict.
        ({"type": "integer"}, [(1.0, True), (1, True)]),  # Too strict: 1.0 is refused.
    ],
    "uniqueItems": [({"items": {"type": "string"}, "uniqueItems": True}, [(["a", "a"], False)])],
    "properties": [({"properties": {"a": {"type": "null"}}}, [({"a": None}, True), ({"a": 1}, False)])],
}
ORDERED = {"properties": {"b": {"type": "integer"}, "a": {"type": "integer"}}, "additionalProperties": False}


@pytest.fixture
def suite(tmp_path):
    folder = tmp_path / "suite" / "tests" / "draft2020-12"
    folder.mkdir(parents=True)
    for name, groups in SUITE.items():
        found = [
            {"description": name, "schema": schema, "tests": instances_of(tests)} for schema, tests in groups
        ]
        (folder / f"{name}.json").write_text(json.dumps(found))
    return tmp_path / "suite"


@pytest.fixture
def schemas(tmp_path):
    folder = tmp_path / "schemas"
    folder.mkdir()
    case = {"schema": ORDERED, "tests": instances_of([({"a": 1, "b": 2}, True), ({"a": "1"}, False)])}
    (folder / "Real---one.json").write_text(json.dumps(case))
    (folder / "Handwritten---two.json").write_text(json.dumps(case))
    return folder


def instances_of(tests):
    return [{"data": data, "valid": valid} for data, valid in tests]


def run(module, monkeypatch, capsys, *arguments) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["structured_coverage.py", *map(str, arguments)])
    code = module("structured_coverage").main()
    return code, capsys.readouterr().out


def row(out: str, *cells: object) -> bool:
    """Return whether a table in `out` has a row that begins with these cells."""
    wanted = [str(cell) for cell in cells]
    return any(
        [cell.strip() for cell in line.split("│")[1:-1]][: len(cells)] == wanted for line in out.split("\n")
    )


def test_each_verdict_of_a_suite(module, monkeypatch, capsys, suite, tmp_path):
    out_file = tmp_path / "coverage.md"
    code, out = run(
        module, monkeypatch, capsys, "--suite", suite, "--sides", "mmengine,llguidance", "--out", out_file
    )
    assert row(out, "draft2020-12 type", 2, 1, 0, 1, 0, 0)
    assert row(out, "mmengine", 4, 2, 1, 1, 0, 0)
    # llguidance takes an escaped spelling of a key as another key, so a wrong value for "a" is accepted.
    assert row(out, "llguidance", 4, 1, 1, 1, 1, 0)
    assert code == 1 and "MISSED: draft2020-12: exact" in out
    assert "| draft2020-12 uniqueItems | 1 |" in out_file.read_text()


def test_ours_by_other_bounds_and_by_the_other_backend(module, monkeypatch, capsys, suite):
    """mmengine's verdicts do not change with another `Bounds.ordered` or with xgrammar."""
    pytest.importorskip("xgrammar")
    names = "mmengine/ordered=64", "mmengine/xgrammar"
    _, out = run(module, monkeypatch, capsys, "--suite", suite, "--sides", ",".join(("mmengine", *names)))
    assert all(row(out, name, 4, 2, 1, 1, 0, 0) for name in names), out


def test_an_order_of_keys_is_not_held_against_a_side(module, monkeypatch, capsys, schemas):
    code, out = run(module, monkeypatch, capsys, "--schemas", schemas, "--sides", "mmengine")
    assert row(out, "Real", 1, 1, 0, 0, 0, 0) and row(out, "Handwritten", 1, 1, 0, 0, 0, 0)
    assert code == 0 and "All targets are met" in out


def test_a_side_that_ends_or_hangs_takes_one_schema_with_it(module, monkeypatch, schemas):
    workers, cases = module("structured.coverage_worker"), module("structured.coverage_cases")

    class Bad:
        def __init__(self, vocabulary):
            pass

        def judge(self, schema):
            if schema == "ends":
                os._exit(7)
            if schema == "hangs":
                time.sleep(60)
            return lambda text: True

    monkeypatch.setitem(module("structured.coverage_sides").SIDES, "bad", Bad)
    worker = workers.Worker("bad", None, 1.0)
    try:
        found = [worker.ask(cases.Case("g", name, name, ())) for name in ("ends", "well", "hangs", "well")]
    finally:
        worker.close()
    assert [each.verdict for each in found] == ["crashed", "exact", "crashed", "exact"]
    assert "ended with 7" in found[0].why and "more than 1 s" in found[2].why
