"""Tests that an error for an invalid request line (not JSON or not Unicode) has the line's custom_id."""

import json
import os

import pytest

from mmengine.errors import InvalidRequest
from mmengine.request import SamplingParams
from mmengine.serve.engine.engine import Engine
from mmengine.serve.prompt.request_lines import custom_id_of, encode_line, parse_fields, read_head
from tests.cli.test_cli_batch import answer
from tests.cli.test_cli_resume import run as run_batch
from tests.serve.serve_fakes import builder

ASKED = '"messages":[{"role":"user","content":"hello"}]}'
# (line, custom_id if readable, error)
LINES = [
    (r'{"custom_id":"a\ud800",' + ASKED, "a\ud800", r"custom_id holds an unpaired surrogate (\ud800)"),
    (
        r'{"messages":[{"role":"user","content":"x\uDFFF"}],"custom_id":"b"}',
        "b",
        r"messages[0].content holds an unpaired surrogate (\udfff), which is not a character; write both",
    ),
    (r'{"custom_id":"c","stop":["\udc00"],' + ASKED, "c", "stop[0] holds an unpaired surrogate"),
    (r'{"custom_id":"d","\ud800":1,' + ASKED, "d", "a field name holds an unpaired surrogate"),
    (r'{"custom_id":"\ud83d\ude00",' + ASKED, "😀", ""),
    (b'{"custom_id":"f","messages":"\xed\xa0\x80"}', "f", "not UTF-8"),
    (b'{"custom_id":"g","messages":"\xff\\"', "g", "not valid JSON"),
    (b'{"custom_id":"\xff"}', None, "not UTF-8"),
    ('{"custom_id":"i","messages":' + "[" * 50_000 + "]" * 50_000 + "}", "i", "nested too deep"),
    ('{"custom_id":"j","n":1' + "0" * 5_000 + "}", "j", "not valid JSON"),
    (r'{"custom_id":"k\"k","messages":[', 'k"k', "not valid JSON"),
    (r'{"custom_id":"k', None, "not valid JSON"),
    ('{"custom_id":"' + "l" * 201 + '"}', None, "custom_id must be a string of 1 to 200"),
    (r'{"custom_id":"a\ud800",' + ASKED, "a\ud800", r"the custom_id 'a\ud800' occurs in an earlier line"),
]


def encoded(line):
    return line.encode() if isinstance(line, str) else line


@pytest.mark.parametrize(("line", "name", "says"), LINES[:-2])
def test_a_line_that_is_refused_keeps_its_custom_id(line, name, says):
    assert custom_id_of(encoded(line)) == name
    if says:
        with pytest.raises(InvalidRequest) as refusal:
            parse_fields(encoded(line))
        assert says in str(refusal.value) and "codec" not in str(refusal.value)


def test_a_custom_id_that_is_too_long_is_ignored():
    assert custom_id_of(encoded(LINES[-2][0])) is None


def test_a_batch_answers_each_line_by_its_custom_id(tmp_path):
    code, answers = answer(tmp_path, [line for line, *_ in LINES])
    assert code == 1 and sorted(ascii(one["custom_id"]) for one in answers) == sorted(
        ascii(name) for _, name, _ in LINES
    )
    for number, (_, name, says) in enumerate(LINES, 1):
        said = [one.get("error", "") for one in answers if one["custom_id"] == name]
        assert any(says in each and each.startswith(f"line {number}: "[: bool(says) * 99]) for each in said)


def test_an_answer_with_half_a_pair_is_read_again():
    # A custom_id with an unpaired surrogate is written to the answer's line and read back.
    line = encode_line({"custom_id": "a\ud800ü", "error": "line 3: x"})
    assert line.endswith(b"\n") and json.loads(line)["custom_id"] == "a\ud800ü"
    assert (read_head(line).custom_id, read_head(line).error) == ("a\ud800ü", "line 3: x")
    assert encode_line({"custom_id": "ü"}) == '{"custom_id":"ü"}\n'.encode()


def test_a_batch_continues_after_invalid_lines(tmp_path):
    (tmp_path / "requests").write_bytes(b"\n".join(encoded(line) for line, *_ in LINES))
    assert run_batch(tmp_path) == 1
    kept = (tmp_path / "answers").read_bytes().splitlines(keepends=True)
    assert len(kept) == len(LINES)
    (tmp_path / "answers").write_bytes(b"".join(kept[::2]))
    assert run_batch(tmp_path) == 1
    assert sorted((tmp_path / "answers").read_bytes().splitlines(keepends=True)) == sorted(kept)


@pytest.mark.parametrize("field", ["stop", "cache_salt"])
def test_unpaired_surrogates_are_reported(field):
    with (
        Engine(builder=builder()) as engine,
        pytest.raises(InvalidRequest, match=f"^{field} holds an unpaired surrogate at character 1; send"),
    ):
        engine.submit("hello", **{field: "a\ud800"})
    with pytest.raises(InvalidRequest, match="^stop holds an unpaired surrogate at character 0"):
        SamplingParams(stop=("\ud800",)).check()


def test_files_beside_a_batch_log_are_private(tmp_path):
    (tmp_path / "requests").write_text(r'{"custom_id":"a",' + ASKED)
    before = os.umask(0)
    try:
        assert run_batch(tmp_path, snapshot_bytes=1) == 0
    finally:
        os.umask(before)
    found = [tmp_path / "log", *(tmp_path / "log").rglob("*")]
    assert {"batch.json", "lock"} < {path.name for path in found} and len(found) > 4
    for path in found:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path.name
