"""The order of things where the executor launches ahead, with events that note what is asked of them; and a
GPU that fails."""

from contextlib import contextmanager

import pytest
import torch
from launching import GPU, nothing_to_wait_for
from runtime_toy import ToyModel, positions_of, toy_request
from test_runtime_launch import config_of, toy_on_gpu

from mmengine.core.engine import EngineCore
from mmengine.core.past import Resume
from mmengine.errors import ExecutorLost
from mmengine.events.vocabulary import Failed
from mmengine.replay import verify
from mmengine.request import SamplingParams
from mmengine.runtime import executor as executing
from mmengine.runtime.executor import TorchExecutor
from mmengine.runtime.gpus import answers
from mmengine.serve.engine import Engine


@pytest.fixture
def order(monkeypatch):
    """What the executor asks of CUDA, in order."""
    order = []

    class Event:
        def __init__(self, enable_timing=False):
            pass

        def record(self, stream):
            order.append("record")

        def synchronize(self):
            order.append("wait")

        def elapsed_time(self, end):
            return 2.5

    @contextmanager
    def current(device):
        order.append("enter")
        yield
        order.append("leave")

    monkeypatch.setattr(executing, "current", current)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    return order


def on_gpu(order):
    """An engine with two steps in flight. Its tokens have no values there; here they are all 0."""
    config = config_of(max_num_seqs=4)
    model = toy_on_gpu()
    with nothing_to_wait_for():
        executor = TorchExecutor(model, positions_of, config, GPU, attention="torch")
    read = executor._runner.finish

    def finish(launched):
        with torch.inference_mode():
            launched.sampled.token_ids.zero_()
        order.append("read")
        return read(launched)

    executor._runner.finish = finish
    return EngineCore(config, executor)


def test_a_step_is_launched_before_the_one_before_is_awaited(order):
    core = on_gpu(order)
    request, _ = toy_request("r", 1, sampling=SamplingParams(max_tokens=6, ignore_eos=True))
    core.submit(request)
    while core.has_work:
        with nothing_to_wait_for():
            core.step()
    launch, read = ["enter", "record", "record", "leave"], ["enter", "wait", "read", "leave"]
    assert order == launch * 2 + (read + launch) * 4 + read * 2


def failing(error, at):
    """A toy model on a CPU whose forward number `at` raises."""
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
def test_a_step_that_fails_is_told_of_and_its_requests_go_on(error, told):
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
        # As FlashInfer and Triton say it.
        RuntimeError("BatchPrefillWithPagedKVCache failed with error an illegal memory access\nmore"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    ],
    ids=["torch", "flashinfer", "triton"],
)
def test_a_gpu_that_is_gone_ends_the_engine_and_the_log_goes_on(monkeypatch, tmp_path, error):
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
        monkeypatch.setattr(executing, "answers", lambda device: False)
        for _ in range(2):
            with pytest.raises(ExecutorLost, match="does not answer any more .*; start the process again"):
                while not engine.is_idle:
                    engine.step()
    monkeypatch.undo()
    with Engine(log=tmp_path, resume=Resume()) as engine:
        found = engine.requests.take_up("a")
        while not engine.is_idle:
            found = next((output.completion for output in engine.step() if output.completion), found)
    assert found.choices[0].token_ids == whole and verify(tmp_path).ok


def test_a_gpu_answers_or_it_does_not(monkeypatch):
    errors = [torch.AcceleratorError("CUDA error: launch failure"), torch.OutOfMemoryError("full")]

    def gone(*sizes, device):
        raise errors[0]

    assert answers(torch.device("cpu"))
    monkeypatch.setattr(torch, "ones", gone)
    assert not answers(torch.device("cuda"))
    errors.pop(0)
    assert answers(torch.device("cuda")), "one whose memory is full answers"
