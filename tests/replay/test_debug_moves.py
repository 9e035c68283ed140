"""Tests interrupted moves in the log debugger, and moves back by several steps."""

import pytest

from mmengine.core.state.digest import state_digest
from mmengine.replay.debug import navigator
from mmengine.replay.debug.commands.session import Session
from tests.replay.runs import busy_run
from tests.replay.test_debug_core import debugger_of, folded


@pytest.fixture(scope="module")
def busy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moves") / "log"
    busy_run(folder, num_requests=24, mixed=True)
    return folder


def test_an_interrupted_move_leaves_no_half_applied_record(busy, monkeypatch):
    expected = folded(busy)
    debugger = debugger_of(busy)
    debugger.goto_event(40)
    evolve, count = navigator.evolve, []

    def interrupted(state, event):
        evolve(state, event)
        count.append(event)
        if len(count) == 25:
            raise KeyboardInterrupt

    monkeypatch.setattr(navigator, "evolve", interrupted)
    with pytest.raises(KeyboardInterrupt):
        debugger.goto_end()
    position = debugger.navigator.position
    assert position == 64 and state_digest(debugger.navigator.state) != expected[position][0]
    debugger.navigator.reload()
    assert debugger.navigator.position == position
    assert state_digest(debugger.navigator.state) == expected[position][0]


def test_another_thread_interrupts_a_move(busy):
    session = Session(debugger_of(busy))
    session.run("goto event 40")
    session.debuggers[0].navigator.interrupt()
    blocks, error = session.try_run("goto end")
    assert not blocks and error == "interrupted at record 40"
    assert state_digest(session.debugger.navigator.state) == folded(busy)[40][0]


@pytest.mark.parametrize(("line", "count"), [("rs", 9), ("rn r5", 3), ("rs", 999)])
def test_moves_back_by_a_count_read_the_log_once(busy, monkeypatch, line, count):
    by_one, at_once = Session(debugger_of(busy)), Session(debugger_of(busy))
    for session in (by_one, at_once):
        session.run("goto end")
    for _ in range(min(count, 9)):
        by_one.run(line)
    moved = at_once.debugger.navigator
    read, advance = [], moved._advance
    monkeypatch.setattr(moved, "_advance", lambda cursor: (read.append(1), advance(cursor)))
    if line == "rs":
        at_once.run(f"rs {count}")
    else:
        at_once.debugger.step_request("r5", -count)
    expected = 0 if count == 999 else by_one.debugger.navigator.position
    assert moved.position == expected and len(read) < 3 * moved.end
