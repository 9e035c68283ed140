"""Tests the recorder for vLLM's scheduler with FakeScheduler, which has the same interface."""

import ast
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from mmengine.replay.checked_log import CheckedLog
from mmengine_vllm.columns import int64_bytes
from mmengine_vllm.hooks import RecordsCalls
from tests.project.code_size import sources
from tests.vllm.fake_scheduler import EOS, FakeRequest, FakeScheduler, Status, run_output


class Recorded(RecordsCalls, FakeScheduler):
    host_version = "0.0"


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Returns a function that makes a recording scheduler with a log in tmp_path / "log"."""
    monkeypatch.setenv("MMENGINE_LOG", str(tmp_path / "log"))
    made = []

    def make(content="hashes", **settings):
        monkeypatch.setenv("MMENGINE_LOG_CONTENT", content)
        made.append(Recorded(**settings))
        return made[-1]

    yield make
    for scheduler in made:
        scheduler.shutdown()


def run(scheduler, requests=(), *, steps=200, before=None, token=lambda name: 5):
    """Run until no request is left. `before`: step -> function that is called before that step."""
    for request in requests:
        scheduler.add_request(request)
    for step in range(steps):
        if before and step in before:
            before[step]()
        output = scheduler.schedule()
        scheduler.update_from_output(output, run_output(output, token))
        if not scheduler.requests:
            break
    scheduler.shutdown()


def folded(folder, *, checks=True):
    """Fold the whole log, and return its events and the state after it."""
    log = CheckedLog(folder)
    state, events = log.first_state(), []
    for each in log:
        with log.naming(each):
            log.apply(state, each.event)
        events.append(each.event)
    assert log.findings.listed == [] or not checks
    return events, state


def of_type(events, kind):
    return [event for event in events if isinstance(event, kind)]


def tokens_in(column):
    return np.frombuffer(column, np.int32).tolist()


def prompts(count, length=9):
    return [FakeRequest(f"r{n}", list(range(100 * n, 100 * n + length)), 6) for n in range(count)]


def test_a_recorded_log_can_be_folded(record, tmp_path):
    scheduler = record(num_blocks=10, max_model_len=32)
    run(scheduler, prompts(6))
    events, state = folded(tmp_path / "log")
    assert of_type(events, ev.Preempted) and len(of_type(events, ev.Queued)) == 6
    assert {event.reason for event in of_type(events, ev.Finished)} == {"length"}
    assert not state.requests and state.blocks.num_free == 9 and len(state.free_rows) == 4
    started = events[0]
    assert started.host == "vllm 0.0" and started.config["compat"] == "vllm"
    assert of_type(events, ev.Scheduled)[-1].rows is None  # the same rows as in the previous step


def test_tokens_are_written_as_they_are_only_if_asked(record, tmp_path):
    run(record("tokens"), [FakeRequest("a", [11, 12, 13], 3)])
    events, _ = folded(tmp_path / "log")
    assert tokens_in(of_type(events, ev.Queued)[0].prompt) == [11, 12, 13]
    assert [tokens_in(event.token_ids) for event in of_type(events, ev.Executed)] == [[5]] * 3
    run(record(), [FakeRequest("a", [11, 12, 13], 3)])
    data = b"".join(path.read_bytes() for path in (tmp_path / "log-2").glob("*.mmlog"))
    assert np.array([11, 12], np.int32).tobytes() not in data


def test_pseudo_ids_are_equal_for_as_long_as_the_tokens_are(record, tmp_path):
    first = FakeRequest("a", [7, 8, 9], 2)
    scheduler = record()
    run(scheduler, [first, FakeRequest("b", [7, 8, 9, 5, 5, 1], 2), FakeRequest("c", [7, 8, 9], 2, salt="x")])
    events, _ = folded(tmp_path / "log")
    a, b, c = (tokens_in(event.prompt) for event in of_type(events, ev.Queued))
    answer = [tokens_in(event.token_ids)[0] for event in of_type(events, ev.Executed)]
    assert b[:5] == a + answer[:2]  # The prompt of b begins with the prompt and the answer of a.
    assert not set(a) & set(c)


def test_aborts_stops_and_grammars(record, tmp_path):
    scheduler = record()
    waits = FakeRequest("g", [1, 2, 3], 2, grammar={"type": "object"})
    requests = [FakeRequest("a", [1, 2, 3], 9), FakeRequest("b", [4, 5, 6], 9), waits]

    def compiled():
        waits.status = Status.WAITING

    run(
        scheduler,
        requests,
        before={2: lambda: scheduler.finish_requests(["a"], Status.FINISHED_ABORTED), 4: compiled},
        token=lambda name: EOS if name == "b" and len(requests[1].tokens) == 7 else 5,
    )
    events, _ = folded(tmp_path / "log")
    ends = {event.request_id: (event.reason, event.detail) for event in of_type(events, ev.Finished)}
    assert ends == {"a": ("abort", "cancelled"), "b": ("stop", "eos"), "g": ("length", "")}
    kinds = [type(event) for event in events]
    assert kinds.index(ev.GrammarReady) == kinds.index(ev.Admitted, kinds.index(ev.GrammarReady)) - 2


def test_media_and_a_reset(record, tmp_path):
    place = SimpleNamespace(offset=1, length=4, is_embed=None)
    item = SimpleNamespace(identifier="cat", modality="image", mm_position=place)
    scheduler = record()
    requests = [FakeRequest(name, [1, 9, 9, 9, 9, 2], 6, mm_features=(item,)) for name in "ab"]
    run(scheduler, requests, before={2: lambda: scheduler.reset_prefix_cache(reset_running_requests=True)})
    events, state = folded(tmp_path / "log")
    assert sum(len(event.encode) for event in of_type(events, ev.Admitted)) == 1
    assert [event.request_id for event in of_type(events, ev.Preempted)] == ["b", "a"]
    assert of_type(events, ev.CacheReset)[0].preempt_running and len(state.encoder.entries) == 1


def test_a_fault_ends_the_recording_and_never_reaches_vllm(record, tmp_path, caplog):
    scheduler = record()
    scheduler.add_request(FakeRequest("a", [1, 2, 3], 4))
    broken = FakeRequest("b", [1, 2, 3], 4)
    del broken.priority
    run(scheduler, [broken])
    assert not scheduler.requests and caplog.text.count("stopped recording") == 1
    last = list(LogReader(tmp_path / "log"))[-1].event
    assert isinstance(last, ev.Noted) and last.kind == "incomplete"
    assert last.detail.startswith("AttributeError in queued_of (request_facts.py:")


@pytest.mark.parametrize("name, value", [("MMENGINE_LOG_CONTENT", "all"), ("MMENGINE_LOG_BYTES", "-1")])
def test_a_wrong_setting_is_named_and_nothing_is_recorded(record, tmp_path, monkeypatch, caplog, name, value):
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("MMENGINE_LOG", str(tmp_path / "other"))
    scheduler = Recorded()
    run(scheduler, prompts(1))
    assert f"{name} is '{value}'" in caplog.text and not (tmp_path / "other").exists()


def test_the_plugin_imports_neither_torch_nor_vllm():
    code = f"import sys; sys.path[:0] = {sys.path!r}; import mmengine_vllm.hooks; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "vllm", "mmengine.native", "mmengine.runtime"} & set(done.stdout.split())


def test_tokens_that_arrive_after_a_preemption_count(record):
    scheduler = record(num_blocks=10, max_model_len=32, overlaps=True)
    for request in prompts(6):
        scheduler.add_request(request)
    flying, late = [], 0
    for _ in range(40):
        flying.append(scheduler.schedule())
        if len(flying) > 1:
            output = flying.pop(0)
            scheduler.update_from_output(output, run_output(output, lambda name: 7))
        scheduler._recording.flush()
        recorder = scheduler._recording.recorder
        for name, request in scheduler.requests.items():
            if name not in recorder.rows and name not in output_names(flying):
                late += len(request.tokens) > request.num_prompt_tokens
                tokens = int64_bytes(request.tokens)
                assert recorder.requests[name].chain == recorder.contents.begin(tokens, "")[1]
    assert late


def output_names(outputs):
    return {name for output in outputs for name in output.num_scheduled_tokens}


def test_the_plugin_uses_no_private_name_of_another_object():
    found = []
    for path in sources(("plugins/mmengine_vllm",)):
        reads = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute))
        for node in reads:
            is_private = node.attr.startswith("_") and not node.attr.endswith("__")
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if is_private and not is_own:
                found.append(f"{path.name}:{node.lineno} {node.attr}")
    assert not found
