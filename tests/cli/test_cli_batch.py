"""Tests batches from the request file to the answer file, with a fake model."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mmengine.cli.batch import _deliver, run_batch_file
from mmengine.errors import InvalidRequest
from mmengine.serve.batch import request_file as batchfile
from mmengine.serve.batch.progress import AnswerFile, RequestIndex, answered_in
from mmengine.serve.engine.engine import Engine
from tests.serve.serve_fakes import builder
from tests.server.batching import Failing

ROOT = Path(__file__).parents[2]


def line(custom_id, text, **fields):
    return json.dumps({"custom_id": custom_id, "messages": [{"role": "user", "content": text}], **fields})


def answer(tmp_path, lines, **settings):
    requests, out = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    requests.write_bytes(b"\n".join(one.encode() if isinstance(one, str) else one for one in lines))
    code = run_batch_file(requests, out, None, lambda resume: Engine(builder=builder(**settings)))
    return code, [json.loads(one) for one in out.read_bytes().splitlines()]


def test_every_line_gets_an_answer_or_an_error(tmp_path):
    lines = [
        line("a", "hello", max_tokens=20),
        "",
        "not json",
        line("b", "bad image"),
        line("c", "hello", temperature="warm"),
        line("d", "hello", tempature=1),
        line("a", "again"),
        json.dumps({"custom_id": "e"}),
        json.dumps(["custom_id"]),
        json.dumps({"messages": []}),
        line("f", "hello", max_tokens=0),
        b"\xff\xfe{}",
        '{"custom_id": "g", "temperature": NaN}',
        b"[" * 100_000,
        line("h", "hello you", n=2, max_tokens=3, stop="X", seed=5),
        line("i", "one two", stop=[" T"], logprobs=None),
    ]
    code, answers = answer(tmp_path, lines)
    assert code == 1 and len(answers) == 15
    by_id = {one["custom_id"]: one for one in answers if one["custom_id"] is not None}
    errors = [one for one in answers if "error" in one]
    assert all(set(one) - {"line"} == {"custom_id", "error"} for one in errors) and len(errors) == 12
    assert sum(one["custom_id"] is None for one in errors) == 5
    assert list(by_id["i"]) == ["custom_id", "text", "token_ids", "finish_reason", "usage"]
    assert by_id["i"]["text"] == "ONE" and by_id["i"]["finish_reason"] == "stop"
    assert list(by_id["h"]) == ["custom_id", "choices", "usage"]
    assert by_id["h"]["choices"][1] == {
        "index": 1, "text": "HEL", "token_ids": [72, 69, 76], "finish_reason": "length",
    }  # fmt: skip
    assert by_id["h"]["usage"]["completion_tokens"] == 6
    assert by_id["b"]["error"] == "image 1 is no image"
    assert "line 5: " in by_id["c"]["error"] and "tempature" in by_id["d"]["error"]
    assert any(one["error"].startswith("line 7: the custom_id 'a'") for one in errors)


def test_the_exit_code_says_whether_lines_have_errors(tmp_path, capfd):
    assert answer(tmp_path, [line("a", "hello")])[0] == 0
    assert answer(tmp_path, [line("a", "hello", max_tokens=0)])[0] == 1
    requests, out, log = (tmp_path / name for name in ("requests.jsonl", "answers.jsonl", "log"))
    requests.write_text("\n".join([line("a", "hello"), line("b", "bad image")]))
    for _ in range(2):  # The second run finds all lines answered.
        make = lambda resume: Engine(builder=builder(), log=log, resume=resume)  # noqa: E731
        assert run_batch_file(requests, out, log, make) == 1
    assert capfd.readouterr().err.endswith("\n1 of them are errors\n")


def test_an_openai_batch_line_is_refused_with_a_hint(tmp_path):
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    openais = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    code, (said,) = answer(tmp_path, [json.dumps(openais)])
    assert code == 1 and "/v1/batches" in said["error"] and "the fields of body" in said["error"]


def test_a_line_may_request_a_grammar(tmp_path):
    lines = [
        line("a", "hello", max_tokens=20, response_format={"type": "json_object"}),
        line("b", "hello", max_tokens=3, grammar={"regex": "[A-Z]+"}),
        line("c", "hello", response_format={"type": "xml"}),
        line("d", "hello", grammar={"choice": []}),
        line("e", "hello", response_format={"type": "text"}, stop="X"),
        line("f", "hello", response_format={"type": "json_object"}, min_tokens=2),
    ]
    by_id = {one["custom_id"]: one for one in answer(tmp_path, lines)[1]}
    assert by_id["a"]["text"] == by_id["e"]["text"] == "HELLO" and "detail" not in by_id["a"]
    assert by_id["b"]["finish_reason"] == "length" and "does not match its format" in by_id["b"]["detail"]
    assert by_id["c"]["error"].startswith("line 3: response_format.type must be text,")
    assert by_id["d"]["error"].startswith("line 4: grammar.choice must be a list of 1 to")
    assert by_id["f"]["error"].startswith("line 6: min_tokens cannot go with a schema or a grammar")


def test_a_line_that_is_too_long_is_not_read_into_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(batchfile, "MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(batchfile, "_CHUNK", 100)
    code, answers = answer(tmp_path, [line("a", "x" * 5000), line("b", "hello", max_tokens=9)])
    assert code == 1 and sorted(one.get("text", "") for one in answers) == ["", "HELLO"]
    assert any("longer than" in one.get("error", "") for one in answers)


def test_more_lines_than_the_queue_holds(tmp_path):
    code, answers = answer(
        tmp_path, [line(f"{k}", f"text {k}", max_tokens=20) for k in range(60)], max_waiting=2
    )
    assert code == 0
    assert {one["custom_id"]: one["text"] for one in answers} == {f"{k}": f"TEXT {k}" for k in range(60)}


def test_the_request_file_is_not_overwritten(tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_text(line("a", "hello"))
    with pytest.raises(InvalidRequest, match="request file itself"):
        run_batch_file(path, path, None, lambda resume: Engine(builder=builder()))
    assert path.read_text()


SLOW = """
import sys, time
from pathlib import Path
from mmengine.cli.batch import run_batch_file
from mmengine.serve.engine.engine import Engine
from tests.serve import serve_fakes as fakes

collect = fakes.EchoExecutor.collect
def slow(self):
    time.sleep(0.01)
    return collect(self)
fakes.EchoExecutor.collect = slow
folder = Path(sys.argv[1])
sys.exit(run_batch_file(folder / "r", folder / "a", folder / "log",
                        lambda resume: Engine(builder=fakes.builder(), log=folder / "log")))
"""


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_once_finishes_running_requests_and_twice_stops(tmp_path, times):
    (tmp_path / "r").write_text(
        "\n".join(line(f"{k}", "w" * (5 + k % 60), max_tokens=300) for k in range(400))
    )
    process = subprocess.Popen([sys.executable, "-c", SLOW, str(tmp_path)], cwd=ROOT, stderr=subprocess.PIPE)
    answers = tmp_path / "a"
    while not answers.exists() or answers.stat().st_size == 0:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    for _ in range(times):
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 130 and b"finishing running requests" in printed
    assert b"Traceback" not in printed and b"lines have no answer" in printed
    written = [json.loads(one) for one in answers.read_bytes().splitlines()]
    assert 1 <= len(written) < 400 and all(one["finish_reason"] == "stop" for one in written)
    from mmengine.replay.verify import verify

    report = verify(tmp_path / "log")
    assert report.ok and report.unfinished == []
    assert report.requests >= len(written) and (times == 2 or report.requests == len(written))


@pytest.mark.parametrize("replaced", [False, True])
def test_a_lost_answer_file_is_noticed(tmp_path, replaced):
    requests, out = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    requests.write_text(line("a", "hello"))
    answers = AnswerFile(out, RequestIndex(requests), fresh=True)
    answers.check_place()
    out.rename(tmp_path / "elsewhere")
    if replaced:
        out.touch()
    answers.write(b'{"custom_id": "a"}\n', "a")
    told = []
    engine = SimpleNamespace(requests=SimpleNamespace(delivered=told.append))
    with pytest.raises(FileNotFoundError, match="the answer file was removed or replaced"):
        _deliver(engine, answers, now=True)
    assert told == [], "a lost answer must not be logged as delivered"
    answers.close()


def test_a_line_torn_by_a_full_disk_is_removed(tmp_path):
    requests, out = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    requests.write_text("\n".join(line(name, "hello") for name in "ab"))
    index = RequestIndex(requests)
    answers = AnswerFile(out, index, fresh=True)
    answers.write(b'{"custom_id": "a"}\n', "a")
    answers._file = Failing(answers._file)
    with pytest.raises(OSError, match="No space left"):
        answers.write(b'{"custom_id": "b"}\n', "b")
    assert out.read_bytes() == b'{"custom_id": "a"}\n'
    answers.write(b'{"custom_id": "b"}\n', "b")
    assert answers.delivered(now=True) == ["a", "b"]
    answers.close()
    assert answered_in(out, index) == {0, 1}
