"""Tests the files and error messages of `mmengine simulate`."""

import json
import sys
from pathlib import Path

import pytest
from simulated import SCENARIOS, request, write_scenario

from mmengine.events.log import LogReader
from mmengine.events.vocabulary import Dispatched
from mmengine.replay import verify
from mmengine.simulation import first_difference, read_records
from tests.cli.cli_process import call_cli, loaded, run_clis


def simulate(*arguments):
    return call_cli("simulate", *arguments)


def test_a_scenario_with_decisions_and_a_log(tmp_path):
    out = tmp_path / "out.jsonl"
    words = ["simulate", SCENARIOS[0], "--decisions", out, "--log", tmp_path / "log"]
    (result,) = run_clis([list(map(str, words))], tmp_path)
    assert result.returncode == 0 and "as the scenario expects" in result.stdout
    assert loaded(result) == "['numpy']"
    assert first_difference(read_records(SCENARIOS[0]), read_records(out), soft=True) == ""
    assert list((tmp_path / "log").glob("*.mmlog"))


def test_requests_with_a_config_and_a_picture(tmp_path):
    requests, config, out = (tmp_path / name for name in ("r.jsonl", "c.json", "out.jsonl"))
    requests.write_text("".join(json.dumps(request(f"q{n}", 20, at=n)) + "\n" for n in range(5)))
    config.write_text('{"max_num_seqs": 2, "block_size": 8}')
    result = simulate(
        requests, "--config", config, "--limit", "4", "--decisions", out, "--plot", tmp_path / "p.png"
    )
    assert result.returncode == 0, result.stderr
    first, *rest = out.read_text().splitlines()
    assert json.loads(first)["config"]["max_num_seqs"] == 2
    assert {"n_running", "n_waiting"} <= set(json.loads(rest[0]))
    assert "4: 4 length" in result.stdout and "prefix cache" in result.stdout
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"


def test_a_scenario_that_is_not_met_and_requests_that_are_refused_are_said(tmp_path):
    path = write_scenario(tmp_path, [request("a"), request("huge", 500)])
    scenario = json.loads(path.read_text())
    path.write_text(json.dumps({**scenario, "expect": [{"step": 0, "sched": [["a", 5]]}]}))
    result = simulate(path)
    assert result.returncode == 0
    assert "1 requests refused; the first: huge" in result.stdout
    assert "differ from the scenario's expectation: step 0: sched" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.json"], "there is no file missing.json"),
        ([SCENARIOS[0], "--config", "missing.json"], "there is no file missing.json"),
        ([SCENARIOS[0], "--config", __file__], "Expected `object`"),
        ([Path(__file__).parents[2] / "README.md"], "is not JSON"),
        ([SCENARIOS[0], "--plot", "p.docx"], "the name must end in one of"),
        ([SCENARIOS[0], "--format", "azure"], "has no column TIMESTAMP"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments, message):
    result = simulate(*arguments)
    (line,) = result.stderr.splitlines()
    assert result.returncode == 2 and message in line


def test_a_policy_that_does_not_exist_is_named(tmp_path):
    path = write_scenario(tmp_path, [request("a")], config={"policy": "best"})
    result = simulate(path)
    assert result.returncode == 2 and "'best'" in result.stderr


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    for name in {"matplotlib", *(each for each in sys.modules if each.startswith("matplotlib."))}:
        monkeypatch.setitem(sys.modules, name, None)
    result = simulate(SCENARIOS[0], "--plot", "p.png")
    assert result.returncode == 2 and "pip install '.[plot]'" in result.stderr


def test_two_steps_in_flight(tmp_path):
    """A simulation with two steps in flight writes a log. `--decisions` is refused, because decision records
    need steps that do not overlap.
    """
    config = tmp_path / "two.json"
    config.write_text('{"max_in_flight": 2}')
    requests = tmp_path / "r.jsonl"
    requests.write_text("".join(json.dumps(request(f"q{n}", 20, at=n)) + "\n" for n in range(5)))
    result = simulate(requests, "--config", config, "--log", tmp_path / "log")
    assert result.returncode == 0 and "5: 5 length" in result.stdout
    report = verify(tmp_path / "log")
    assert report.ok and report.requests == 5
    assert any(isinstance(each.event, Dispatched) for each in LogReader(tmp_path / "log"))
    refused = simulate(requests, "--config", config, "--decisions", tmp_path / "out.jsonl")
    assert refused.returncode == 2 and "max_in_flight" in refused.stderr
