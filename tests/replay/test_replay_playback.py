"""Tests that playing a log's observations and answers again, with equal settings, repeats its decisions."""

import pytest

from mmengine.core.engine import EngineCore
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader, LogWriter, MemoryLog
from mmengine.replay.rerun.playback import Playback
from mmengine.replay.rerun.script import read_script
from mmengine.replay.rerun.scripted_executor import ScriptedExecutor
from mmengine.simulation.simulated_executor import SimulatedExecutor
from tests.core.small_engine import request, settings_of
from tests.replay.runs import busy_run

SCHEDULING = (ev.Scheduled, ev.Admitted, ev.Preempted, ev.Dispatched, ev.Stalled)
NOT_PLAYED = (ev.Started, ev.Delivered, ev.Checkpoint)


def decided(records, in_flight):
    """Return the events that a playback must repeat.

    With a single step in flight, all events except NOT_PLAYED and rejections are returned. With two steps,
    only the scheduling events are returned, because tokens and the order of ends and arrivals may differ.
    """
    events = [record.event for record in records if not isinstance(record.event, NOT_PLAYED)]
    if in_flight > 1:
        return [each for each in events if isinstance(each, SCHEDULING)]
    events = [each for each in events if not (isinstance(each, ev.Finished) and each.reason == "rejected")]
    return [
        (each.token_ids, each.stops, each.errors) if isinstance(each, ev.Executed) else each
        for each in events
    ]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("settings", [{}, {"max_in_flight": 2}, {"swap_blocks": 8, "preempt_mode": "swap"}])
def test_the_same_decisions(tmp_path, seed, settings):
    busy_run(tmp_path / "log", seed, **settings)
    script = read_script(tmp_path / "log")
    again = MemoryLog()
    executor = ScriptedExecutor(script.config, script.answers, failed_steps=script.failed_steps)
    playback = Playback(script.config, script.observations, executor, sink=again)
    while playback.step() is not None:
        pass
    in_flight = script.config.max_in_flight
    assert decided(again.records, in_flight) == decided(LogReader(tmp_path / "log"), in_flight)


def test_a_reused_id_has_a_separate_answer(tmp_path):
    config = settings_of()
    core = EngineCore(config, SimulatedExecutor(config), sink=LogWriter(tmp_path / "log"))
    got = []
    for length in (5, 9):
        core.submit(request("a", length, max_tokens=length))
        while core.has_work:
            got += [token for output in core.step() for token in output.token_ids]
    core.close()
    script = read_script(tmp_path / "log")
    assert [event.request_id for event in script.requests] == ["a", "a#2"]
    assert script.answers["a"].tokens.tolist() + script.answers["a#2"].tokens.tolist() == got
