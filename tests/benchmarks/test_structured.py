"""Tests that the grammar benchmark runs, and that the answers in its data satisfy their schemas."""

import base64
import json
import sys
from decimal import Decimal
from pathlib import Path

import jsonschema
import pytest

SCHEMAS = Path(__file__).resolve().parents[2] / "benchmarks" / "structured" / "schemas.jsonl"
PATTERN = r"\p{L}+|\p{N}|[^\s\p{L}\p{N}]+|\s+"


@pytest.fixture
def vocabulary(tmp_path):
    """Write a vocabulary file in mistral-common's format, with all bytes and a few longer tokens."""
    pairs = [b'{"', b'":', b'","', b'"}', b"la", b"lab", b"label", b"me", b"name"]
    tokens = [bytes([byte]) for byte in range(256)] + pairs
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens)
    ]
    path = tmp_path / "tokens.json"
    config = {"pattern": PATTERN, "default_num_special_tokens": 10}
    path.write_text(json.dumps({"config": config, "vocab": entries}))
    return path


def exact(text):
    """Parse JSON with decimals, for exact multipleOf checks."""
    return json.loads(text, parse_float=Decimal)


def test_every_answer_fits_its_schema():
    lines = SCHEMAS.read_text(encoding="utf-8").splitlines()
    names = [exact(line)["name"] for line in lines]
    assert len(names) == len(set(names)) and 20 <= len(names) <= 40
    for case in map(exact, lines):
        validator = jsonschema.Draft202012Validator(
            case["schema"], format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        assert case["answers"]
        for answer in case["answers"]:
            validator.validate(answer)


def test_text_is_spelled_by_the_lowest_pairs(module, vocabulary):
    """A word in the vocabulary is one token. In any other word, the pair of lowest rank is merged first."""
    words = module("structured.vocabulary").Tekken(vocabulary)
    tokens = words.encode('{"label":"né"}')
    assert [words.tokens[token] for token in tokens] == [
        b'{"', b"label", b'":', b'"', b"n", b"\xc3", b"\xa9", b'"}',
    ]  # fmt: skip
    assert len(words) == 10 + 256 + 9 and words.tokens[:10] == [b""] * 10


def test_a_missing_vocabulary_is_named_with_the_way_to_bring_it(module, monkeypatch):
    finder = module("structured.vocabulary")
    monkeypatch.setattr(finder.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install --no-deps mistral-common"):
        finder.find(None)


def test_rows_fill_the_same_masks_on_every_side_of_one_library(module, vocabulary):
    """mmengine and the bare llguidance fill equal masks for equal tokens."""
    sides = module("structured.sides")
    words = module("structured.vocabulary").Tekken(vocabulary)
    case = sides.Case.of(SCHEMAS.read_text(encoding="utf-8").splitlines()[0], words)
    both = [sides.Ours(words), sides.BareLLGuidance(words, gated=True)]
    ours, bare = (side.begin([side.compile(case)] * 3, [[], case.answers[0][:4], []]) for side in both)
    for first, second in zip(case.answers[0], case.answers[0][4:-1], strict=False):
        ours.fill()
        bare.fill()
        assert (ours.bits == bare.bits).all()
        ours.advance([first, second, first])
        bare.advance([first, second, first])


def test_a_quick_run_ends_with_a_table_and_its_targets(module, vocabulary, tmp_path, monkeypatch, capsys):
    out = tmp_path / "table.md"
    command = ["structured.py", "--quick", "--json", "--vocabulary", str(vocabulary), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    benchmark = module("structured.structured")
    monkeypatch.setattr(benchmark, "NUM_ROWS", 3)
    # The benchmark must not restrict this process, because later tests may use all CPUs.
    monkeypatch.setattr(benchmark, "usable_cpus", list)
    benchmark.main()
    *_, verdict, last = capsys.readouterr().out.splitlines()
    targets = json.loads(last)["targets"]
    missed = [name for name, each in targets.items() if not each["met"]]
    assert len(targets) == 15 and all(each["measured"] > 0 for each in targets.values())
    assert verdict == ("MISSED: " + "; ".join(missed) if missed else "All targets are met.")
    text = out.read_text()
    assert text.count("\n## ") == 7 and "| invoice |" in text and "| our gate, before |" in text
