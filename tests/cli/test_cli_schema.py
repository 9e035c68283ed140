"""Tests `mmengine schema check` with a file, a folder and standard input, and its options."""

import io
import json
import sys
from pathlib import Path

import pytest

from tests.cli.cli_process import call_cli, loaded, run_cli

POINT = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}
WRONG = {"type": "object", "properties": {"x": {"minLength": -1}}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, value in (
        ("a.json", POINT),
        ("b.json", WRONG),
        ("c.json", {"description": "of a benchmark", "schema": {"format": "time"}, "tests": []}),
        ("in/d.json", {"type": "json_schema", "json_schema": {"name": "n", "schema": POINT, "strict": True}}),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(value))
    return tmp_path


def test_one_file(folder: Path) -> None:
    found = run_cli("schema", "check", str(folder / "a.json"), "--strict")
    assert found.returncode == 0 and "a.json: exact" in found.stdout
    assert "additionalProperties must be false" in found.stdout and "compilation" in found.stdout
    assert "torch" not in loaded(found)


def test_a_refusal_names_the_place(folder: Path) -> None:
    found = call_cli("schema", "check", str(folder / "b.json"))
    assert found.returncode == 1 and "minLength at #/properties/x/minLength" in found.stdout


def test_a_folder_is_a_table(folder: Path) -> None:
    found = call_cli("schema", "check", str(folder), env={"COLUMNS": "300"})
    assert found.returncode == 1 and "#/properties/x/minLength" in found.stdout
    assert "4 schemas: 2 exact (50.0 %)" in found.stdout and "1 refused by minLength" in found.stdout


def test_json(folder: Path) -> None:
    found = call_cli("schema", "check", str(folder), "--json")
    *lines, last = [json.loads(line) for line in found.stdout.splitlines()]
    assert [Path(line["file"]).name for line in lines] == ["a.json", "b.json", "c.json", "d.json"]
    assert [line["verdict"] for line in lines] == ["exact", "refused", "approximated", "exact"]
    assert last == {
        "summary": {"exact": 2, "refused": 1, "approximated": 1},
        "refused_by_keyword": {"minLength": 1},
    }


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        (b'{"type":"null"}', 0, "exact"),
        (b'{"type":"nul"}', 1, "type at #/type"),
        (b"{", 2, "it is not JSON"),
        (b"[" * 100_000, 2, "cannot be read"),
        (b" " * (2**21 + 1), 2, "more than 2,097,152 bytes"),
        (b'"a"', 1, "must be an object, true or false"),
        (b'{"type":"string","x-y\\u001b[31m":1}', 0, "exact"),
    ],
)
def test_standard_input_and_no_traceback(
    text: bytes, code: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    found = call_cli("schema", "check", "-")
    out = found.stdout + found.stderr
    assert (found.returncode, "Traceback" in out, "\x1b" in out) == (code, False, False) and says in out


def test_an_unreadable_path(tmp_path: Path) -> None:
    found = call_cli("schema", "check", str(tmp_path / "nowhere.json"))
    assert found.returncode == 2 and "No such file" in found.stdout
    assert "contains no .json files" in call_cli("schema", "check", str(tmp_path)).stderr
    assert "there is no folder" in call_cli("schema", "check", "-", "--tokenizer", "nowhere").stderr


def test_masks_are_timed_for_a_tokenizer(folder: Path) -> None:
    from mmengine_shapes import checkpoint_path

    found = call_cli("schema", "check", str(folder / "a.json"), "--tokenizer", str(checkpoint_path()))
    assert found.returncode == 0 and "a mask" in found.stdout


def test_another_grammar_backend_is_used(tmp_path: Path) -> None:
    pytest.importorskip("xgrammar")
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"type": "object", "properties": dict.fromkeys("abcde", {"const": 1})}))
    asked = ("schema", "check", str(path), "--no-bounds")
    assert "a.json: exact" in call_cli(*asked).stdout
    found = call_cli(*asked, "--grammar-backend", "xgrammar", env={"COLUMNS": "300"})
    assert found.returncode == 0 and "a.json: approximated" in found.stdout
    assert (
        "other keys after them: a, b, c, d, e; grammar_backend xgrammar supports no other order"
        in found.stdout
    )
    found = call_cli(*asked, "--grammar-backend", "outlines")
    assert found.returncode == 2 and "choose one of llguidance, xgrammar" in found.stderr.replace("\n", " ")


def test_unknown_keywords_can_be_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"x-a": 1}')
    assert call_cli("schema", "check", str(tmp_path / "a.json")).returncode == 0
    found = call_cli("schema", "check", str(tmp_path / "a.json"), "--strict-keywords")
    assert found.returncode == 1 and "x-a at #/x-a" in found.stdout
