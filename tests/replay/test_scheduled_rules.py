"""Tests that the fast check of SCHEDULED accepts only events that the complete checks accept."""

import random

import msgspec
import numpy as np
import pytest

from mmengine.events import vocabulary as ev
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.rules import scheduled
from mmengine.replay.rules.common import MalformedColumn
from mmengine.replay.timeline import fold
from tests.replay.runs import busy_run


def spoiled(event, rng, num_blocks):
    """Return the event with a random change in new_blocks."""
    blocks = np.frombuffer(event.new_blocks, np.int32).copy()
    how = rng.randrange(5)
    if how == 0 or not len(blocks):
        blocks = np.append(blocks, np.int32(rng.randrange(num_blocks)))
    elif how == 1:
        blocks = blocks[:-1]
    elif how == 2:
        blocks[rng.randrange(len(blocks))] = rng.choice((-1, 0, num_blocks, 2**31 - 1))
    elif how == 3:
        blocks[rng.randrange(len(blocks))] = blocks[rng.randrange(len(blocks))]
    else:
        blocks[rng.randrange(len(blocks))] = rng.randrange(1, num_blocks)
    data = blocks.astype(np.int32).tobytes()
    return msgspec.structs.replace(event, new_blocks=data[:-1] if rng.random() < 0.1 else data)


def complete(state, event):
    """Return whether the complete checks accept the event."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduled, "_is_plain", lambda state, event: False)
        try:
            return not list(scheduled.check_scheduled(state, event))
        except MalformedColumn:
            return False


@pytest.mark.parametrize("settings", [{}, {"num_draft_tokens": 3}, {"max_in_flight": 2}])
def test_the_fast_check_agrees_with_the_complete_checks(settings, tmp_path):
    busy_run(tmp_path / "log", 6, num_requests=60, **settings)
    rng, num_plain, num_refused = random.Random(0), 0, 0
    for state, record in fold(CheckedLog(tmp_path / "log")):
        event = record.event
        if not isinstance(event, ev.Scheduled):
            continue
        assert complete(state, event)
        num_plain += scheduled._is_plain(state, event) and bool(event.new_blocks)
        for _ in range(4):
            other = spoiled(event, rng, state.config.num_blocks)
            is_sound = complete(state, other)
            assert is_sound or not scheduled._is_plain(state, other), (record.sequence, other)
            num_refused += not is_sound
    assert num_plain > 3 and num_refused > 100
