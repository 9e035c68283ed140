"""Tests that simulations of small scenarios make the decisions that were checked by hand, and satisfy general
invariants.
"""

import json

import pytest
from simulated import SCENARIOS, request, run, whole_output, write_scenario

from mmengine.events.log import LogWriter
from mmengine.replay import verify
from mmengine.simulation import first_difference, read_records
from mmengine.simulation.records import record_line


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_decisions_are_those_checked_by_eye(path):
    _, records, _ = run(path)
    assert first_difference(read_records(path), records, soft=True) == ""


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_rules_hold_at_every_step(path):
    report, records, settings = run(path)
    raw = json.loads(path.read_text())
    config = settings.config
    sizes = {item[2]: item[1] for each in raw["requests"] for item in each["images"]}
    items = {(each["id"], i): item[2] for each in raw["requests"] for i, item in enumerate(each["images"])}
    for record in records:
        names = [name for name, _ in record["sched"]]
        assert len(names) == len(set(names)) <= config.max_num_seqs
        assert all(count > 0 for _, count in record["sched"])
        assert sum(count for _, count in record["sched"]) <= config.token_budget
        encoded = [items[name, i] for name, indices in record.get("enc", {}).items() for i in indices]
        assert sum(sizes[name] for name in encoded) <= config.encoder_budget
        assert set(record.get("out", {})) <= set(names)
        assert 0 <= record["free"] <= config.num_blocks - 1
    assert records[-1].get("free_after", config.num_blocks - 1) == config.num_blocks - 1 or report.unfinished


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_every_request_gets_the_tokens_it_would_get_alone(path):
    report, records, settings = run(path)
    raw = json.loads(path.read_text())
    aborted = {event["id"] for event in raw["events"] if event["op"] in ("abort", "grammar_error")}
    for each in raw["requests"]:
        name = each["id"]
        tokens = [token for record in records for token in record.get("out", {}).get(name, [])]
        reasons = [record["finish"][name] for record in records if name in record.get("finish", {})]
        expected, reason = whole_output(each, settings.config.max_model_len)
        if name in aborted or name in report.unfinished:
            assert tokens == expected[: len(tokens)] and reasons in ([], ["error"])
        else:
            assert (tokens, reasons) == (expected, [reason])


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_the_log_of_a_run_verifies(path, tmp_path):
    run(path, log=LogWriter(tmp_path / "log"))
    report = verify(tmp_path / "log")
    assert report.ok and report.rederived and not report.unfinished


def test_the_same_file_gives_the_same_bytes(tmp_path):
    for path in SCENARIOS[:4]:
        for name in ("one", "two"):
            run(path, log=LogWriter(tmp_path / path.stem / name, wall_ns=lambda: 0))
        one, two = ((tmp_path / path.stem / name / f"{0:020d}.mmlog").read_bytes() for name in ("one", "two"))
        assert one == two


def test_records_survive_the_file(tmp_path):
    _, records, _ = run(SCENARIOS[0])
    path = tmp_path / "out.jsonl"
    path.write_text(record_line({"config": {}}) + "".join(map(record_line, records)))
    assert read_records(path) == records


def test_an_abort_while_the_last_token_is_computed_leaves_no_output(tmp_path):
    events = [{"step": 2, "op": "abort", "id": "a", "when": "before_update"}]
    path = write_scenario(tmp_path, [request("a"), request("b")], events=events)
    report, records, _ = run(path)
    assert "a" not in records[2]["out"] and records[2]["finish"] == {"b": "length"}
    assert "free_after" not in records[2]


def test_a_step_in_which_all_wait_is_a_record_and_an_empty_one_is_none(tmp_path):
    # Steps 1 and 2 have a waiting request, so they have records. Step 0 has no requests and no record.
    grammar = {"ranges": [[2000, 2010]]}
    events = [{"step": 3, "op": "grammar_ready", "id": "s"}]
    path = write_scenario(tmp_path, [request("s", grammar=grammar, at=1)], events=events)
    _, records, _ = run(path)
    assert [(record["step"], bool(record["sched"])) for record in records[:3]] == [
        (1, False),
        (2, False),
        (3, True),
    ]
    assert records[0]["waiting"] == ["s"]


def test_a_token_outside_of_the_grammar_ends_its_request_only(tmp_path):
    grammar = {"ranges": [[2000, 2010]]}
    bad = request("bad", out=5, grammar=grammar, inject_bad_at=2)
    events = [{"step": 0, "op": "grammar_ready", "id": "bad"}]
    path = write_scenario(tmp_path, [bad, request("good", out=5)], events=events)
    _, records, _ = run(path)
    assert records[2]["out"]["bad"] == [7] and records[2]["finish"] == {"bad": "error"}
    assert records[-1]["finish"] == {"good": "length"}


def test_drafts_change_how_many_steps_and_not_which_tokens(tmp_path):
    requests = [request(f"q{number}", 9, out=20) for number in range(4)]
    requests.append(request("g", 5, out=11, stop_token=900, stop_at=7))
    outputs = []
    for more in (
        {},
        {"num_spec_tokens": 3, "spec_method": "ngram"},
        {"num_spec_tokens": 2, "spec_method": "eagle3"},
    ):
        path = write_scenario(tmp_path, requests, config=more)
        _, records, _ = run(path)
        names = [each["id"] for each in requests]
        tokens = {name: [t for r in records for t in r.get("out", {}).get(name, [])] for name in names}
        outputs.append((tokens, len(records), any("spec" in record for record in records)))
    assert outputs[0][0] == outputs[1][0] == outputs[2][0]
    assert outputs[1][1] < outputs[0][1] and outputs[1][2] and not outputs[0][2]
