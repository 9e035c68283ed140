"""Tests that requests can be removed from recorded decisions. The other requests' decisions stay valid,
except cache hits that need a removed request.
"""

import random

import numpy as np
import pytest

from mmengine.core.fold.evolve import evolve
from mmengine.core.state.state import State
from mmengine.events import vocabulary as ev
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.invariants import find_broken
from mmengine.replay.minimize.projection import Projection, piece_of
from mmengine.replay.rules.decisions import broken_rules
from tests.replay.runs import busy_run, session_run

RUNS = {
    "plain": {},
    "overlap": {"max_in_flight": 2, "num_draft_tokens": 2, "draft_policy": "goodput"},
    "mixed": {"mixed": True},
}


def split(folder):
    log = CheckedLog(folder)
    state, pieces = log.first_state(), []
    for record in log:
        pieces.append(piece_of(state, record))
        evolve(state, record.event)
    return log.config, state, pieces


def project(config, pieces, kept):
    """Fold the events of the requests `kept`. Stop at a broken rule, a broken invariant or an unknown key.
    Return the state and a name for the failure, or "".
    """
    state = State(config)
    projection = Projection(state, kept)
    for piece in pieces:
        event = projection.of(piece)
        if event is None:
            continue
        if (broken := next(broken_rules(state, event), None)) is not None:
            return state, broken.rule
        try:
            evolve(state, event)
        except KeyError:
            return state, "an item of another request"
        if (found := find_broken(state)) is not None:
            return state, f"invariant {found.name}"
    return state, ""


@pytest.mark.parametrize("run", [*RUNS, "sessions"])
def test_all_requests_give_the_same_state(tmp_path, run):
    if run == "sessions":
        session_run(tmp_path / "log")
    else:
        busy_run(tmp_path / "log", num_requests=20, **RUNS[run])
    config, whole, pieces = split(tmp_path / "log")
    state, broken = project(
        config, pieces, {p.event.request_id for p in pieces if isinstance(p.event, ev.Queued)}
    )
    assert not broken and state.step == whole.step
    for name in ("num_tokens", "num_computed", "num_blocks", "token_ids", "block_table", "ended"):
        assert np.array_equal(getattr(state, name), getattr(whole, name)), name


@pytest.mark.parametrize("run", ["plain", "overlap"])
def test_some_requests_break_no_other_rule(tmp_path, run):
    """Without the request that computed a prefix or an item, other requests' cache hits are false. All other
    decisions stay valid.
    """
    busy_run(tmp_path / "log", num_requests=20, **RUNS[run])
    config, _, pieces = split(tmp_path / "log")
    names = [piece.event.request_id for piece in pieces if isinstance(piece.event, ev.Queued)]
    rng, outcomes = random.Random(run), set()
    for share in (0.2, 0.4, 0.6, 0.8):
        outcomes.add(project(config, pieces, {name for name in names if rng.random() < share})[1])
    assert outcomes <= {"", "hits", "an item of another request"}, outcomes
