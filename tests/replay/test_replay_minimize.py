"""Failing logs get small and keep failing in the same way; bugs are planted for the test only."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mmengine.cli import main as cli
from mmengine.core.fold import evolve
from mmengine.replay import replay_failure
from mmengine.replay.minimize import shrink
from mmengine.replay.minimize.failures import find_failure
from mmengine.replay.minimize.minimize import Minimizer
from mmengine.replay.rerun.script import read_script
from tests.replay.runs import busy_run

LEAKY = {"num_requests": 60, "fail_at": (), "num_blocks": 13, "token_budget": 9}
LEAKY |= {"admission_reserve": "none", "encoder_cache_size": 24}


@pytest.fixture
def leak(monkeypatch):
    """A preempted request keeps a reference to its last item."""
    real = evolve.leave_row

    def leave_row(state, req_state, *rest):
        if req_state.request.request_id in state.requests and req_state.held_media:
            req_state.held_media.discard(max(req_state.held_media))
        real(state, req_state, *rest)

    monkeypatch.setattr(evolve, "leave_row", leave_row)
    return real


def test_fewest_keeps_what_is_needed():
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
    """The command looks for two requests of one log; the rest goes."""
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


def test_what_cannot_be_minimized_is_said(tmp_path, monkeypatch, capsys):
    busy_run(tmp_path / "log", 1, num_requests=6)
    arguments = ("minimize", tmp_path / "log", "-o", tmp_path / "small", "--failing")
    code, said = run(capsys, monkeypatch, *arguments, "blocks")
    assert code == 1 and "nothing failed" in said.err
    code, said = run(capsys, monkeypatch, *arguments, "bloks")
    assert code == 1 and "bloks" in said.err and "encoder, references" in said.err
    code, said = run(capsys, monkeypatch, *arguments, "no-such-program {}")
    assert code == 1 and "no-such-program cannot be run" in said.err


@pytest.mark.parametrize("kind", ["tokens", "divergence", "stalled", "any"])
def test_a_sound_engine_does_not_fail(tmp_path, kind):
    busy_run(tmp_path / "log", 2)
    assert replay_failure(tmp_path / "log", kind) is None


def test_wrong_kv_is_seen_as_wrong_tokens(tmp_path, monkeypatch):
    """Hits whose content is another request's: no invariant of the state notices."""
    busy_run(tmp_path / "log", 2, fail_at=())
    from mmengine.core.state.prefix_index import PrefixIndex

    real = PrefixIndex.find

    def find(self, parent, part, tokens, extra):
        return real(self, parent, part, tokens, b"")  # media and tenants are not looked at

    monkeypatch.setattr(PrefixIndex, "find", find)
    monkeypatch.setattr(PrefixIndex, "insert", _without_extra(PrefixIndex.insert))
    assert replay_failure(tmp_path / "log", "any") is None
    assert replay_failure(tmp_path / "log", "tokens").kind == "tokens"


def _without_extra(real):
    return lambda self, block, parent, part, tokens, extra: real(self, block, parent, part, tokens, b"")


def test_a_decision_that_remembers_diverges(tmp_path, monkeypatch):
    """A scheduler with a memory of its own decides otherwise when it is asked again."""
    busy_run(tmp_path / "log", 2, fail_at=())
    from mmengine.core import engine

    real, asked = engine.schedule, []

    def schedule(view):
        asked.append(view.step)
        event = real(view)
        if len(asked) == 200 and isinstance(event, type(None)) is False and hasattr(event, "new_blocks"):
            return event
        return (
            event
            if len(asked) < 150 or not view.waiting or len(view.running) < 2
            else _without_admission(event)
        )

    monkeypatch.setattr(engine, "schedule", schedule)
    assert replay_failure(tmp_path / "log", "divergence").kind == "divergence"


def _without_admission(event):
    return None if type(event).__name__ == "Admitted" else event


def test_scripts_shrink_as_they_say(tmp_path):
    busy_run(tmp_path / "log", 4, fail_at=())
    script = read_script(tmp_path / "log")
    event = next(event for event in script.requests if event.media and len(event.prompt) > 80)
    name, item = event.request_id, event.media[0]
    smaller = shrink.with_media_size(script, item.mm_hash, 1)
    for each in smaller.requests:
        assert all(one.num_embeds == 1 for one in each.media if one.mm_hash == item.mm_hash)
        end = 0
        for one in each.media:
            for start, length in one.runs:
                assert start >= end
                end = start + length
        assert end <= len(each.prompt) // 4
    start, end = next(iter(shrink.texts(event)))
    cut = shrink.without_text(script, name, start, end - start)
    changed = next(each for each in cut.requests if each.request_id == name)
    assert len(changed.prompt) == len(event.prompt) - 4 * (end - start)
    kept = np.delete(np.frombuffer(event.prompt, np.int32), np.s_[start:end])
    assert np.frombuffer(changed.prompt, np.int32).tolist() == kept.tolist()
    other = next(each.request_id for each in script.requests if each.request_id != name)
    both = shrink.merged(script, other, name)
    assert [each.request_id for each in both.requests].count(other) == 0
