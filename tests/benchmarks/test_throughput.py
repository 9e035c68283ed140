"""Tests benchmarks/throughput.py and benchmarks/cpu/half_billion.py with the smallest settings. Times are not
tested.
"""

import json
import re

import pytest

from tests.forked import run_module

SMALL_TEXT = {
    "vocab_size": 1600,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
SMALL_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0],
}


def call(name, *words):
    """Run a benchmark and return its standard output."""
    done = run_module("benchmarks", name, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Return the throughput benchmark's tables as markdown, and its standard output."""
    out = tmp_path_factory.mktemp("throughput") / "new" / "table.md"
    sections = [word for name in ("embedded", "encoder", "share") for word in ("--section", name)]
    printed = call(
        *("throughput", "--quick", "--json", *sections, "--out", out),
        *("--requests", 3, "--longest", 4, "--rounds", 1),
    )
    return out.read_text(), printed


def test_it_ends_with_its_targets(table):
    targets = json.loads(table[1].splitlines()[-1])["targets"]
    bars = {name: target["bar"] for name, target in targets.items()}
    assert bars["mixed_3_vs_one_by_one"] == 4 and bars["mixed_3_vs_padded_16"] == 2
    assert bars["decode_batch_1"] == 1.3 and bars["decode_16_rows_vs_padded_16"] == 3
    assert bars["not_the_model_16_rows_log_on_disk"] == 0.1
    assert bars["second_question_to_first_png_1024"] == bars["second_question_to_first"]
    assert targets["vision_passes_16_questions"] == {"measured": 1, "bar": 1, "met": True}
    for target in targets.values():
        assert set(target) == {"measured", "bar", "met"} and isinstance(target["met"], bool)


def test_answers_are_compared_and_targets_stand_in_a_table(table):
    shown, _ = table
    assert "3 of 3" in shown and "transformers one by one" in shown and "## Targets" in shown
    assert "| 16 | on disk |" in shown and "| JPEG, 1024 pixels a side |" in shown


def test_half_a_billion_on_a_small_model(module, tmp_path):
    folder = tmp_path / "model"
    module("common.half_billion_model").make(folder, SMALL_TEXT, SMALL_VISION)
    printed = call("half_billion", "--folder", folder, "--quick", "--json")
    part = module("common.report").Part.loads(printed.splitlines()[-1])
    names = [target.name for target in part.targets]
    assert names == [
        "half_billion_1_rows_1_core",
        "half_billion_16_rows_1_core",
        "half_billion_read_floor_share_1_core",
    ]
    decode, prefill = part.tables
    sides = ("mmengine", "transformers, growing cache")
    assert [row[0] for row in decode.rows] == [f"{n}, {side}" for n in ("1 row", "16 rows") for side in sides]
    assert any(re.search(r"16 row\(s\): \d+ of 16 answers are equal", note) for note in decode.notes)
    assert [row[0] for row in prefill.rows] == ["mmengine", "transformers"]


def test_the_model_of_half_a_billion_has_the_shape_it_says(module):
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    made = module("common.half_billion_model")
    config = Qwen3VLConfig(text_config=made.TEXT, vision_config=made.VISION, tie_word_embeddings=True)
    with torch.device("meta"):
        model = Qwen3VLForConditionalGeneration(config)
    sizes = {name: weight.numel() for name, weight in model.named_parameters()}
    assert sum(size for name, size in sizes.items() if ".visual." not in name) == 381_728_768
    assert 515e6 < sum(sizes.values()) < 525e6


def test_a_profile_shows_phases_and_writes_a_flame_graph(tmp_path):
    flame = tmp_path / "flame.html"
    shown = call("throughput", "--profile", "--flame", flame, "--requests", 2, "--longest", 4)
    for phase in ("front", "core schedule", "inputs", "attention", "logits", "sampling", "log"):
        assert phase in shown
    page = flame.read_text()
    assert (
        "{{title}}" not in page
        and "{{trees}}" not in page
        and "Engine.step (engine/engine.py)" in page
        and "https://" not in page
    )


def test_images_are_shared_by_half_of_the_places(module):
    """Half of the images in the requests occur in several requests."""
    from mmengine.models.loader import resolve_folder
    from mmengine.models.registry import plugin_for

    workload = module("common.workload")
    folder = resolve_folder(None)
    asks = workload.mixed(plugin_for(folder).load_processor(folder), 64, 64)
    assert workload.count_shared(asks) == (28, 56)  # Images that several requests contain, and all images.
    assert {ask.num_new for ask in asks} <= set(range(16, 65))


def test_a_target_is_reached_from_above_or_from_below(module):
    target = module("common.report").Target
    assert target("a", 2.0, 2.0, 3.0).reaches(2.0) and not target("a", 2.0, 2.0, 3.0).reaches(3.0)
    assert target("a", 0.1, 0.1, most=True).reaches(0.1) and not target("a", 0.2, 0.1, most=True).reaches(0.1)
    rows = (
        module("common.report")
        .target_table([target("a", 2.0, 1.0, 3.0), target("b", 0.2, 0.1, most=True)])
        .rows
    )
    assert rows == [("a", "2", "at least 1", "yes", "3", "no"), ("b", "0.2", "at most 0.1", "no", "", "")]


def test_several_runs_give_the_median_of_every_figure(module):
    report, repeat = module("common.report"), module("common.repeat")

    def part(number, note):
        rows = [("mmengine", f"{number}.50", f"{number * 10}%", "")]
        return report.Part(
            [report.Table("a", ("", "b", "c", "d"), rows, [note])], [report.Target("t", number, 2)]
        )

    found = repeat.medians(
        [report.Part.loads(part(n, note).dumps()) for n, note in ((9, "x"), (10, "y"), (8, "x"))]
    )
    (table,), (target,) = found.tables, found.targets
    assert table.rows == [("mmengine", "9.50", "90%", "")]
    assert table.notes[:2] == ["x", "y"] and "3 runs" in table.notes[2]
    assert target.measured == 9 and target.bar == 2


def test_a_clock_stands_still_while_one_inside_it_runs(module, monkeypatch):
    # While an inner clock runs, the outer clock is paused.
    phases = module("profiling.phases")
    now = iter([0, 10, 40, 100])
    monkeypatch.setattr(phases.time, "perf_counter_ns", lambda: next(now))
    clocks = phases.Clocks()
    inner = clocks.around("inner", lambda: "found")
    assert clocks.around("outer", lambda: inner())() == "found"
    assert clocks.take() == {"inner": 30, "outer": 70} and clocks.take() == {}


def test_the_sampler_sees_what_runs_inside(module):
    flame = module("profiling.flame")

    def busy(sampler):
        while not any(len(stack) > 1 for stack in list(sampler.spent)):  # The signal handler adds stacks.
            sum(range(1000))

    def outermost(sampler):
        busy(sampler)

    sampler = flame.Sampler(outermost)
    with sampler.running():
        outermost(sampler)
    tree = sampler.tree("all")
    (inside,) = [node for node in tree["inside"] if "outermost" in node["name"]]
    assert "busy" in inside["inside"][0]["name"] and tree["ns"] >= inside["ns"] > 0
