"""Tests benchmarks/structured/field_calibration.py and field_confidence.py. Times are not checked."""

import random

import pytest


@pytest.fixture
def benchmark(module, monkeypatch):
    monkeypatch.setattr(
        module("common.measure"), "use_threads", lambda threads: None
    )  # The real function limits this process's CPUs.
    return module("structured.field_calibration")


def test_calibrated_fields_have_no_error_and_others_their_distance(benchmark):
    rng = random.Random(1)
    fields = []
    for _ in range(20_000):
        p = rng.random()
        fields.append(benchmark.Field("a", p, rng.random() < p))
    assert benchmark.calibration_error(fields) < 0.02
    assert 0.8 < benchmark.auroc(fields) < 0.86  # the exact value for uniform p is 5/6
    sure = [benchmark.Field("a", 0.95, number % 4 > 0) for number in range(100)]
    assert benchmark.calibration_error(sure) == pytest.approx(0.2)
    assert benchmark.auroc(sure) == 0.5
    split = [benchmark.Field("a", 0.1, False), benchmark.Field("a", 1.0, True)]
    assert benchmark.calibration_error(split) == pytest.approx(0.05) and benchmark.auroc(split) == 1


def test_scenes_are_read_compared_and_drawn(benchmark, tmp_path):
    pytest.importorskip("mmengine_shapes")
    with benchmark.Engine() as engine:
        fields = list(benchmark.answered(engine, benchmark.scenes(4, seed=3), 160))
    assert {field.kind for field in fields} == {"position", "shape", "colour", "size"}
    assert sum(field.is_right for field in fields) >= len(fields) - 2 and len(fields) >= 16
    groups = {"scenes": fields, "wrong": [benchmark.Field("b", 0.5, False)]}
    tables = benchmark.tables_of(groups)
    assert [row[0] for row in tables[0].rows] == ["position", "shape", "colour", "size", "all"]
    assert tables[3].rows == [("0.5 to 0.6", "1", "0.500", "0.000")]
    picture = benchmark.svg_of(groups)
    assert picture.count("<circle") == sum(1 for each in benchmark.bins_of(fields) if each) + 1
    assert picture.startswith("<svg") and picture.endswith("</svg>\n")


def test_the_cost_is_timed_in_steps_with_all_rows(module, monkeypatch):
    monkeypatch.setattr(module("common.measure"), "use_threads", lambda threads: None)
    cost = module("structured.field_confidence")
    pytest.importorskip("mmengine_shapes")
    config = cost.EngineConfig(spec="none", max_num_seqs=cost.ROWS)
    with cost.Engine(dtype="float32", config=config) as engine:
        for confidence in (False, True):
            times = cost.step_times(engine, cost.SCHEMAS["strings"], confidence, "a")
            assert len(times) == cost.TOKENS - 2 and min(times) > 0  # first and last step are not timed
    assert len(cost.sampler_times(100, 2)) == 9


def test_forms_name_the_truth_of_each_field(module):
    forms = module("structured.calibration_forms")
    for task in forms.forms(30, seed=2):
        (message,) = task.messages
        assert task.truth.keys() == task.schema["properties"].keys()
        assert task.truth["customer"] in message["content"] and str(task.truth["year"]) in message["content"]
        assert f"{task.truth['total']:.2f}" in message["content"]
    assert list(forms.forms(2, 5)) == list(forms.forms(2, 5))
