"""Tests that random answers that follow the grammar's masks are valid against the schema."""

import json
import sys

import pytest


def run(module, monkeypatch, capsys, *arguments) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["structured_generations.py", *map(str, arguments)])
    code = module("structured.structured_generations").main()
    said = capsys.readouterr()
    return code, said.out + said.err


def test_answers_are_valid(module, monkeypatch, capsys):
    code, said = run(module, monkeypatch, capsys, "--budget", 60)
    assert code == 0 and "close, greedy" in said, said


def test_an_answer_that_is_invalid_is_found(module, monkeypatch, capsys, tmp_path):
    """The validator and the grammar get different schemas, so every answer is invalid."""
    case = {"schema": {"enum": ["a", "b"]}, "tests": []}
    (tmp_path / "Real---one.json").write_text(json.dumps(case))
    generations = module("structured.structured_generations")
    known = generations.validator_of
    monkeypatch.setattr(generations, "validator_of", lambda schema: known({"const": "c"}))
    code, said = run(module, monkeypatch, capsys, "--schemas", tmp_path, "--verbose")
    assert code == 1 and "'c' was expected" in said, said


@pytest.mark.soak
@pytest.mark.parametrize("ordered", [4, 0])
@pytest.mark.parametrize("seed", range(4))
def test_many_answers_are_valid(module, monkeypatch, capsys, seed, ordered):
    more = "--rounds", 10, "--seed", seed, "--ordered", ordered, "--verbose"
    code, said = run(module, monkeypatch, capsys, "--budget", 400, *more)
    assert code == 0, said
