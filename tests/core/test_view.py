"""Deciding functions cannot write: a type checker refuses writes through a view, and the view refuses them at
run time if that costs nothing.
"""

import re
import sys
from pathlib import Path

import pytest
from mypy import api

from mmengine.core.state.digest import state_digest
from mmengine.core.state.view import View
from tests.core.small_engine import Bench, image, request

ROOT = Path(__file__).parents[2]
READS = """
import numpy as np

from mmengine.core.state.view import View


def reads(view: View, row: int, rows: np.ndarray) -> list[int]:
    known = view.num_tokens[view.running] - view.num_computed[rows]
    known[0] = 1  # what was computed is the decision's own
    request = view.requests["a"]
    names = [one.request.request_id for one in view.waiting[view.scan_from :]]
    hits = view.blocks.references[view.blocks.peek(2)] == 0
    over = (view.num_tokens >= view.max_total) | (view.ended != 0)
    free = view.free_rows[-1] + view.blocks.num_free + view.encoder.used + len(view.flights)
    return [request.row, len(names), int(hits.sum()), int(over.sum()), free, view.requests_by_row[row].row]


def writes(view: View, row: int, rows: np.ndarray) -> None:
"""
# Refused by the type checker and, unless marked, at run time.
WRITES = """
view.num_tokens[row] = 1
view.num_tokens[rows] += 1
view.content[row] = 1
view.token_ids[row, 0] = 1
view.block_table[row, :1] = 1
view.running[0] = 1
view.step_rows[0] = 1
view.last_rows[0] = 1
view.num_tokens = rows
view.running = rows
view.step = 1
view.tokens_left += 1
view.is_open = False
view.requests["b"] = view.requests["a"]
del view.requests["a"]
view.requests.clear()
view.requests = {}
view.suspects["a"] = None
view.requests_by_row[row] = None
view.blocks.references[0] = 1
view.blocks.content[0] = 1
view.blocks.num_free = 1
view.blocks.take_new(rows)
view.blocks.release(rows)
view.blocks.index.clear()
view.blocks = None
view.encoder.add(b"key", 1)
view.encoder.evict(b"key")
view.encoder.entries.clear()
view.encoder.idle.clear()
view.encoder.idle[b"key"] = None
view.encoder.used = 0
view.waiting.clear()  # a list
view.waiting[0] = view.waiting[1]  # a list
view.free_rows.append(1)  # a list
view.free_rows[0] = 1  # a list
view.cancelled.append("a")  # a list
view.grammar_failed.append("a")  # a list
view.thrashing.clear()  # a list
view.encoder.dropped.append(b"key")  # a list
view.step_evicted.append(b"key")  # a list
view.step_copies["copy"].append(rows)  # a list
view.flights.clear()  # a list
view.requests["a"].failures += 1  # a request
view.requests["a"].row = 1  # a request
view.requests["a"].tokens[0] = 1  # a request
view.requests["a"].held_media.add(1)  # a request
view.waiting[0].detail = "gone"  # a request
view.requests_by_row[row].cancelled = "cancelled"  # a request
view.flights[0].rows[0] = 1  # a request
view.goodput.admit(row)  # a request
""".strip().splitlines()


@pytest.fixture
def recursion_limit():
    """Restore the recursion limit: the type checker raises it for the process, and other tests need a low
    limit.
    """
    before = sys.getrecursionlimit()
    yield
    sys.setrecursionlimit(before)


@pytest.mark.usefixtures("recursion_limit")
def test_a_type_checker_refuses_each_write_and_no_read(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    decision = tmp_path / "decision.py"
    decision.write_text(READS.lstrip() + "".join(f"    {line}\n" for line in WRITES))
    said, trouble, _ = api.run([str(decision), "--follow-imports=silent", "--no-error-summary"])
    assert not trouble
    refused = {int(found) for found in re.findall(r"decision\.py:(\d+): error", said)}
    before = len(READS.lstrip().splitlines())
    assert not [number for number in refused if number <= before], said
    assert [line for number, line in enumerate(WRITES, before + 1) if number not in refused] == []


@pytest.fixture
def view():
    bench = Bench()
    bench.submit(request("a", 9, media=[image(1, 1, 3)]), request("c", 5))
    bench.step()
    return View(bench.state)


@pytest.mark.parametrize("line", [line for line in WRITES if "# a " not in line])
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
