"""Tests that a log stores a grammar once for all requests that share it."""

import msgspec
import numpy as np
import pytest

from mmengine.config import EngineConfig
from mmengine.core.engine import EngineCore
from mmengine.core.fold.evolve import evolve
from mmengine.core.snapshot import snapshot
from mmengine.core.state.grammar_slots import LONGEST, MAX_SLOTS, SHORTEST, GrammarSlots
from mmengine.core.state.state import State
from mmengine.errors import CorruptLog
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader, LogWriter
from mmengine.replay import request_lines, verify
from mmengine.request import GrammarRequest, Request, SamplingParams
from mmengine.simulation.simulated_executor import SimulatedExecutor
from tests.events.logs import rewrite

SCHEMA = '{"const":"' + 100_000 * "x" + '"}'
CONFIG = EngineConfig(max_num_seqs=4, token_budget=32, max_model_len=40, num_blocks=41, encoder_cache_size=64)


def queued(source, slot=ev.NO_SLOT, kind="regex", **how):
    return ev.Queued(
        "a", b"", SamplingParams(), grammar=GrammarRequest(kind, source, **how), grammar_slot=slot
    )


def run(folder, forms, at_once=1):
    """Run a request for each grammar in `forms`, `at_once` requests at a time, and return the core."""
    core = EngineCore(CONFIG, SimulatedExecutor(CONFIG), sink=LogWriter(folder))
    names = iter(range(len(forms)))
    while core.has_work or len(core.state.requests) < at_once:
        while len(core.state.requests) + len(core.inbox.queued) < at_once:
            number = next(names, None)
            if number is None:
                break
            sampling = SamplingParams(max_tokens=2, seed=0)
            core.submit(Request(f"r{number}", np.array([1, 2, 3], np.int32), sampling, grammar=forms[number]))
        if not core.has_work:
            break
        for name, known in core.state.requests.items():
            if known.waits_for_grammar:
                core.grammar_ready(name)
        for output in core.step():
            if output.finish_reason is not None:
                core.delivered(output.request_id)
    return core


@pytest.mark.parametrize("at_once", [1, 50])
def test_a_schema_of_100_kilobytes_that_200_requests_ask_for_is_written_once(tmp_path, at_once):
    forms = [
        GrammarRequest("json_schema", SCHEMA, (7,) * (number % 2), "close" if number % 3 else "length")
        for number in range(200)
    ]
    core = run(tmp_path / "log", forms, at_once)
    core.close()
    assert sum(path.stat().st_size for path in (tmp_path / "log").glob("*.mmlog")) < 3 * len(SCHEMA)
    report = verify(tmp_path / "log")
    assert report.ok and report.requests == 200
    state, seen = State(CONFIG), []
    for record in LogReader(tmp_path / "log"):
        evolve(state, record.event)
        if isinstance(record.event, ev.Queued):
            seen.append(state.requests[record.event.request_id].request.grammar)
    assert seen == forms and len({id(each.source) for each in seen}) == 1, (
        "all requests share one string in memory"
    )


def test_a_snapshot_has_it_once_and_gives_it_to_all(tmp_path):
    forms = [GrammarRequest("json_schema", SCHEMA), GrammarRequest("regex", "short")] * 20
    core = run(tmp_path / "log", forms[:1])
    for number, form in enumerate(forms):
        prompt = np.array([1, 2, 3], np.int32)
        core.submit(Request(f"s{number}", prompt, SamplingParams(max_tokens=2, seed=0), grammar=form))
    core.step()
    data = core.snapshot(0)
    assert len(data) < 2 * len(SCHEMA)
    state, _ = snapshot.restore(data)
    assert [each.request.grammar for each in state.requests.values()] == forms
    assert state.grammar_slots.saved() == core.state.grammar_slots.saved() != ()
    core.close()


def test_the_slot_that_was_used_longest_ago_is_taken():
    kept = GrammarSlots()
    sources = [f"{number}" * SHORTEST for number in range(MAX_SLOTS + 1)]

    def ask(number):
        written = kept.written(queued(sources[number]))
        assert kept.written(kept.whole(written)) == written, "a replay derives the same event"
        whole = kept.whole(written)
        kept.keep(written)
        assert whole == queued(sources[number])
        return written

    assert [ask(number).grammar_slot for number in range(MAX_SLOTS)] == [*range(MAX_SLOTS)]
    assert ask(0).grammar == GrammarRequest("", "") and ask(MAX_SLOTS).grammar_slot == 1
    assert ask(1).grammar.source and ask(0).grammar_slot == 0
    for source in ("x" * (SHORTEST - 1), "x" * (LONGEST + 1)):
        assert kept.written(queued(source)) == queued(source)
    other = queued(sources[0], kind="lark", after=(3,), on_truncation="close")
    assert kept.written(other).grammar.source, "another kind is another grammar"


@pytest.mark.parametrize(
    "event",
    [
        queued("", slot=0, kind=""),
        queued("", slot=3, kind=""),
        queued("x" * SHORTEST, slot=MAX_SLOTS),
        queued("x" * SHORTEST, slot=-2),
        queued("x" * (LONGEST + 1), slot=0),
        msgspec.structs.replace(queued(""), grammar=None, grammar_slot=0),
    ],
)
def test_events_that_no_build_wrote_are_refused(event, tmp_path):
    kept = GrammarSlots()
    with pytest.raises(ValueError, match="slot"):
        kept.whole(event)
        kept.keep(event)
    records = list(LogReader(run_one(tmp_path / "log")))
    place = next(place for place, each in enumerate(records) if isinstance(each.event, ev.Queued))
    old = records[place].event
    lie = msgspec.structs.replace(old, grammar=event.grammar, grammar_slot=event.grammar_slot)
    records[place] = msgspec.structs.replace(records[place], event=lie)
    lied = rewrite(records, tmp_path / "lie")
    with pytest.raises(CorruptLog, match="slot"):
        request_lines(lied)
    try:
        assert not verify(lied).ok
    except CorruptLog as error:
        assert "slot" in str(error)


def run_one(folder):
    run(folder, [GrammarRequest("regex", "a" * SHORTEST)]).close()
    return folder
