"""Tests that state digests name the column, request and row in which two states differ."""

import numpy as np
import pytest

from mmengine.config import EngineConfig
from mmengine.core.fold.evolve import evolve
from mmengine.core.state.columns import COLUMNS
from mmengine.core.state.digest import COLUMN_NAMES, checkpoint, where_apart
from mmengine.core.state.state import State
from mmengine.events.log import LogReader
from tests.replay.runs import busy_run


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "log"
    busy_run(folder, 5)
    return list(LogReader(folder))


def folded(records):
    """Return a state with an open step, running and waiting requests, and referenced encoder outputs."""
    state = State(EngineConfig.from_dict(records[0].event.config))
    for record in records:
        evolve(state, record.event)
        held = any(each.held_media for each in state.requests.values())
        if len(state.running) > 2 and state.waiting and state.is_open and held:
            break
    return state


@pytest.mark.parametrize("name", [*COLUMNS, "token_ids", "block_table"])
def test_a_changed_cell_is_named_by_column_request_and_row(records, name):
    state = folded(records)
    before, row = checkpoint(state), int(state.running[1])
    if name in COLUMNS and name not in ("num_tokens", "num_drafts", "num_blocks"):
        getattr(state, name)[row] += 1
    elif name in COLUMNS:
        getattr(state, name)[row] -= 1
    else:
        getattr(state, name)[row, 0] += 1
    columns, requests = where_apart(state, before)
    assert name in columns and set(columns) <= {name, "token_ids", "block_table"}
    assert requests == [(state.requests_by_row[row].request.request_id, row)]
    assert checkpoint(state).digest != before.digest


def arrival(state):
    state.waiting[0].arrival += 1


def prompt(state):
    state.waiting[0].tokens = state.waiting[0].tokens + np.int32(1)


@pytest.mark.parametrize("change, column", [(arrival, "requests"), (prompt, "waiting")])
def test_a_request_that_waits_is_named(records, change, column):
    state = folded(records)
    before = checkpoint(state)
    change(state)
    assert where_apart(state, before) == ([column], [(state.waiting[0].request.request_id, -1)])


def test_a_difference_outside_requests_names_its_column(records):
    state = folded(records)
    before = checkpoint(state)
    state.blocks.references[1] += 1
    state.free_rows.reverse()
    assert where_apart(state, before) == (["block references", "free rows"], [])


def test_other_live_requests_are_a_column(records):
    """If the states have different numbers of requests, only columns are named."""
    state = folded(records)
    before = checkpoint(state)
    del state.requests[state.waiting[0].request.request_id]
    del state.waiting[0]
    columns, requests = where_apart(state, before)
    assert columns == ["requests", "waiting"] and requests == []


def test_it_is_small(records):
    # A checkpoint has 4 bytes for each column and for each live request.
    state = folded(records)
    assert len(checkpoint(state).columns) == 4 * len(COLUMN_NAMES)
    assert len(checkpoint(state).requests) == 4 * len(state.requests)


def test_grammar_slots_are_a_column(records):
    state = folded(records)
    before = checkpoint(state)
    state.grammar_slots.restore(((5, "regex", "a"),))
    assert where_apart(state, before) == (["kept grammars"], [])
