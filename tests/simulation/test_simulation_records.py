"""Tests `first_difference`, which compares the records of two runs. Hard fields (decisions and tokens) are
always compared, and soft fields (queues and free resources) only on request.
"""

import pytest

from mmengine.errors import InvalidRequest
from mmengine.simulation import first_difference, read_records

STEP = {"step": 0, "sched": [["a", 3]], "out": {"a": [5]}, "free": 4, "running": ["a"]}


def test_nothing_differs():
    assert first_difference([STEP], [dict(STEP)], soft=True) == ""


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"sched": [["a", 2]]}, "step 0: sched"),
        ({"out": {"a": [6]}}, "step 0: out"),
        ({"step": 1}, "step 0: step"),
        ({"preempt": ["b"]}, "step 0: preempt"),
    ],
)
def test_a_hard_field_differs(change, where):
    assert first_difference([STEP], [{**STEP, **change}]).startswith(where)


def test_a_soft_field_counts_on_request_if_both_records_have_it():
    other = {**STEP, "free": 3}
    assert first_difference([STEP], [other]) == ""
    assert "free: expected 4, got 3" in first_difference([STEP], [other], soft=True)
    del other["free"]
    assert first_difference([STEP], [other], soft=True) == ""


def test_an_empty_field_equals_a_missing_one_and_idle_steps_do_not_count():
    idle = {"step": 7, "sched": []}
    assert first_difference([{**STEP, "enc": {}}, idle], [STEP]) == ""


def test_a_missing_step_is_named_by_number():
    assert first_difference([STEP, {**STEP, "step": 1}], [STEP]) == "expected 2 steps, got 1"


def test_a_scenario_without_expectations_is_refused(tmp_path):
    path = tmp_path / "s.json"
    path.write_text('{"requests": []}')
    with pytest.raises(InvalidRequest, match="has no expected records"):
        read_records(path)


def test_ends_in_open_ends_are_not_compared():
    ends = {**STEP, "finish": {"a": "stop", "g": "error"}}
    one = {**STEP, "finish": {"a": "stop"}}
    assert "finish" in first_difference([ends], [one])
    assert (
        first_difference([ends], [one], open_ends={"g"})
        == first_difference([one], [ends], open_ends={"g"})
        == ""
    )
    assert "finish" in first_difference([ends], [one], open_ends={"a"})
