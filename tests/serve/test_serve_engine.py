# Tests Engine: generate, submit, batches, errors and the log, with an executor that echoes prompts.

import errno
import itertools
import subprocess
import sys
import threading

import pytest
import torch

from mmengine.config import EngineConfig
from mmengine.errors import ConfigError, InvalidMedia, InvalidRequest, LogError, QueueFull
from mmengine.events.log import LogReader, LogWriter
from mmengine.events.vocabulary import Delivered, Finished, Queued
from mmengine.replay.verify import verify
from mmengine.request import SamplingParams
from mmengine.serve.batch.run_batch import run_batch
from mmengine.serve.engine.engine import Engine
from mmengine.serve.prompt.options import Options
from mmengine.serve.prompt.prompt import Prompt
from mmengine.serve.requests.failure_report import FAILURE_FILE
from tests.serve.serve_fakes import EOS, EchoProcessor, builder


@pytest.fixture
def engine():
    with Engine(builder=builder()) as engine:
        yield engine


def drive(engine):
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def test_importing_the_package_is_cheap_and_its_exports_are_lazy():
    code = (
        "import sys, mmengine; assert 'numpy' not in sys.modules and 'msgspec' not in sys.modules;"
        "mmengine.SamplingParams, mmengine.Engine, mmengine.Prompt, mmengine.pipeline, mmengine.AsyncEngine;"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    import mmengine

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        mmengine.nothing  # noqa: B018


def test_generate_gives_answers_in_the_order_of_the_prompts(engine):
    prompts = [f"prompt {k} " * (1 + k % 3) for k in range(30)]
    answers = engine.generate(prompts, max_tokens=100)
    assert [answer.text for answer in answers] == [prompt.upper() for prompt in prompts]
    assert engine.built.executor.largest == 4 and not engine.built.executor.attached
    assert answers[0].token_ids[-1] == EOS and answers[0].finish_reason == "stop"
    assert answers[0].usage == {
        "prompt_tokens": 9, "completion_tokens": 10, "total_tokens": 19, "cached_tokens": 0,
    }  # fmt: skip


CHAT = [{"role": "user", "content": "one chat"}]


@pytest.mark.parametrize("prompt", ["one text", CHAT, tuple(CHAT), Prompt(messages=CHAT)])
def test_one_prompt_is_not_taken_apart(engine, prompt):
    # A single text or chat is one prompt, not a list of prompts.
    (answer,) = engine.generate(prompt, max_tokens=50)
    assert answer.text in ("ONE TEXT", "ONE CHAT")
    assert answer.text == engine.generate([prompt], max_tokens=50)[0].text


def test_only_prompts_are_iterated_over(engine):
    assert engine.generate([]) == []
    assert len(engine.generate(iter(["a", "b"]), max_tokens=5)) == 2
    for wrong in (CHAT[0], b"text", 5, [["a", "b"]]):
        with pytest.raises(InvalidRequest, match="a prompt is a string, a list of messages"):
            engine.generate(wrong)


def test_a_stream_of_steps_joins_to_the_answer(engine):
    request_id = engine.submit("größer €", max_tokens=50)
    outputs = drive(engine)
    assert "".join(output.text for output in outputs) == outputs[-1].completion.text
    assert outputs[-1].completion.text.startswith("GR")
    assert {output.request_id for output in outputs} == {request_id}
    assert [output.finish_reason for output in outputs][-2:] == [None, "stop"]


def test_several_answers_to_one_prompt_come_together(engine):
    engine.submit("abc", SamplingParams(n=3, max_tokens=2))
    completions = [output.completion for output in drive(engine) if output.completion]
    assert len(completions) == 1
    assert [choice.index for choice in completions[0].choices] == [0, 1, 2]
    assert [choice.text for choice in completions[0].choices] == ["AB"] * 3
    assert set(completions[0].as_json()) == {"choices", "usage"}


def test_stop_strings_end_the_text_before_them(engine):
    answer = engine.generate(["one two three"], stop=" THR", max_tokens=50)[0]
    assert (answer.text, answer.finish_reason) == ("ONE TWO", "stop")
    assert bytes(answer.token_ids) == b"ONE TWO THR"


def test_the_first_prompt_that_fails_raises_and_the_others_end(engine):
    with pytest.raises(InvalidMedia, match="image 1"):
        engine.generate(["good", "bad one", "good too"], max_tokens=9)
    assert engine.stats().num_finished == 2 and not engine.has_work


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_tokens": 0}, "max_tokens must be an integer from 1"),
        ({"temperature": float("nan")}, "temperature must be a number"),
        ({"temprature": 1.0}, "unknown sampling option 'temprature'"),
        ({"top_k": "many"}, "top_k"),
        ({"request_id": "x" * 999}, "request id"),
        ({"deadline_s": -1}, "deadline_s"),
        ({"priority": 1.5}, "priority"),
    ],
)
def test_bad_options_are_refused_at_submission(engine, options, says):
    with pytest.raises(InvalidRequest, match=says):
        engine.submit("hello", **options)
    assert not engine.has_work


def test_bad_prompts_are_refused_at_submission(engine):
    for prompt in (7, ["a"], Prompt(), Prompt(messages=[], text="x")):
        with pytest.raises(InvalidRequest):
            engine.submit(prompt)
    with pytest.raises(InvalidRequest, match="sampling or keywords"):
        engine.submit("hello", SamplingParams(), max_tokens=3)


def test_an_id_in_use_is_refused_and_free_again_afterwards(engine):
    engine.submit("hello", request_id="one", max_tokens=3)
    with pytest.raises(InvalidRequest, match="'one'"):
        engine.submit("hello", request_id="one")
    drive(engine)
    assert engine.submit("hello", request_id="one", max_tokens=3) == "one"
    drive(engine)


def test_a_queue_that_fills_up_between_answers_takes_all_of_them_back():
    # The queue has places for two of the four choices, so all four are refused.
    with Engine(builder=builder(max_waiting=3)) as engine:
        engine.submit("hello", max_tokens=3)
        with pytest.raises(QueueFull):
            engine.submit("hello", n=4)
        completions = [output.completion for output in drive(engine) if output.completion]
        assert len(completions) == 1 and not engine.built.executor.attached


def test_cancelling_ends_a_request_with_abort(engine):
    request_id = engine.submit("a long prompt", n=2, max_tokens=50)
    engine.step()
    engine.cancel(request_id)
    engine.cancel("nobody")
    completion = drive(engine)[-1].completion
    assert [choice.finish_reason for choice in completion.choices] == ["abort", "abort"]
    assert "cancelled" in str(completion.error())


def test_a_deadline_that_passes_is_told(engine):
    engine.submit("a long prompt", max_tokens=50, deadline_s=1e-6)
    completion = drive(engine)[-1].completion
    assert completion.finish_reason == "abort" and "deadline passed" in str(completion.error())


def test_generate_refuses_to_swallow_the_outputs_of_submitted_requests(engine):
    # While submitted requests run, `generate` raises, because it would read their outputs.
    engine.submit("hello", max_tokens=3)
    with pytest.raises(InvalidRequest, match="are running"):
        engine.generate(["hello"])
    drive(engine)


def jobs(prompts):
    return [(Prompt.of(prompt), Options(SamplingParams(max_tokens=60))) for prompt in prompts]


def test_a_batch_larger_than_the_queue_goes_through_and_errors_stay_in_their_place():
    with Engine(builder=builder(max_waiting=2)) as engine:
        work = jobs([f"prompt {k}" for k in range(20)]) + [InvalidRequest("line 21")] + jobs(["bad"])
        answers = dict(run_batch(engine, work))
    assert sorted(answers) == list(range(22))
    assert all(answers[k].text == f"PROMPT {k}" for k in range(20))
    assert str(answers[20]) == "line 21" and isinstance(answers[21], InvalidMedia)


def test_answers_of_a_batch_are_never_rejected_for_want_of_a_place():
    prompt, options = jobs(["some prompt of some length"])[0]
    several = Options(SamplingParams(max_tokens=60, n=3))
    # Seven blocks hold only three such requests, so rows are preempted.
    with Engine(builder=builder(max_waiting=4, num_blocks=8)) as engine:
        answers = dict(run_batch(engine, [(prompt, several), (prompt, options)] * 10))
        assert engine.stats().num_preemptions > 0
    assert all(
        choice.text == prompt.messages[0]["content"].upper() for a in answers.values() for choice in a.choices
    )
    assert len(answers) == 20


def test_draining_finishes_what_runs_and_takes_nothing_more(engine):
    drain, taken = threading.Event(), []

    def source():
        for k, job in enumerate(jobs(["some prompt"] * 500)):
            taken.append(k)
            yield job

    answers = []
    for answer in run_batch(engine, source(), drain=drain):
        answers.append(answer)
        drain.set()
    assert 1 <= len(answers) <= 8 and len(taken) < 100
    assert all(completion.text == "SOME PROMPT" for _, completion in answers)
    assert not engine.has_work and not engine.built.executor.attached


def test_a_batch_inside_a_batch_loses_no_answer(engine):
    # `generate` is called while another batch is half done.
    outer = {}
    for index, answer in run_batch(engine, jobs([f"outer {k}" for k in range(12)])):
        inner = engine.generate([f"inner {index} {k}" for k in range(3)], max_tokens=60)
        assert [one.text for one in inner] == [f"INNER {index} {k}" for k in range(3)]
        outer[index] = answer.text
    assert outer == {k: f"OUTER {k}" for k in range(12)} and not engine.batch_done


def test_a_processor_that_breaks_costs_its_prompt_only(engine, monkeypatch):
    real = EchoProcessor.prepare_text

    def prepare_text(self, text, **options):
        return 1 / 0 if text == "boom" else real(self, text, **options)

    monkeypatch.setattr(EchoProcessor, "prepare_text", prepare_text)
    answers = dict(run_batch(engine, jobs(["fine", "boom", "fine too"])))
    assert "ZeroDivisionError" in str(answers[1]) and answers[2].text == "FINE TOO"


def test_leaving_a_batch_early_cancels_what_runs(engine):
    for _ in run_batch(engine, jobs(["short", "a rather long prompt", "another rather long prompt"])):
        break
    assert engine.is_idle and not engine.built.executor.attached


def test_a_request_whose_steps_keep_failing_ends_with_error_and_others_go_on():
    with Engine(builder=builder(fail_at=2, max_retries=0)) as engine:
        engine.submit("first", max_tokens=9)
        completion = drive(engine)[-1].completion
        assert completion.finish_reason == "error" and "fell over" in str(completion.error())
        assert engine.generate(["second"], max_tokens=9)[0].text == "SECOND"


def fill_the_disk(monkeypatch, num_writes):
    """Make `num_writes` log writes fail with a full disk, after two successful writes."""
    write, count = LogWriter._write, itertools.count()

    def full(self, data):
        if 2 <= next(count) < 2 + num_writes:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, data)

    monkeypatch.setattr(LogWriter, "_write", full)


def test_a_batch_waits_for_room_on_the_disk(tmp_path, monkeypatch):
    fill_the_disk(monkeypatch, 4)
    with Engine(builder=builder(), log=tmp_path / "log") as engine:
        answers = engine.generate([f"prompt {k}" for k in range(12)], max_tokens=20)
    assert [answer.text for answer in answers] == [f"PROMPT {k}" for k in range(12)]
    assert verify(tmp_path / "log").ok


def test_a_batch_does_not_wait_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr("mmengine.serve.requests.health.STALL_PAUSE_S", 0.001)
    monkeypatch.setattr("mmengine.serve.requests.health.STALL_LIMIT_S", 0.05)
    fill_the_disk(monkeypatch, 10**9)
    engine = Engine(builder=builder(), log=tmp_path / "log")
    with pytest.raises(LogError, match="No space left"):
        engine.generate(["hello"], max_tokens=20)


def test_every_answer_is_in_the_log_as_delivered(tmp_path):
    with Engine(builder=builder(), log=tmp_path / "log") as engine:
        engine.generate(["one", "two"], max_tokens=9)
    events = [record.event for record in LogReader(tmp_path / "log")]
    for kind in (Queued, Finished, Delivered):
        assert sum(isinstance(event, kind) for event in events) == 2


def test_a_closed_engine_refuses_and_closes_twice():
    engine = Engine(builder=builder())
    engine.close()
    engine.close()
    assert engine.built.closed
    with pytest.raises(InvalidRequest, match="closed"):
        engine.submit("hello")


def test_full_segments_are_packed_beside_the_engine(tmp_path, monkeypatch):
    monkeypatch.setattr("mmengine.events.writer.TIDY_S", 0.0)
    with Engine(builder=builder(log_options={"segment_bytes": 2000}), log=tmp_path / "log") as engine:
        packed, rounds = [], 0
        while not packed and rounds < 500:  # another thread packs, and may wait for a core
            engine.generate([f"prompt {k}" for k in range(30)], max_tokens=20)
            packed, rounds = list((tmp_path / "log").glob("*.zst")), rounds + 1
    assert packed, "while it ran"
    assert verify(tmp_path / "log").ok


def test_the_processor_knows_how_long_a_prompt_may_be():
    with Engine(builder=builder(max_model_len=48)) as engine:
        assert engine.processor.max_prompt_tokens == 47


def test_settings_are_keyword_arguments():
    # Keyword arguments of Engine override fields of `config`. An unknown setting is refused with advice.
    seen = []

    def build(model, *, config, **options):
        seen.append((config, options))
        return builder()(model, config=config, **options)

    given = {"max_model_len": 99, "quantize": "int8", "dtype": torch.bfloat16, "device": torch.device("cpu")}
    with Engine(builder=build, config=EngineConfig(max_num_seqs=8), **given):
        ((config, options),) = seen
        assert (options["device"], options["dtype"]) == ("cpu", "bfloat16")
        assert (config.max_num_seqs, config.max_model_len, config.quantize) == (8, 99, "int8")
    foreign = {
        "max_modellen": "did you mean max_model_len", "dtpye": "did you mean dtype",
        "torch_dtype": "use dtype", "device_map": "use device", "something_else": "settings.md",
        "tensor_parallel_size": "use tensor_parallel=N", "gpu_memory_utilization": "use num_blocks=N",
    }  # fmt: skip
    for name, advice in foreign.items():
        with pytest.raises(ConfigError, match=f"unknown setting '{name}': .*{advice}"):
            Engine(builder=build, **{name: 1})
    with pytest.raises(ConfigError, match="max_model_len must lie in 0 to"):
        Engine(builder=build, max_model_len=-1)


def broken_step():
    raise ValueError("repeats may not contain negative values")


def test_an_engine_that_dies_says_where(tmp_path):
    with Engine(builder=builder(), log=tmp_path / "log") as engine:
        engine.submit("three words here", request_id="mine", max_tokens=30)
        engine.step()
        engine._core.step = broken_step
        with pytest.raises(ValueError, match="repeats") as raised:
            engine.step()
        written = (tmp_path / "log" / FAILURE_FILE).read_text()
        for text in ("\n".join(raised.value.__notes__), written):
            assert "at step 0 with 1 rows" in text and "row 0: mine, " in text
        assert "in broken_step" in written
        del engine._core.step
        drive(engine)
