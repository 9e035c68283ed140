"""Tests the recorder in vLLM's own scheduler, without a model. `make vllm` runs these tests with two vLLM
versions.
"""

import inspect

import pytest

pytest.importorskip("vllm.version")  # `vllm` alone could also name the folder tests/vllm

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from mmengine.errors import LogError
from mmengine.replay import verify
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.hosted.recorded_state import first_broken
from mmengine_vllm import RecordingScheduler
from mmengine_vllm.deriving.scheduler_alone import engine_config as engine_config_alone
from mmengine_vllm.hooks import RecordsCalls
from tests.vllm.fake_scheduler import FakeScheduler
from tests.vllm.model_free import drive, engine_config, make_scheduler

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
HOOKS = [name for name in vars(RecordsCalls) if not name.startswith("_") and name != "host_version"]


@pytest.mark.parametrize("name", HOOKS)
def test_the_scheduler_has_the_methods_and_the_fake_has_their_arguments(name):
    real = inspect.signature(getattr(Scheduler, name)).parameters
    fake = inspect.signature(getattr(FakeScheduler, name)).parameters
    assert list(fake) == list(real)[: len(fake)]


@pytest.mark.parametrize("overlaps, base", [(False, Scheduler), (True, AsyncScheduler)])
def test_the_base_is_chosen_by_the_configuration(tmp_path, monkeypatch, overlaps, base):
    monkeypatch.setenv("MMENGINE_LOG", str(tmp_path / "log"))
    config = engine_config(scheduler_cls="mmengine_vllm.RecordingScheduler", max_num_seqs=4)
    config.scheduler_config.async_scheduling = overlaps
    scheduler = make_scheduler(config.scheduler_config.get_scheduler_cls(), config)
    assert isinstance(scheduler, base) and isinstance(scheduler, AsyncScheduler) == overlaps
    scheduler.shutdown()
    assert (tmp_path / "log").exists()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"scheduling_policy": "priority"},
        {"drafts": 3},
        {"long_prefill_token_threshold": 24},
        {"enable_prefix_caching": False},
        {"overlaps": True},
        {"overlaps": True, "scheduling_policy": "priority"},
        {"overlaps": True, "drafts": 3},
    ],
    ids=lambda settings: " ".join(settings) or "plain",
)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_recorded_run_verifies(tmp_path, monkeypatch, seed, settings):
    monkeypatch.setenv("MMENGINE_LOG", str(tmp_path / "log"))
    number, preempted = drive(RecordingScheduler, seed, **settings)
    assert preempted
    log = CheckedLog(tmp_path / "log")
    state = log.first_state()
    for record in log:
        with log.naming(record):
            log.apply(state, record.event)
    assert log.findings.listed == []
    report = verify(tmp_path / "log")
    assert report.divergence is None, report.divergence
    assert report.rederived and report.requests == number
    own = verify(tmp_path / "log", own="vllm")
    assert own.divergence is None, own.divergence
    assert own.calls == report.calls and own.unfinished == report.unfinished


@pytest.mark.parametrize("windows", [(0, 64), (20, 0, 0, 64)], ids=str)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"overlaps": True},
        {"drafts": 3},
        {"overlaps": True, "drafts": 3},
        {"enable_prefix_caching": False},
    ],
    ids=" ".join,
)
def test_hybrid_groups_are_derived(tmp_path, monkeypatch, settings, windows):
    monkeypatch.setenv("MMENGINE_LOG", str(tmp_path / "log"))
    _, preempted = drive(RecordingScheduler, 1, window=windows, num_blocks=30 * len(windows), **settings)
    assert preempted
    for own in ("", "vllm"):
        report = verify(tmp_path / "log", own=own)
        assert report.divergence is None, report.divergence
        assert report.rederived and report.calls > 200
    assert first_broken(CheckedLog(tmp_path / "log")) is None


def test_hybrid_groups_are_not_derived_with_hashes_of_parts_of_a_block(tmp_path, monkeypatch):
    monkeypatch.setenv("MMENGINE_LOG", str(tmp_path / "log"))
    drive(RecordingScheduler, 1, steps=30, window=64, num_blocks=60, hash_block_size=8)
    assert "do not model hash_block_size 8" in verify(tmp_path / "log").caveat
    assert verify(tmp_path / "log", own="vllm").rederived


def test_a_dump_of_hybrid_groups_begins_while_requests_run(tmp_path, monkeypatch):
    monkeypatch.setenv("MMENGINE_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("MMENGINE_LOG_BYTES", "20000")
    drive(RecordingScheduler, 1, window=(20, 0, 64), num_blocks=90, overlaps=True)
    parts = sorted(path.parent for path in tmp_path.rglob("*.mmlog*"))
    assert len(set(parts)) > 1
    for part in set(parts):
        log = CheckedLog(part)
        assert first_broken(log) is None and log.findings.listed == []


def test_each_scheduler_gets_a_configuration_of_its_own():
    # Configurations made from the same settings share no objects.
    names = {"block_size": 16, "num_blocks": 40, "max_model_len": 512, "max_num_seqs": 8}
    first, second = engine_config_alone(names), engine_config_alone(names)
    first.scheduler_config.max_num_seqs = 1
    assert (
        second.scheduler_config.max_num_seqs == engine_config_alone(names).scheduler_config.max_num_seqs == 8
    )


def test_a_log_of_another_version_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("MMENGINE_LOG", str(tmp_path / "log"))
    drive(type("Older", (RecordingScheduler,), {"host_version": "0.1.0"}), 1, steps=3)
    with pytest.raises(LogError, match=r"the log is of vllm 0\.1\.0, and vllm 0\.3\d\.0 is installed"):
        verify(tmp_path / "log", own="vllm")
