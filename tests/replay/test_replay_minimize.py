"""Tests that `minimize` shrinks failing logs, and that the small logs fail in the same way. The tests plant
bugs in this build.
"""

import json
import secrets
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mmengine.cli import main as cli
from mmengine.core.decide.scheduler import Scheduler
from mmengine.core.fold import evolve
from mmengine.core.state import policy
from mmengine.errors import LogError
from mmengine.replay import replay_failure
from mmengine.replay.minimize import command_probe as command
from mmengine.replay.minimize import deadline, shrink
from mmengine.replay.minimize.build_probe import BuildProbe
from mmengine.replay.minimize.command_probe import CommandProbe
from mmengine.replay.minimize.deadline import Deadline, OutOfTime
from mmengine.replay.minimize.failures import Failure, find_failure
from mmengine.replay.minimize.minimize import Minimizer
from mmengine.replay.rerun.playback import Playback
from mmengine.replay.rerun.script import read_script
from tests.replay.runs import busy_run

ROOT = Path(__file__).parents[2]
LEAKY = {"num_requests": 60, "fail_at": (), "num_blocks": 13, "token_budget": 9}
LEAKY |= {"admission_reserve": "none", "encoder_cache_size": 24}


@pytest.fixture
def leak(monkeypatch):
    """Plant a leak: a request that leaves its row keeps the reference to its last media item. Returns the
    function without the bug.
    """
    real = evolve.leave_row

    def leave_row(state, req_state, *rest):
        if req_state.request.request_id in state.requests and req_state.held_media:
            req_state.held_media.discard(max(req_state.held_media))
        real(state, req_state, *rest)

    monkeypatch.setattr(evolve, "leave_row", leave_row)
    return real


def test_fewest_keeps_the_needed_items():
    tried = []

    def fails(some):
        tried.append(some)
        return {3, 77} <= {*some}

    assert shrink.fewest(range(100), fails) == [3, 77]
    assert len(tried) < 60
    assert shrink.fewest([1, 2], lambda some: True) == []


def test_smallest_of_a_range():
    assert shrink.smallest(1, 1000, lambda value: value >= 37) == 37
    assert shrink.smallest(4, 9, lambda value: True) == 4
    assert shrink.smallest(4, 9, lambda value: value == 9) == 9


@pytest.mark.parametrize("settings", [False, True])
def test_a_leak_becomes_small(tmp_path, leak, settings):
    busy_run(tmp_path / "log", 8, **LEAKY)
    script = read_script(tmp_path / "log")
    assert len(script.requests) > 20
    minimizer = Minimizer(script, lambda some, most: find_failure(some, "encoder", max_steps=most))
    whole = minimizer.failure
    small = minimizer.minimize(settings=settings)
    assert len(small.requests) <= 3
    assert find_failure(small, "encoder").signature == whole.signature == minimizer.failure.signature
    assert sum(len(event.media) for event in small.requests) == 1
    assert {event.priority for event in small.requests} <= {0, 1, -1}
    evolve.leave_row = leak
    assert find_failure(small, "any") is None, "without the bug nothing fails"


def run(capsys, monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["mmengine", "log", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code, capsys.readouterr()


def test_the_command_leaves_a_log_and_a_test(tmp_path, leak, monkeypatch, capsys):
    busy_run(tmp_path / "log", 8, **LEAKY)
    out = tmp_path / "small"
    code, said = run(
        capsys, monkeypatch, "minimize", tmp_path / "log", "--failing", "any", "-o", out, "--json"
    )
    assert not code, said.err
    report = json.loads(said.out)
    assert report["failure"] == "encoder" and report["requests"] < report["requests_before"]
    assert replay_failure(out / "log", "encoder").kind == "encoder"
    test = (out / "test_minimized_encoder.py").read_text()
    assert test == Path(report["test"]).read_text()
    names = {"__file__": str(out / "test_minimized_encoder.py")}
    exec(compile(test, "test", "exec"), names)
    with pytest.raises(AssertionError, match="encoder entry"):
        names["test_encoder"]()
    evolve.leave_row = leak
    names["test_encoder"]()
    code, said = run(capsys, monkeypatch, "minimize", tmp_path / "log", "--failing", "any", "-o", out)
    assert code == 1 and "not empty" in said.err
    again = ("--failing", "any", "-o", tmp_path / "again")
    code, said = run(capsys, monkeypatch, "minimize", tmp_path / "log", *again)
    assert code == 1 and "nothing failed" in said.err and not (tmp_path / "again").exists()


def test_a_command_that_fails(tmp_path, monkeypatch, capsys):
    """The command fails only if the log has both `wanted` requests, so minimize drops all other requests."""
    live = busy_run(tmp_path / "log", 1, fail_at=())
    wanted = [name for name, (reason, *_) in live.ends.items() if reason == "length" and len(name) == 3][:2]
    found = " && ".join(f'grep -aq {name} "$1"/*' for name in wanted)
    check = tmp_path / "check.sh"
    check.write_text(f"if {found}; then echo both are there; exit 3; fi")
    command = f"sh {check} {{}}"
    out = tmp_path / "small"
    arguments = ("minimize", tmp_path / "log", "--failing", command, "-o", out, "--json")
    code, said = run(capsys, monkeypatch, *arguments)
    assert not code, said.err
    assert {event.request_id for event in read_script(out / "log").requests} == {*wanted}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(out)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "both are there" in done.stdout


def test_a_log_that_cannot_be_minimized_is_reported(tmp_path, monkeypatch, capsys):
    busy_run(tmp_path / "log", 1, num_requests=6)
    arguments = ("minimize", tmp_path / "log", "-o", tmp_path / "small", "--failing")
    code, said = run(capsys, monkeypatch, *arguments, "blocks")
    assert code == 1 and "nothing failed" in said.err
    code, said = run(capsys, monkeypatch, *arguments, "bloks")
    assert code == 1 and "bloks" in said.err and "encoder, media, references" in said.err
    code, said = run(capsys, monkeypatch, *arguments, "no-such-program {}")
    assert code == 1 and "no-such-program cannot be run" in said.err


@pytest.mark.parametrize("kind", ["tokens", "divergence", "stalled", "any"])
def test_a_sound_engine_does_not_fail(tmp_path, kind):
    busy_run(tmp_path / "log", 2)
    assert replay_failure(tmp_path / "log", kind) is None


def test_wrong_kv_is_detected_as_wrong_tokens(tmp_path, monkeypatch):
    """The planted bug lets a prefix cache hit return another request's KV."""
    busy_run(tmp_path / "log", 2, fail_at=())
    from mmengine.core.state.prefix_index import PrefixIndex

    real = PrefixIndex.find

    def find(self, parent, part, tokens, extra):
        return real(self, parent, part, tokens, b"")  # Ignores media and tenants.

    monkeypatch.setattr(PrefixIndex, "find", find)
    monkeypatch.setattr(PrefixIndex, "insert", _without_extra(PrefixIndex.insert))
    assert replay_failure(tmp_path / "log", "any").kind == "hits"
    assert replay_failure(tmp_path / "log", "tokens").kind == "tokens"


def _without_extra(real):
    return lambda self, block, parent, part, tokens, extra: real(self, block, parent, part, tokens, b"")


def test_a_stateful_scheduler_diverges(tmp_path, monkeypatch):
    busy_run(tmp_path / "log", 2, fail_at=())
    plant_a_memory(monkeypatch)
    assert replay_failure(tmp_path / "log", "divergence").kind == "divergence"


def plant_a_memory(monkeypatch):
    """Give the scheduler a memory, so that the same state leads to another decision the second time."""
    real, asked = Scheduler.schedule, []

    def schedule(self, view):
        asked.append(view.step)
        event = real(self, view)
        if len(asked) == 200 and isinstance(event, type(None)) is False and hasattr(event, "new_blocks"):
            return event
        return (
            event
            if len(asked) < 150 or not view.waiting or len(view.running) < 2
            else _without_admission(event)
        )

    monkeypatch.setattr(Scheduler, "schedule", schedule)


def _without_admission(event):
    return None if type(event).__name__ == "Admitted" else event


def test_scripts_shrink_as_requested(tmp_path):
    busy_run(tmp_path / "log", 4, fail_at=())
    script = read_script(tmp_path / "log")
    event = next(event for event in script.requests if event.media and len(event.prompt) > 80)
    name, item = event.request_id, event.media[0]
    smaller = shrink.resize_media(script, item.mm_hash, 1)
    for each in smaller.requests:
        assert all(one.num_embeds == 1 for one in each.media if one.mm_hash == item.mm_hash)
        end = 0
        for one in each.media:
            for start, length in one.runs:
                assert start >= end
                end = start + length
        assert end <= len(each.prompt) // 4
    start, end = next(iter(shrink.text_ranges(event)))
    cut = shrink.drop_text(script, name, start, end - start)
    changed = next(each for each in cut.requests if each.request_id == name)
    assert len(changed.prompt) == len(event.prompt) - 4 * (end - start)
    kept = np.delete(np.frombuffer(event.prompt, np.int32), np.s_[start:end])
    assert np.frombuffer(changed.prompt, np.int32).tolist() == kept.tolist()
    other = next(each.request_id for each in script.requests if each.request_id != name)
    both = shrink.merge_requests(script, other, name)
    assert [each.request_id for each in both.requests].count(other) == 0


def test_an_earlier_failure_of_another_kind_is_reported(tmp_path, monkeypatch, capsys):
    """The run crashes before its log can be verified, so `minimize` reports the crash instead of a
    divergence, and leaves no files.
    """
    busy_run(tmp_path / "log", 1, num_requests=6)
    real = Playback.step

    def step(self):
        if self.core.state.step == 5:
            raise ZeroDivisionError("a bug")
        return real(self)

    monkeypatch.setattr(Playback, "step", step)
    out = tmp_path / "made" / "small"
    arguments = ("minimize", tmp_path / "log", "--failing", "divergence", "-o", out)
    code, said = run(capsys, monkeypatch, *arguments)
    assert code == 1 and "another failure comes before" in said.err and "--failing crash" in said.err
    assert not out.parent.exists()
    code, said = run(capsys, monkeypatch, *arguments[:3], "crash", "-o", out)
    assert not code and [path.name for path in out.parent.iterdir()] == ["small"]


def test_a_failed_write_leaves_no_files(tmp_path, leak, monkeypatch, capsys):
    busy_run(tmp_path / "log", 8, **LEAKY)
    monkeypatch.setattr("mmengine.replay.minimize.reproduction._table", lambda script: 1 / 0)
    arguments = ("minimize", tmp_path / "log", "--failing", "any", "-o", tmp_path / "small")
    code, said = run(capsys, monkeypatch, *arguments)
    assert code == 70 and "ZeroDivisionError" in said.err
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


@pytest.fixture
def on_path(tmp_path, monkeypatch):
    """Put a program `mmengine` first on PATH. The program fails, so a test notices when mmengine is started
    as a process.
    """
    program = tmp_path / "bin" / "mmengine"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 99\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")


def test_mmengine_commands_run_in_this_process(tmp_path, on_path, monkeypatch, capsys):
    """`mmengine log verify` always fails here, because each digest is random."""
    busy_run(tmp_path / "log", 2, fail_at=(), num_requests=40)
    monkeypatch.setattr("mmengine.core.state.digest._hash", lambda data: secrets.token_bytes(16))
    arguments = (
        "minimize",
        tmp_path / "log",
        "--failing",
        "mmengine log verify {}",
        "-o",
        tmp_path / "small",
    )
    code, said = run(capsys, monkeypatch, *arguments, "--json")
    assert not code, said.err
    report = json.loads(said.out)
    assert report["failure"] == "exit code 3" and report["requests"] < report["requests_before"]
    assert report["what"].startswith("DIVERGED at step")


def test_other_commands_run_as_processes(on_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["mmengine"])
    monkeypatch.setattr(command, "write_log", lambda *arguments: None)
    for text in ("mmengine log fsck --repair {}", "mmengine log redact {} x", "sh -c 'exit 99' {}"):
        assert CommandProbe(text, main=lambda arguments: 0).of_log(Path("log")).kind == "exit code 99"
    assert CommandProbe("mmengine log verify {}", main=lambda arguments: 0).of_log(Path("log")) is None
    with pytest.raises(LogError, match="cannot be parsed"):
        CommandProbe("mmengine 'log {}")


def test_a_command_ends_with_the_deadline(on_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["mmengine"])
    # Both commands sleep for 600 s, but pytest stops a test after 300 s.
    for text in ("sh -c 'sleep 600' {}", "mmengine log verify {}"):
        with pytest.raises(OutOfTime, match="passed while"):
            CommandProbe(text, Deadline(0.2), main=lambda arguments: time.sleep(600) or 0).of_log(Path("log"))


def test_seconds_bound_the_first_replay(tmp_path, monkeypatch, capsys):
    busy_run(tmp_path / "log", 1, num_requests=6)
    real = Playback.step
    monkeypatch.setattr(Playback, "step", lambda self: (time.sleep(0.3), real(self))[1])
    arguments = ("minimize", tmp_path / "log", "--failing", "any", "-o", tmp_path / "small", "--seconds", "1")
    code, said = run(capsys, monkeypatch, *arguments)
    assert code == 1 and "1 seconds passed while serving its requests for the first time" in said.err
    assert not (tmp_path / "small").exists()


def test_the_deadline_returns_the_smallest_script_so_far(tmp_path, monkeypatch):
    busy_run(tmp_path / "log", 1, fail_at=())
    script, clock = read_script(tmp_path / "log"), SimpleNamespace(now=0.0)
    monkeypatch.setattr(deadline, "monotonic", lambda: clock.now)

    def probe(some, most):
        clock.now += 0.02
        return Failure("any", "it fails", 5) if len(some.requests) > 1 else None

    minimizer = Minimizer(script, probe, deadline=Deadline(0.8))
    small = minimizer.minimize()
    assert clock.now < 0.8 and minimizer.is_cut_short
    assert len(small.requests) < len(script.requests)


@pytest.fixture
def other_victim(monkeypatch):
    """Make this build preempt the request that was admitted first."""
    changed = policy.FCFS._replace(victim=lambda view: int(view.running[0]))
    monkeypatch.setattr(policy, "policy_of", lambda config: changed)
    monkeypatch.setattr("mmengine.core.state.state.policy_of", lambda config: changed)


def test_a_policy_against_another_build(tmp_path, other_victim, monkeypatch, capsys):
    busy_run(tmp_path / "log", 8, **LEAKY)
    out = tmp_path / "small"
    arguments = ("minimize", tmp_path / "log", "--against", ROOT, "-o", out, "--json", "--seconds", 60)
    code, said = run(capsys, monkeypatch, *arguments)
    assert not code, said.err
    report = json.loads(said.out)
    assert report["requests"] <= 4 and report["what"].startswith("Preempted, field request_id")
    names = {"__file__": str(out / "test_minimized_parted.py")}
    exec(compile((out / "test_minimized_parted.py").read_text(), "test", "exec"), names)
    with pytest.raises(AssertionError, match="Preempted"):
        names["test_parted"]()
    monkeypatch.undo()
    names["test_parted"]()


def test_a_vllm_policy_against_another_build(tmp_path, other_victim, monkeypatch, capsys):
    busy_run(tmp_path / "log", 8, **LEAKY, compat="vllm")
    out = tmp_path / "small"
    arguments = ("minimize", tmp_path / "log", "--against", ROOT, "-o", out, "--json", "--seconds", 60)
    code, said = run(capsys, monkeypatch, *arguments)
    assert not code, said.err
    assert json.loads(said.out)["what"].startswith("Preempted, field request_id")


def test_builds_that_agree_or_cannot_be_probed(tmp_path, monkeypatch, capsys):
    busy_run(tmp_path / "log", 8, **LEAKY)
    arguments = ("minimize", tmp_path / "log", "-o", tmp_path / "small")
    code, said = run(capsys, monkeypatch, *arguments, "--against", ROOT)
    assert code == 1 and "nothing failed" in said.err
    (tmp_path / "old" / "mmengine").mkdir(parents=True)
    (tmp_path / "old" / "mmengine" / "__init__.py").touch()
    for where, words in ((tmp_path / "old", "is it too old?"), (tmp_path, "is not a Python")):
        code, said = run(capsys, monkeypatch, *arguments, "--against", where)
        assert code == 1 and words in said.err and "Traceback" not in said.err
    code, said = run(capsys, monkeypatch, *arguments)
    assert code == 2 and "exactly one" in " ".join(said.err.replace("│", " ").split())
    with pytest.raises(LogError, match="instead of its own|too old"), BuildProbe(str(tmp_path / "old")):
        pass
