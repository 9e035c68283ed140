"""Tests benchmarks/core/stress.py with more requests than fit into the block pool, and with trace files."""

import importlib
import sys

import pytest

TRACES = {
    "code.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,4808,10\n"
    "2023-11-16 18:17:04.0,3180,8\n",
    "kept.jsonl": '{"timestamp": 0, "input_length": 1200, "output_length": 3, "hash_ids": [0, 1, 2]}\n' * 2,
    "images.jsonl": '{"t": 0.5, "text_tokens": 9, "output_tokens": 4, "image_tokens": 9, "image_count": 2}\n',
    "notes.md": "not a trace",
}


@pytest.fixture
def stress(monkeypatch, tmp_path):
    """Return a function that runs stress.py with arguments and returns the exit code."""
    module = importlib.import_module("benchmarks.core.stress")

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["stress.py", *map(str, words)])
        return module.main()

    call.module = module
    return call


def cells(line):
    return [cell.strip() for cell in line.strip("| ").split("|")]


def tables(text):
    """Return the rows of all Markdown tables in `text`, as dicts by column name."""
    rows, head = [], None
    for line in text.splitlines():
        if not line.startswith("|"):
            head = None
        elif head is None:
            head = cells(line)
        elif "---" not in line:
            rows.append(dict(zip(head, cells(line), strict=True)))
    return rows


def test_all_answers_are_right_although_the_pool_is_too_small(stress, tmp_path, capsys):
    traces = tmp_path / "traces"
    traces.mkdir()
    for name, text in TRACES.items():
        (traces / name).write_text(text)
    assert stress("--requests", 200, "--traces", traces, "--out", tmp_path / "new" / "table.md") == 0
    text = capsys.readouterr().out
    assert (tmp_path / "new" / "table.md").read_text() == text and "token by token: equal" in text
    runs, traced = tables(text)[:6], tables(text)[6:]
    for row in runs:
        assert (row["requests"], row["wrong answers"], row["verified"]) == ("200", "0", "yes")
        assert int(row["preemptions"]) > 50
    assert [int(row["blocks swapped"]) > 100 for row in runs] == [False, True] * 3
    assert [(row["trace"], row["requests"], row["finished"]) for row in traced] == [
        ("code.csv", "2", "2"),
        ("images.jsonl", "1", "1"),
        ("kept.jsonl", "2", "2"),
    ]


def test_a_wrong_answer_fails_the_run(stress, monkeypatch, capsys):
    right = stress.module.reference_tokens
    monkeypatch.setattr(
        stress.module,
        "reference_tokens",
        lambda request, *rest, **options: (
            ([-1], "length") if request.request_id == "r7" else right(request, *rest, **options)
        ),
    )
    assert stress("--requests", 20) == 1
    assert [row["wrong answers"] for row in tables(capsys.readouterr().out)] == ["1"] * 6


def test_a_request_that_a_trace_refuses_fails_the_run(stress, tmp_path, capsys):
    (tmp_path / "long.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,900000,10\n"
    )
    assert stress("--requests", 5, "--traces", tmp_path) == 1
    assert tables(capsys.readouterr().out)[6]["refused"] == "1"


@pytest.mark.soak
def test_ten_thousand_requests(stress, capsys):
    assert stress("--requests", 10_000) == 0, capsys.readouterr().out
