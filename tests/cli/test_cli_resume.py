"""Tests the refusals and messages when a batch is resumed. The engine has no model."""

import json
import os
from functools import partial

import msgspec
import pytest

from mmengine.cli.batch import run_batch_file
from mmengine.config import EngineConfig
from mmengine.core.continuation import open_log
from mmengine.core.resume import Resume
from mmengine.errors import ConfigError, InvalidRequest, LogError
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from mmengine.serve.batch.progress import RequestIndex, answered_in
from mmengine.serve.engine.engine import Engine
from tests.events.logs import rewrite
from tests.forked import exit_code_of
from tests.serve.serve_fakes import builder


def write(path, names, text="hello"):
    lines = [{"custom_id": name, "messages": [{"role": "user", "content": text}]} for name in names]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def run_and_die(folder, steps, **settings):
    """Run the batch in a separate process that exits after `steps` steps."""
    assert exit_code_of(partial(run, folder, steps=steps, **settings)) == 9


def run(folder, *, steps=10**9, **settings):
    def make_engine(resume):
        engine = Engine(builder=builder(**settings), log=folder / "log", resume=resume)
        step, left = engine._core.step, iter(range(steps))

        def dying():
            if next(left, None) is None:
                os._exit(9)
            return step()

        engine._core.step = dying
        return engine

    return run_batch_file(folder / "requests", folder / "answers", folder / "log", make_engine)


def answers(folder):
    return sorted(json.loads(line)["custom_id"] for line in (folder / "answers").read_text().splitlines())


@pytest.fixture
def begun(tmp_path):
    """Return a folder with an interrupted batch of five requests."""
    write(tmp_path / "requests", "abcde")
    run_and_die(tmp_path, 9, max_num_seqs=2)
    assert 0 < len(answers(tmp_path)) < 5
    return tmp_path


def test_resume_reports_the_progress(begun, capsys):
    done = len(answers(begun))
    assert run(begun, max_num_seqs=2) == 0
    printed = capsys.readouterr().err
    assert f"resuming: {done} of 5 lines have their answers" in printed and "computed again" in printed
    assert answers(begun) == list("abcde")
    assert run(begun, max_num_seqs=2) == 0
    assert "all 5 lines have their answers" in capsys.readouterr().err


def test_another_request_file_is_refused(begun):
    write(begun / "requests", "abcdef")
    before = (begun / "answers").read_bytes()
    with pytest.raises(LogError, match="the log in .* belongs to a request file with 5 requests"):
        run(begun)
    assert (begun / "answers").read_bytes() == before


def test_a_log_of_another_kind_is_refused(begun):
    (begun / "log" / "batch.json").unlink()
    with pytest.raises(LogError, match="holds a log that is not a batch"):
        run(begun)
    (begun / "log" / "batch.json").write_text("[]")
    with pytest.raises(LogError, match="cannot be read"):
        run(begun)


@pytest.mark.parametrize(
    "line",
    ['{"custom_id": "x"}', "nonsense", '{"custom_id": null, "error": "line 99: no"}', "[]"],
)
def test_answers_of_another_batch_are_refused(begun, line):
    with (begun / "answers").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(InvalidRequest, match="does not answer a request of this batch"):
        run(begun)


def test_two_answers_to_one_request_are_refused(begun):
    text = (begun / "answers").read_text()
    (begun / "answers").write_text(text + text.splitlines()[0] + "\n")
    with pytest.raises(InvalidRequest, match="answers a request that an earlier line answers"):
        run(begun)


def test_lines_without_an_id_are_identified_by_number(tmp_path):
    (tmp_path / "requests").write_text('{"custom_id": "a"}\n\nno json\n{"custom_id": "a"}\nno json\n')
    index = RequestIndex(tmp_path / "requests")
    assert index.numbers == [1, 3, 4, 5] and index.custom_ids == ["a", None, "a", None]
    lines = [
        '{"custom_id":null,"line":5,"error":"no"}',
        '{"custom_id":"a","line":4,"error":"it stands"}',
    ]
    (tmp_path / "answers").write_text("\n".join(lines) + "\n" + '{"custom_id":null,"line":3')
    assert answered_in(tmp_path / "answers", index) == {2, 3}
    (tmp_path / "answers").write_text('{"custom_id":"a","text":"x"}\n')
    assert answered_in(tmp_path / "answers", index) == {0}


def test_settings_that_differ_from_the_logs_are_refused(begun):
    for name, value in {"max_num_seqs": 3, "token_budget": 99, "num_blocks": 150}.items():
        with pytest.raises(ConfigError, match=f"the log was begun with {name}"):
            open_log(begun / "log", Resume(), EngineConfig(**{name: value}))
    opened = open_log(begun / "log", Resume(), EngineConfig(log_sync="never", snapshot_bytes=7))
    config = opened.resumed.config_for(EngineConfig(log_sync="never", snapshot_bytes=7))
    assert (config.max_num_seqs, config.log_sync, config.snapshot_bytes) == (2, "never", 7)
    opened.sink.close()


def test_other_weights_are_refused_unless_forced(begun):
    opened = open_log(begun / "log", Resume(), EngineConfig())
    before = {"weights": "a" * 64, "dtype": "float32"}
    opened.resumed.fingerprints = before
    with pytest.raises(
        LogError, match=r"a different dtype \(was float32, is bfloat16\), weights \(was aaaaaaaaaaaa, is bbbb"
    ):
        opened.check_fingerprints({"weights": "b" * 64, "dtype": "bfloat16"}, Resume())
    opened.check_fingerprints(before, Resume())
    opened.check_fingerprints({"weights": "b" * 64, "dtype": "float32"}, Resume(force=True))
    assert opened.resumed.recovered(()).fingerprints["weights"] == "b" * 64
    opened.sink.close()


def test_rules_of_another_build_are_refused(begun, tmp_path):
    records = list(LogReader(begun / "log"))
    started = msgspec.structs.replace(records[0].event, decision_version=99, engine_version="7.0")
    records[0] = msgspec.structs.replace(records[0], event=started)
    rewrite(records, tmp_path / "other")
    with pytest.raises(LogError, match="written under decision rules 99, .* finish it with mmengine 7.0"):
        open_log(tmp_path / "other", Resume(), EngineConfig())


def test_a_log_without_records_is_started(tmp_path):
    """The process was killed before the log's first record was complete."""
    write(tmp_path / "requests", "ab")
    run_and_die(tmp_path, 0)
    (tmp_path / "log" / f"{0:020d}.mmlog").write_bytes(b"MM")
    assert run(tmp_path) == 0 and answers(tmp_path) == ["a", "b"]
    assert isinstance(next(iter(LogReader(tmp_path / "log"))).event, ev.Started)


def test_a_log_is_not_resumed_without_request(begun):
    with pytest.raises(LogError, match="has a log already"):
        Engine(builder=builder(), log=begun / "log")
