"""Tests that the scheduler's functions cannot write to the state through a view. mypy refuses all such
writes, and the view refuses most writes at run time, too.
"""

import re
from pathlib import Path

import pytest

from mmengine.core.state.digest import state_digest
from mmengine.core.state.view import View
from tests.core.small_engine import Bench, image, request

# The writes in `view_types.py` that the view refuses at run time. Writes with a second comment ("# a list",
# "# a request") are left out, because only mypy refuses them.
_TYPES = Path(__file__).with_name("view_types.py").read_text()
WRITES = re.findall(r"^    (.+?)  # type: ignore$", _TYPES, re.MULTILINE)


@pytest.fixture
def view():
    bench = Bench()
    bench.submit(request("a", 9, media=[image(1, 1, 3)]), request("c", 5))
    bench.step()
    return View(bench.state)


@pytest.mark.parametrize("line", WRITES)
def test_the_view_refuses_a_write_at_run_time(view, line):
    row = view.requests["a"].row
    before = state_digest(view._target)
    with pytest.raises((ValueError, TypeError, AttributeError)):
        exec(line, {"view": view, "row": row, "rows": view.running})
    assert state_digest(view._target) == before


def test_a_view_shows_later_writes_to_its_state(view):
    state = view._target
    row = view.requests["a"].row
    state.num_tokens[row] += 1
    state.step += 1
    state.waiting.append(state.requests["c"])
    state.encoder.used += 1
    assert view.num_tokens[row] == state.num_tokens[row] and view.step == state.step
    assert len(view.waiting) == len(state.waiting) and view.encoder.used == state.encoder.used
    assert view.blocks.num_free == state.blocks.num_free and set(view.requests) == {"a", "c"}
