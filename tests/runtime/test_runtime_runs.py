"""Tests that Runs (each row's sampling positions and drafts) equals the result from a plain loop."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mmengine.core.executor import StepPlan
from mmengine.runtime.sampling.runs import NOTHING, runs_of

ERROR = -1


def plan_of(num_scheduled, num_drafts, sample, input_ids):
    n, t = len(num_scheduled), sum(num_scheduled)
    return StepPlan(
        step=1,
        rows=np.arange(n, dtype=np.int32),
        num_scheduled=np.array(num_scheduled, np.int32),
        num_computed=np.zeros(n, np.int32),
        input_ids=np.array(input_ids, np.int32),
        token_index=np.zeros(t, np.int32),
        slot_mapping=np.zeros(t, np.int64),
        block_table=np.zeros((n, 1), np.int32),
        sample=np.array(sample, np.int32),
        num_drafts=None if num_drafts is None else np.array(num_drafts, np.int32),
    )


@st.composite
def steps(draw):
    """Return arguments for plan_of."""
    shapes = draw(
        st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5), st.booleans()), min_size=1, max_size=6)
    )
    num_scheduled = [req_state + drafts * samples for req_state, drafts, samples in shapes]
    num_drafts = [drafts * samples for _, drafts, samples in shapes]
    sample = [row for row, (_, _, samples) in enumerate(shapes) if samples]
    tokens = st.lists(st.integers(0, 3), min_size=sum(num_scheduled), max_size=sum(num_scheduled))
    return num_scheduled, num_drafts, sample, draw(tokens)


def plain(num_scheduled, num_drafts, sample, input_ids):
    """Return (sampling positions, drafts) for each sampling row. Positions are indices into the step's
    tokens.
    """
    found, end = [], 0
    for row, count in enumerate(num_scheduled):
        end += count
        if row in sample:
            first = end - num_drafts[row] - 1
            found.append((list(range(first, end)), input_ids[first + 1 : end]))
    return found


@given(steps(), st.data())
def test_runs_equal_a_loop(step, data):
    runs = runs_of(plan_of(*step))
    want = plain(*step)
    if not any(drafts for _, drafts in want):
        assert runs is None
        return
    assert runs.places.tolist() == [place for places, _ in want for place in places]
    assert runs.follows.tolist() == [token for _, drafts in want for token in (*drafts, NOTHING)]
    assert runs.row_of.tolist() == [row for row, (places, _) in enumerate(want) for _ in places]
    assert [runs.places[first] for first in runs.first] == [places[0] for places, _ in want]

    size = len(runs.places)
    sampled = data.draw(st.lists(st.integers(ERROR, 3), min_size=size, max_size=size))
    counts, start = [], 0
    for places, drafts in want:
        said = sampled[start : start + len(places)]
        agreed = 0
        while agreed < len(drafts) and said[agreed] == drafts[agreed]:
            agreed += 1
        counts.append(agreed + 1)
        start += len(places)
    assert runs.counts(np.array(sampled, np.int32)).tolist() == counts

    selected = data.draw(st.lists(st.integers(0, len(want) - 1), unique=True))
    positions = np.flatnonzero(np.isin(runs.row_of, sorted(selected)))
    heads, drafts = runs.drafts_at(positions)
    assert heads.tolist() == [int(runs.first[row]) for row in sorted(selected)]
    assert drafts == [want[row][1] for row in sorted(selected)]


def test_without_drafts_there_are_no_runs():
    assert runs_of(plan_of([2, 1], None, [0, 1], [1, 2, 3])) is None
    assert runs_of(plan_of([2, 1], [0, 0], [0, 1], [1, 2, 3])) is None
