"""Tests the recorder with an unknown vLLM version, with new, changed or missing fields, and with missing
methods. The scheduler works as without the recorder, and a warning names the problem.
"""

from types import SimpleNamespace

import pytest

from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from mmengine.replay import verify
from mmengine_vllm.hooks import RecordsCalls
from tests.vllm.fake_scheduler import FakeRequest, FakeScheduler, Status, run_output
from tests.vllm.test_vllm_recorder import folded


class Changed(FakeScheduler):
    """Changes what `schedule` returns. `change`: called with each output."""

    @staticmethod
    def change(output):
        """Change nothing."""

    def schedule(self):
        output = super().schedule()
        self.change(output)
        return output


def recorded(base, version="0.33.0"):
    return type("Recorded", (RecordsCalls, base), {"host_version": version})


def serve(scheduler, spoil=lambda result: None):
    """Serve three requests, abort the second, and return each request's tokens."""
    requests = [FakeRequest(f"r{number}", list(range(9)), 6) for number in range(3)]
    for request in requests:
        scheduler.add_request(request)
    for step in range(20):
        output = scheduler.schedule()
        result = run_output(output, lambda name: 5)
        spoil(result)
        scheduler.update_from_output(output, result)
        if step == 2:
            scheduler.finish_requests(["r1"], Status.FINISHED_ABORTED)
    scheduler.shutdown()
    assert not scheduler.requests
    return [request.tokens for request in requests]


@pytest.fixture
def log(tmp_path, monkeypatch):
    monkeypatch.setenv("MMENGINE_LOG", str(tmp_path / "log"))
    return tmp_path / "log"


@pytest.fixture
def right():
    return serve(FakeScheduler())


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_an_unknown_version_is_named_once_and_recorded(log, right, caplog):
    assert serve(recorded(FakeScheduler, "0.47.1")()) == right
    (line,) = lines(caplog)
    assert "vLLM 0.47.1" in line and "0.30 to 0.33" in line
    assert verify(log).requests == 3 and "0.47.1" in verify(log).caveat
    assert not any(isinstance(record.event, ev.Noted) for record in LogReader(log))


@pytest.mark.parametrize("version", ["0.30.0", "0.32.0", "0.33.1rc1"])
def test_a_known_version_needs_no_line(log, right, caplog, version):
    assert serve(recorded(FakeScheduler, version)()) == right
    assert not lines(caplog)


def remove_column(output):
    del output.scheduled_cached_reqs.new_block_ids


def rename_field(output):
    output.freed_encoder_outputs = output.free_encoder_mm_hashes
    del output.free_encoder_mm_hashes


def schedule_an_unknown_request(output):
    output.scheduled_new_reqs = [
        SimpleNamespace(req_id="other", block_ids=([1],), num_computed_tokens=0),
        *output.scheduled_new_reqs,
    ]


@pytest.mark.parametrize("change", [remove_column, rename_field, schedule_an_unknown_request])
def test_a_changed_output_ends_the_log_only(log, right, caplog, change):
    base = type("Other", (Changed,), {"change": staticmethod(change)})
    assert serve(recorded(base)()) == right
    check_ended(log, caplog)


def lose_names(result):
    del result.req_ids


def return_an_array(result):
    result.sampled_token_ids = dict(enumerate(result.sampled_token_ids))
    result.req_ids = None


@pytest.mark.parametrize("spoil", [lose_names, return_an_array])
def test_a_changed_result_ends_the_log_only(log, right, caplog, spoil):
    assert serve(recorded(FakeScheduler)(), spoil) == right
    check_ended(log, caplog)


def check_ended(log, caplog):
    (line,) = (line for line in lines(caplog) if "leaves out" not in line)
    assert "mmengine_vllm stopped recording" in line and "\n" not in line
    (*before, last), _ = folded(log)
    assert isinstance(last, ev.Noted) and last.kind == "incomplete"
    assert sum(isinstance(event, ev.Queued) for event in before) == 3


def add_field(output):
    output.kv_tiers = {"r0": 2}


def test_a_new_field_is_named_once_and_the_rest_is_recorded(log, right, caplog):
    base = type("Newer", (Changed,), {"change": staticmethod(add_field)})
    assert serve(recorded(base)()) == right
    (line,) = lines(caplog)
    assert "SchedulerOutput has fields that the log leaves out: kv_tiers" in line
    assert verify(log).requests == 3


@pytest.mark.parametrize("gone", ["kv_cache_config", "max_model_len", "scheduler_config"])
def test_a_scheduler_without_a_setting_is_not_recorded(log, right, caplog, gone):
    class Without(FakeScheduler):
        def __init__(self):
            super().__init__()
            self.kept = vars(self).pop(gone)

        def __getattr__(self, name):
            if name == gone and "_recording" in vars(self) and self.is_begun:
                return self.kept
            raise AttributeError(name)

        is_begun = False

    scheduler = recorded(Without)()
    type(scheduler).is_begun = True
    assert serve(scheduler) == right
    (line,) = lines(caplog)
    assert "mmengine_vllm records nothing: AttributeError" in line and gone in line and not log.exists()


def test_a_method_that_is_gone_is_gone_with_the_recorder_too(log, right):
    # The recorder does not hide that vLLM's scheduler lacks a method.
    def gone(self, *args):
        raise AttributeError("reset_encoder_cache")

    scheduler = recorded(type("Without", (FakeScheduler,), {"reset_encoder_cache": gone}))()
    with pytest.raises(AttributeError, match="reset_encoder_cache"):
        scheduler.reset_encoder_cache()
    assert serve(scheduler) == right and verify(log).requests == 3
