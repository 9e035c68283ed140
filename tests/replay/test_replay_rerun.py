"""Tests what-if reruns: a rerun of a simulated log repeats each step, and the fit recovers the cost model
from the log.
"""

import json
import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from mmengine.cli import main as cli
from mmengine.errors import ConfigError
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader, LogWriter
from mmengine.replay import request_lines
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.rerun import calibration
from mmengine.replay.rerun import rerun as rerun_module
from mmengine.replay.rerun.calibration import slices_of
from mmengine.replay.rerun.fit import FittedCost, fit, held_out_error, non_negative
from mmengine.replay.rerun.measurement import Watch
from mmengine.replay.rerun.rerun import NoPrediction, read_changes, rerun
from mmengine.replay.rerun.script import read_script
from mmengine.replay.rerun.simulation import complete_script, simulate
from mmengine.replay.rerun.step_times import fit_times
from mmengine.replay.timeline import open_log
from mmengine.simulation import Driver, Settings, SimRequest, Workload
from mmengine.simulation.meter import Spread
from mmengine.simulation.simulated_executor import CostModel
from mmengine.simulation.workload import generated_tokens, image_item
from tests.cli.cli_process import call_cli
from tests.core.small_engine import settings_of
from tests.events.logs import rewrite
from tests.replay.runs import busy_run

COUNTED = ("steps", "output_tokens", "preemptions", "prefix_hit_percent", "encoder_hit_percent")
COST = CostModel(step_ns=3_000_000, token_ns=40_000, context_ns=900, embed_ns=60_000)


def simulated_log(folder, *, count=48, gap_ns=35e6, cost=COST, **settings):
    """Simulate `count` requests, half of them with images, and write the log. The KV pool is sometimes too
    small. `gap_ns`: mean time between arrivals.
    """
    rng, requests, now = random.Random(5), [], 0
    for number in range(count):
        now += int(rng.expovariate(1 / gap_ns))
        length = rng.randint(8, 90)
        media = (image_item(2, 6, f"image {rng.randrange(9)}"),) if rng.random() < 0.5 else ()

        def prompt(number=number, length=length):
            return generated_tokens(f"prompt {number % 7}", 0, length)

        requests.append(SimRequest(f"r{number}", length, prompt, rng.randint(2, 40), now, media))
    values = {"max_model_len": 160, "num_blocks": 90, "max_num_seqs": 8, "encoder_budget": 8, **settings}
    config = settings_of(**values)
    log = LogWriter(folder)
    report = Driver(Workload("w", requests, timed=True), Settings(config, cost), log=log).run()
    log.close()
    return report


def spread_of(values):
    return Spread.of(np.array(values))


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rerun") / "log"
    return folder, simulated_log(folder)


@pytest.fixture
def one_seed(monkeypatch):
    """Make `rerun` predict with one simulation instead of three."""
    for module in (calibration, rerun_module):
        monkeypatch.setattr(module, "SEEDS", (0,))


@pytest.fixture
def reruns(monkeypatch):
    """Make `rerun` compute only once: later calls get the first result. All calls must have the same log and
    the same changes.
    """
    results = []

    def once(folder, changes, *others):
        if not results:
            results.append((folder, changes, rerun(folder, changes, *others)))
        assert results[0][:2] == (folder, changes)
        return results[0][2]

    monkeypatch.setattr(rerun_module, "rerun", once)
    return results


@pytest.mark.usefixtures("one_seed")
@pytest.mark.parametrize(
    "settings",
    [{}, {"num_draft_tokens": 3}, {"swap_blocks": 30, "preempt_mode": "swap"}, {"policy": "priority"}],
)
def test_the_logged_settings_repeat_the_logged_times(tmp_path, settings):
    report = simulated_log(tmp_path / "log", **settings)
    result = rerun(tmp_path / "log", {})
    logged, again = result.logged.numbers, result.again.numbers
    assert logged["steps"] == report.num_steps and logged["preemptions"] == report.meter.num_preemptions
    # A latency starts at the step in which the request reaches the scheduler.
    lines = request_lines(tmp_path / "log")
    assert logged["ttft_ms_p90"] == spread_of([line.first_token_ns for line in lines]).p90 / 1e6
    assert logged["end_to_end_ms_p50"] == spread_of([line.end_ns for line in lines]).p50 / 1e6
    assert logged["inter_token_ms_p99"] == report.meter.inter_token().p99 / 1e6
    assert logged["output_tokens"] == again["output_tokens"] == report.meter.num_output_tokens
    hits, encoded = report.stats.num_encoder_hits, report.meter.num_encoded
    assert logged["encoder_hit_percent"] == pytest.approx(100 * hits / (hits + encoded))
    assert result.is_exact and logged == result.what_if.numbers and not result.refusal
    for name, error in result.errors.items():
        assert error is None or abs(error) < 0.02, name
    assert {name: logged[name] for name in COUNTED} == {name: again[name] for name in COUNTED}
    simulated = rerun(tmp_path / "log", {}, exact=False)
    assert not simulated.is_exact
    for row in simulated.calibration.rows:  # A median over few requests varies with their arrivals.
        assert abs(row.error) <= max(row.bound, 0.15), row
    for name, error in simulated.errors.items():
        assert error is None or abs(error) < 0.02 or name in ("preemptions", "prefix_hit_percent"), name


@pytest.mark.usefixtures("one_seed")
def test_steps_without_drafts_are_repeated(tmp_path):
    """The simulation drafts nothing at steps without drafts in the log."""
    report = simulated_log(tmp_path / "log", count=20, max_num_seqs=1, num_draft_tokens=3)
    script = read_script(tmp_path / "log")
    counts = [len(answer.tokens) - answer.runs[:, 1].sum() for answer in script.answers.values()]
    assert not any(counts), "each token belongs to a step"
    assert rerun(tmp_path / "log", {}, exact=False).again.numbers["steps"] == report.num_steps


def test_chosen_drafts_are_not_chosen_again(tmp_path):
    """A log contains only the drafts that its scheduler chose to verify. The policy goodput would drop some
    of these drafts in the rerun.
    """
    report = simulated_log(tmp_path / "log", count=30, max_num_seqs=2, num_draft_tokens=3, draft_policy="all")
    watch = Watch(open_log(tmp_path / "log").config, 30)
    script = read_script(tmp_path / "log", watch.see)
    times = fit_times(watch.measured.steps, overlaps=False)
    script.config = msgspec.structs.replace(script.config, draft_policy="goodput")
    repeated, notes = complete_script(script)
    assert simulate(script, times, 0.6).estimate.numbers["steps"] > report.num_steps
    assert simulate(repeated, times, 0.6).estimate.numbers["steps"] == report.num_steps
    assert any("verifies the drafts" in note for note in notes)


def test_the_fit_finds_the_costs(tmp_path):
    simulated_log(tmp_path / "log", count=60)
    result = rerun(tmp_path / "log", {})
    step, token, row, attended, pair, sampled, embedding = result.prices.prices
    assert result.fit_error.median < 0.01 and abs(result.fit_error.total) < 0.01
    assert token == pytest.approx(COST.token_ns, rel=0.2)
    assert embedding == pytest.approx(COST.embed_ns, rel=0.2)
    assert step + 4 * (row + sampled) == pytest.approx(COST.step_ns, rel=0.1)


def test_more_memory_is_predicted_correctly(log, tmp_path):
    changes = {"num_blocks": 400, "max_num_seqs": 16}
    report = simulated_log(tmp_path / "other", **changes)
    result = rerun(log[0], changes)
    truth, estimate = rerun(tmp_path / "other", {}).logged.numbers, result.what_if.numbers
    assert report.num_steps != log[1].num_steps
    assert result.changed == {"num_blocks": (90, 400), "max_num_seqs": (8, 16)}
    for name, value in truth.items():
        # Allowed error in ms, larger for figures that start at an arrival.
        step_ms = 5 if name.startswith(("ttft", "end")) else 0.5
        assert estimate[name] == pytest.approx(value, rel=0.03, abs=step_ms), name
        low, high = result.intervals[name]
        assert low <= estimate[name] <= high, name


@pytest.mark.usefixtures("one_seed")
def test_requests_that_the_other_settings_refuse_are_named(log):
    result = rerun(log[0], {"max_model_len": 60})
    assert "requests are refused, the first: r" in result.what_if.notes[0]
    assert result.what_if.numbers["output_tokens"] < result.logged.numbers["output_tokens"]


@pytest.mark.usefixtures("one_seed")
def test_a_log_with_all_event_kinds(tmp_path):
    busy_run(tmp_path / "log", 2, num_requests=60)
    assert rerun(tmp_path / "log", {}).is_exact
    result = rerun(tmp_path / "log", {"policy": "fcfs", "max_in_flight": 2})
    assert any("steps failed in the log" in note for note in result.notes)
    assert result.again.numbers["steps"] > 0 and (result.what_if is None) == bool(result.refusal)


def test_two_steps_in_flight_hide_the_host(tmp_path):
    """With two steps in flight, the host time of 2 ms per step overlaps the device time."""
    simulated_log(tmp_path / "log", count=30, cost=CostModel(step_ns=5_000_000))
    config = CheckedLog(tmp_path / "log").config
    watch = Watch(config, 30)
    script = read_script(tmp_path / "log", watch.see)
    times = fit_times(watch.measured.steps, overlaps=False)
    cost = FittedCost(times.cost.prices, np.array([2_000_000.0, 0.0]))
    times = replace(times, cost=cost)
    gaps = []
    for in_flight in (1, 2):
        changed = replace(script, config=msgspec.structs.replace(config, max_in_flight=in_flight))
        gaps.append(simulate(changed, times, 0.0).estimate.numbers["inter_token_ms_p50"])
    saved = gaps[0] - gaps[1]
    assert saved == pytest.approx(2.0, abs=0.3)


def test_a_change_that_cannot_be_estimated_is_refused(log, tmp_path):
    with pytest.raises(ConfigError, match="no drafts"):
        rerun(log[0], {"num_draft_tokens": 2})
    with pytest.raises(ConfigError, match="num_blocks"):
        rerun(log[0], {"num_blocks": 3})
    with pytest.raises(ConfigError, match="no_such"):
        rerun(log[0], {"no_such": 3})
    simulated_log(tmp_path / "short", count=2)
    with pytest.raises(NoPrediction, match="timed steps"):
        rerun(tmp_path / "short", {})


def test_settings_that_change_no_decision_are_answered_exactly(log):
    logged = rerun(log[0], {}, exact=True)
    for changes in ({"max_waiting": 500}, {"encoder_cache_size": 3000}):
        result = rerun(log[0], changes)
        assert result.is_exact and result.what_if.numbers == logged.what_if.numbers
    with pytest.raises(NoPrediction, match="the decisions differ from step"):
        rerun(log[0], {"num_blocks": 400}, exact=True)


@pytest.mark.usefixtures("one_seed")
def test_a_log_whose_halves_differ_from_the_model_is_not_answered(tmp_path, reruns):
    """Every second slice of the log has doubled step times, and the cost model cannot explain this."""
    simulated_log(tmp_path / "even", count=70, gap_ns=60e6)
    records = list(LogReader(tmp_path / "even"))
    slices = slices_of(sum(isinstance(record.event, ev.Queued) for record in records))
    shift, changed, num_arrived = 0, [], 0
    for record in records:
        num_arrived += isinstance(record.event, ev.Queued)
        if isinstance(record.event, ev.Executed) and slices[num_arrived - 1] % 2:
            shift += record.event.device_ns
            event = msgspec.structs.replace(record.event, device_ns=2 * record.event.device_ns)
            record = msgspec.structs.replace(record, event=event)
        changed.append(msgspec.structs.replace(record, mono_ns=record.mono_ns + shift))
    folder = rewrite(changed, tmp_path / "log")
    exact = rerun(folder, {})
    assert exact.is_exact and exact.what_if.numbers == exact.logged.numbers != exact.again.numbers
    for extra, start in (([], "│ ttft"), (["--json"], "{")):
        arguments = ("log", "rerun", folder, "--set", "num_blocks=400", *extra)
        done = call_cli(*arguments)
        assert done.returncode == 6 and start in done.stdout, done.stderr
        assert "this log cannot answer: " in done.stderr and "of held-out halves" in done.stderr
        assert "steps of the even half took" in done.stderr
        assert "what if" not in done.stdout
    report = json.loads(done.stdout)
    assert len(reruns) == 1 and report["what_if"] is None and report["refusal"] and report["calibration"]


def test_changes_are_read_as_json_or_words():
    pairs = ["num_blocks=12", "policy=priority", "enable_prefix_caching=false", 'compat="vllm"']
    assert read_changes(pairs) == {
        "num_blocks": 12,
        "policy": "priority",
        "enable_prefix_caching": False,
        "compat": "vllm",
    }
    with pytest.raises(ConfigError, match="name=value"):
        read_changes(["num_blocks"])


def test_least_squares_without_negative_costs():
    rng = np.random.default_rng(2)
    for _ in range(50):
        matrix, target = rng.normal(size=(30, 5)), rng.normal(size=30)
        x = non_negative(matrix, target)
        gradient = matrix.T @ (target - matrix @ x)
        assert (x >= 0).all() and (gradient < 1e-6).all(), "no price of 0 should be larger"
        assert np.abs(gradient[x > 0]).max(initial=0) < 1e-6, "no positive price should change"


def test_outlier_steps_are_ignored():
    rng = np.random.default_rng(3)
    work = np.stack((np.ones(400), rng.integers(1, 300, 400)), axis=1).astype(float)
    time_ns = work @ [1e6, 3e4] * rng.normal(1, 0.02, 400)
    time_ns[::17] *= 20
    assert fit(work, time_ns) == pytest.approx([1e6, 3e4], rel=0.05)
    error = held_out_error(work, time_ns)
    assert error.median < 0.03 < error.p90 + 0.03 and error.num_steps == 400


@pytest.mark.usefixtures("one_seed")
def test_the_command(log, monkeypatch, capsys, tmp_path, reruns):
    other = tmp_path / "other.json"
    other.write_text('{"num_blocks": 400}')
    for extra in ([], ["--json"]):
        arguments = ["rerun", log[0], "--config", other, "--set", "max_num_seqs=16", *extra]
        monkeypatch.setattr("sys.argv", ["mmengine", "log", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert not end.value.code
        said = capsys.readouterr().out
        if not extra:
            assert "simulated as logged" in said and "num_blocks 90 -> 400, max_num_seqs 8 -> 16" in said
    report = json.loads(said)
    assert report["changed"]["num_blocks"] == {"logged": 90, "what_if": 400}
    assert report["logged"].keys() == report["what_if"].keys() == report["error"].keys()
