"""Tests of steps that are launched before the previous step's result is read: their order, grammars, and
failures.
"""

import re
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from fake_gpu import ON_GPU, nothing_to_wait_for
from runtime_toy import ToyModel, positions_of, toy_request
from test_runtime_launch import AllowAll, config_of, toy_on_gpu

from mmengine.config import EngineConfig
from mmengine.core.engine import EngineCore
from mmengine.core.resume import Resume
from mmengine.errors import ExecutorLost
from mmengine.events.log import LogReader
from mmengine.events.vocabulary import Failed
from mmengine.replay import verify
from mmengine.request import GrammarRequest, SamplingParams
from mmengine.runtime import result_reader as reading
from mmengine.runtime.device import clock
from mmengine.runtime.device.cpu import CpuDevice
from mmengine.runtime.device.cuda import CudaDevice
from mmengine.runtime.executor import TorchExecutor
from mmengine.runtime.sampling import grammar_rows as forms
from mmengine.runtime.startup.sizing import steps_in_flight
from mmengine.serve.engine.engine import Engine
from tests.spec_decode.draft_control import LaunchedAhead

FORM = GrammarRequest("regex", "a")


@pytest.fixture
def order(monkeypatch):
    """Return the list in which the fake device records the executor's calls, in order."""
    order = []

    class Event:
        def record(self):
            order.append("record")

        def synchronize(self):
            order.append("wait")

        def elapsed_time(self, end):
            return 2.5

    @contextmanager
    def current():
        order.append("enter")
        yield
        order.append("leave")

    monkeypatch.setattr(ON_GPU.device, "current", current, raising=False)
    monkeypatch.setattr(ON_GPU.device, "event", lambda timed: Event(), raising=False)
    return order


def on_gpu(order, matchers=None):
    """Return an engine core with two steps in flight on a fake GPU.

    Fake GPU tensors have no values, so all sampled tokens are set to 0.
    """
    config = config_of(max_num_seqs=4)
    model = toy_on_gpu()
    with nothing_to_wait_for():
        executor = TorchExecutor(model, positions_of, config, ON_GPU, matchers=matchers)
    read = executor._runner.finish

    def finish(launched):
        with torch.inference_mode():
            launched.sampled.token_ids.zero_()
        order.append("read")
        return read(launched)

    executor._runner.finish = finish
    return EngineCore(config, executor)


def test_a_step_is_launched_before_the_previous_step_is_awaited(order):
    core = on_gpu(order)
    request, _ = toy_request("r", 1, sampling=SamplingParams(max_tokens=6, ignore_eos=True))
    core.submit(request)
    while core.has_work:
        with nothing_to_wait_for():
            core.step()
    launch, read = ["enter", "record", "record", "leave"], ["enter", "wait", "read", "leave"]
    assert order == launch * 2 + (read + launch) * 4 + read * 2


class Noted(AllowAll):
    """Matchers that record in `order` when masks are requested and when rows advance."""

    def __init__(self, order):
        self._order, self.closers = order, {}

    def masks(self, rows, drafts=None):
        self._order.append("masks")
        return super().masks(rows, drafts)

    def advance(self, rows, said):
        self._order.append("advance")
        return {}, {}


def test_masks_are_requested_after_the_previous_result_and_the_launch(order):
    """A step's forward pass is launched before the previous step's result is read. The step's masks are
    requested after this result.
    """
    core = on_gpu(order, Noted(order))
    form = toy_request("form", 1, sampling=SamplingParams(max_tokens=6, ignore_eos=True), grammar=FORM)[0]
    plain = toy_request("plain", 2, sampling=SamplingParams(max_tokens=6, ignore_eos=True))[0]
    core.submit(form)
    core.submit(plain)
    core.grammar_ready("form")
    while core.has_work:
        with nothing_to_wait_for():
            core.step()
    first, launch = ["enter", "record", "masks", "record", "leave"], ["enter", "record", "leave"]
    read = ["enter", "wait", "read", "advance", "masks", "record", "leave"]
    last = ["enter", "wait", "read", "advance", "leave"]
    assert order == first + launch + (read + launch) * 4 + read + last
    assert core.stats().overlap["ahead"] == 5


def form_beside(text, more, **asked):
    """Return the answers to a plain request and to a request with the grammar `text`, by request id.

    `more` is called with the engine before the engine runs.
    """
    with Engine(config=EngineConfig(spec="none", max_model_len=200, max_in_flight=2)) as engine:
        LaunchedAhead(engine.built.executor)
        more(engine)
        engine.submit("Who are you?", request_id="plain", max_tokens=24, ignore_eos=True)
        engine.submit("Describe a square.", request_id="form", max_tokens=24, grammar=text, **asked)
        found = {}
        while not engine.is_idle:
            found |= {output.request_id: output.completion for output in engine.step() if output.completion}
        assert engine.stats().overlap["forms"] == 0
    return {name: answer.choices[0] for name, answer in found.items()}


@pytest.fixture(params=["masks", "following"])
def by(request, monkeypatch):
    """With "masks", grammar masks are applied before sampling, as on a GPU. Otherwise lazy masks are used, as
    on a CPU.
    """
    if request.param == "masks":
        for module in (forms, reading):
            monkeypatch.setattr(module, "uses_lazy_mask", lambda options: np.zeros(len(options), bool))
    return request.param


def test_a_grammar_ends_while_the_next_step_runs(by):
    """The next step is already running and samples another token for the row. This token is dropped."""
    given = []

    def watch(engine):
        finish = engine.built.executor._runner.finish

        def count(launched):
            given.append(len(launched.batch.rows))
            return finish(launched)

        engine.built.executor._runner.finish = count

    found = form_beside({"regex": "(circle|square) [0-9]{2}"}, watch)
    form = found["form"]
    assert form.finish_reason == "stop" and re.fullmatch("(circle|square) [0-9]{2}", form.text)
    assert sum(given) == 24 + len(form.token_ids) + 1
    assert found["plain"].token_ids == form_beside(None, lambda engine: None)["plain"].token_ids


def spoil(engine, masks_of):
    """Replace each result (masks, errors) from the matchers by `masks_of(masks, errors, call number)`.

    Returns a list whose only item counts the mask requests.
    """
    matchers, calls = engine.built.executor._runner._matchers, [0]
    masks = matchers.masks

    def spoiled(rows, drafts=None):
        calls[0] += 1
        return masks_of(*masks(rows, drafts), calls[0])

    matchers.masks = spoiled
    return calls


@pytest.mark.parametrize("by", ["masks"], indirect=True)
def test_a_row_whose_grammar_fails_during_the_next_step_ends_alone(by):
    def broken(bits, errors, call):
        return bits, {0: "planted"} if call > 5 else errors

    found = form_beside({"regex": "[a-z ]{20,40}"}, lambda engine: spoil(engine, broken))
    assert (found["form"].finish_reason, found["form"].detail) == ("error", "planted")
    assert len(found["form"].token_ids) == 5
    assert found["plain"].token_ids == form_beside(None, lambda engine: None)["plain"].token_ids


@pytest.mark.parametrize("by", ["masks"], indirect=True)
def test_masks_that_raise_fail_their_step(by):
    """The engine runs the failed step again. The tokens stay the same, and masks are requested once more."""
    num_calls, answers = [], []
    for bad in (6, 0):

        def raises(bits, errors, call, bad=bad):
            if call == bad:
                raise RuntimeError("planted")
            return bits, errors

        found = form_beside(
            {"regex": "[a-z ]{20,40}"}, lambda engine: num_calls.append(spoil(engine, raises))
        )
        answers.append({name: answer.token_ids for name, answer in found.items()})
    assert answers[0] == answers[1] and len(answers[0]["form"]) > 6
    assert num_calls[0][0] == num_calls[1][0] + 1


def test_two_in_flight_on_a_gpu_and_one_on_a_cpu(tmp_path):
    """With max_in_flight 0 the device decides. The log stores the number in effect, so that a replay on
    another machine uses the same number.
    """
    gpu, cpu = CudaDevice(), CpuDevice()
    assert steps_in_flight(EngineConfig(), gpu) == 2 and steps_in_flight(EngineConfig(), cpu) == 1
    assert steps_in_flight(EngineConfig(compat="vllm"), gpu) == 1
    for given, meant in ((0, 1), (2, 2)):
        log = tmp_path / str(given)
        with Engine(config=EngineConfig(max_in_flight=given, max_model_len=100), log=log) as engine:
            engine.generate(["Hello"], max_tokens=4)
            assert bool(engine.stats().overlap) == ("mmengine_overlap_steps" in engine.metrics_text())
            assert bool(engine.stats().overlap) == (meant == 2)
        assert next(iter(LogReader(log))).event.config["max_in_flight"] == meant
        assert verify(log).ok


def test_a_step_takes_the_time_between_two_results(monkeypatch):
    """With two steps in flight, a step's time counts from the previous step's result. Time in which the
    engine waits for requests does not count.
    """
    now = {"wall": 0, "cpu": 0}
    monkeypatch.setattr(clock, "perf_counter_ns", lambda: now["wall"])
    monkeypatch.setattr(clock, "process_time_ns", lambda: now["cpu"])

    def passes(wall, cpu=0):
        now["wall"], now["cpu"] = now["wall"] + wall, now["cpu"] + cpu

    launches = clock.LaunchClock()
    passes(1000, 30)  # wall time in which no request runs
    launches.launch()
    passes(100, 5)
    assert launches.finish() == 30 + 100
    passes(20, 20)
    launches.launch()
    passes(50, 50)  # meanwhile the next step is launched
    passes(60)
    assert launches.finish() == 20 + 110
    passes(70, 40)
    assert launches.finish() == 70


def failing(error, at):
    """Return a toy model on a CPU whose forward pass number `at` (from 1) raises `error`."""
    model, calls = ToyModel(), []
    forward = model.forward

    def broken(*arguments):
        calls.append(1)
        if len(calls) == at:
            raise error
        return forward(*arguments)

    model.forward = broken
    return model


@pytest.mark.parametrize(
    "error, told",
    [
        (
            torch.AcceleratorError("CUDA error: invalid argument\nCompile with"),
            "CUDA error: invalid argument",
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), "lower num_blocks, token_budget"),
        (RuntimeError("something else\nand more"), "RuntimeError: something else"),
    ],
)
def test_a_failed_step_is_reported_and_its_requests_continue(error, told):
    tokens = []
    for at in (0, 3):
        config = config_of(max_in_flight=1, eos_token_ids=(59,))
        executor = TorchExecutor(failing(error, at), positions_of, config)
        core = EngineCore(config, executor)
        request, _ = toy_request("r", 1, sampling=SamplingParams(max_tokens=8, ignore_eos=True))
        core.submit(request)
        tokens.append([])
        while core.has_work:
            for output in core.step():
                tokens[-1].extend(output.token_ids)
        failures = [record.event.error for record in core.sink.records if isinstance(record.event, Failed)]
        assert len(failures) == bool(at)
        if at:
            assert told in failures[0] and "\n" not in failures[0]
    assert tokens[0] == tokens[1] and len(tokens[0]) == 8


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: unspecified launch failure\nmore"),
        # The error messages from FlashInfer and Triton.
        RuntimeError("BatchPrefillWithPagedKVCache failed with error an illegal memory access\nmore"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    ],
    ids=["torch", "flashinfer", "triton"],
)
def test_a_lost_gpu_ends_the_engine_and_the_log_resumes(monkeypatch, tmp_path, error):
    asked = {"max_tokens": 24, "ignore_eos": True}
    with Engine() as engine:
        whole = engine.generate(["Who are you?"], **asked)[0].choices[0].token_ids
    with Engine(log=tmp_path) as engine:
        engine.submit("Who are you?", request_id="a", **asked)
        engine.step()
        launch = engine.built.executor._runner.launch

        def fall_off(*arguments):
            launch(*arguments)
            raise error

        engine.built.executor._runner.launch = fall_off
        monkeypatch.setattr(CpuDevice, "answers", lambda device: False)
        for _ in range(2):
            with pytest.raises(ExecutorLost, match="no longer answers .*; start the process again"):
                while not engine.is_idle:
                    engine.step()
    monkeypatch.undo()
    with Engine(log=tmp_path, resume=Resume()) as engine:
        found = engine.requests.resume("a")
        while not engine.is_idle:
            found = next((output.completion for output in engine.step() if output.completion), found)
    assert found.choices[0].token_ids == whole and verify(tmp_path).ok


def test_a_gpu_responds_or_not(monkeypatch):
    errors = [torch.AcceleratorError("CUDA error: launch failure"), torch.OutOfMemoryError("full")]

    def gone(*sizes, device):
        raise errors[0]

    gpu = CudaDevice()
    monkeypatch.setattr(torch, "ones", gone)
    assert not gpu.answers()
    errors.pop(0)
    assert gpu.answers(), "a GPU whose memory is full still answers"
