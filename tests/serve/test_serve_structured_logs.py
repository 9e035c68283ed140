"""Tests logs of structured answers: they verify without the grammar engine, and another process can continue
them.
"""

import itertools
import threading

import pytest

from mmengine.build import build
from mmengine.config import EngineConfig
from mmengine.core.resume import Resume
from mmengine.errors import InvalidRequest
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from mmengine.replay.verify import verify
from mmengine.serve.engine.engine import Engine
from tests.cli.cli_process import run_cli
from tests.log_copies import copied
from tests.serve.test_serve_structured import (
    QUESTIONS,
    RECORD,
    SCHEMAS,
    SMALL,
    TREE,
    answers,
    check,
    form,
    jobs,
)

pytest.importorskip("mmengine_shapes")


def test_a_log_is_verified_without_the_grammar_engine(tmp_path):
    asked = list(jobs(24, 1.0, 60))
    with Engine(config=EngineConfig(num_blocks=19, **SMALL), log=tmp_path / "log") as engine:
        answers(engine, asked)
        assert engine.stats().num_preemptions
    kinds = [type(record.event) for record in LogReader(tmp_path / "log")]
    assert kinds.count(ev.GrammarReady) == 21
    result = run_cli("log", "verify", str(tmp_path / "log"), blocked=("llguidance", "torch"))
    assert result.returncode == 0 and "verified: no divergence" in result.stdout


def test_another_process_goes_on_in_the_middle_of_an_answer(tmp_path):
    """The test resumes from copies of the log, as a killed process would leave them."""
    folders, wanted, begins = {}, {}, threading.Event()

    def make(*given, **options):
        def compile_grammar(grammar):
            begins.wait(60)
            return built.grammars.backend.compile(grammar)

        built = build(*given, compile_grammar=compile_grammar, **options)
        return built

    with Engine(config=EngineConfig(**SMALL), builder=make, log=tmp_path / "log") as engine:
        for name, schema in zip("abcd", [RECORD, TREE, SCHEMAS[2], RECORD], strict=True):
            options = {"max_tokens": 50, "temperature": 1.0, "seed": 5, "n": 2 if name == "d" else 1}
            engine.submit(QUESTIONS[0], request_id=name, response_format=form(schema), **options)
        for step in itertools.count():
            for output in engine.step(received=False):
                wanted[output.request_id] = output.completion or wanted.get(output.request_id)
            if engine.is_idle:
                break
            if engine.stats().num_output_tokens >= (0, 20, 50, 10**9)[len(folders)]:
                folders[step] = copied(tmp_path / "log", tmp_path / f"log{step}")
                begins.set()
    kinds = [type(record.event) for record in LogReader(folders[0])]
    assert ev.Queued in kinds and ev.GrammarReady not in kinds
    assert len(folders) == 3
    for step, folder in folders.items():
        with Engine(log=folder, resume=Resume()) as engine:
            found = {name: engine.requests.resume(name, 2 if name == "d" else 1) for name in "abcd"}
            assert not all(found.values())
            while not engine.is_idle:
                for output in engine.step():
                    found[output.request_id] = output.completion or found[output.request_id]
        for name, answer in wanted.items():
            assert [c.token_ids for c in found[name].choices] == [c.token_ids for c in answer.choices], step
        check([(RECORD, None)], {0: found["a"]})
        assert verify(folder).ok


def test_a_grammar_that_cannot_be_compiled_again_ends_its_request(tmp_path):
    one_by_one = EngineConfig(spec="none")  # drafts would complete these answers in their second step
    with Engine(config=one_by_one, log=tmp_path / "log") as engine:
        for name in ("bad", "good"):
            grammar = {"choice": [f"a {name} answer that takes some tokens"]}
            engine.submit("Say.", request_id=name, grammar=grammar)
        while not any(output.request_id == "bad" for output in engine.step(received=False)):
            pass  # the grammars may be compiled in any order
        assert "bad" in engine.requests
        copied(tmp_path / "log", tmp_path / "copy")
        while not engine.is_idle:
            engine.step()

    def make(*given, **options):
        def compile_grammar(grammar):
            if "bad" in grammar.source:
                raise InvalidRequest("gone")
            return built.grammars.backend.compile(grammar)

        built = build(*given, compile_grammar=compile_grammar, **options)
        return built

    with Engine(config=one_by_one, log=tmp_path / "copy", resume=Resume(), builder=make) as engine:
        found = {name: engine.requests.resume(name) for name in ("bad", "good")}
        while not engine.is_idle:
            for output in engine.step():
                found[output.request_id] = output.completion or found[output.request_id]
    assert found["good"].text == "a good answer that takes some tokens"
    assert "gone" in str(found["bad"].error())
