"""Tests that `log verify` describes a divergence with both decisions, the likely rule and the
next commands.
"""

import json
import shlex

import pytest
from tokenizers import Tokenizer, models

from mmengine.cli import main as cli
from mmengine.replay.queries.divergence_text import likely_rule, next_commands, sides, tokens_text
from mmengine.replay.verify import Divergence, verify
from tests.replay.planted import bugs
from tests.replay.planted.finding import Bug, write
from tests.replay.planted.nights import Night

SMALL = Night(num_requests=30)


def diverged(folder, plant, night=SMALL) -> Divergence:
    write(Bug("", "", plant, night), folder)
    found = verify(folder).divergence
    assert found is not None
    return found


def test_a_victim(tmp_path):
    # This build and the log's build preempt different requests.
    found = diverged(tmp_path / "log", bugs.the_first_admitted_is_preempted)
    assert likely_rule(found) == "which running request is preempted"
    texts = {field: (logged, derived) for field, logged, derived in sides(found)}
    assert texts["request_id"] == (found.logged, found.derived)
    assert found.logged in texts["row"][0] and found.derived in texts["row"][1]
    log = str(tmp_path / "log")
    assert [shlex.split(command) for command in next_commands(tmp_path / "log", found)] == [
        ["mmengine", "log", "show", log, "--step", str(found.step)],
        ["mmengine", "log", "why", log, found.logged],
    ]


def test_rows_and_token_counts_have_names(tmp_path):
    found = diverged(tmp_path / "log", bugs.a_row_runs_ahead_of_its_end, Night({"max_in_flight": 2}))
    assert likely_rule(found) == "which running requests get tokens"
    (_, logged, derived), *_ = sides(found)
    assert logged.startswith("the same rows as the step before: req-")
    assert "row" in derived and "None" not in logged + derived


def test_an_impossible_decision(tmp_path):
    found = diverged(tmp_path / "log", bugs.one_token_too_many, Night({"token_budget": 10}))
    assert likely_rule(found).startswith("budgets: ")
    assert next_commands(tmp_path / "log", found)[1].endswith("--failing budgets -o small")
    counts = next(each for each in sides(found) if each[0] == "num_tokens")
    assert "(together 11)" in counts[1] and "(together 10)" in counts[2]


@pytest.mark.parametrize(
    ("plant", "night", "rule"),
    [
        (bugs.tenants_share_prefixes, Night(salts=0.5, num_requests=20), "hits: request"),
        (bugs.some_requests_do_not_wait_for_grammars, Night(grammars=0.5, num_requests=20), "may start"),
        (bugs.the_last_block_is_not_released, Night(num_requests=20), "free blocks are taken"),
        (bugs.an_answer_is_delivered_before_its_end, Night(num_requests=6), "when a request ends"),
    ],
)
def test_the_likely_rule(tmp_path, plant, night, rule):
    found = diverged(tmp_path / "log", plant, night)
    assert rule in likely_rule(found)
    assert len(next_commands(tmp_path / "log", found)) == 2


def test_commands_are_quoted(tmp_path):
    found = Divergence(3, 2, "Preempted", "request_id", "a", "b", [])
    folder = tmp_path / "a log; rm -r ~"
    for command in next_commands(folder, found):
        assert str(folder) in shlex.split(command)


def test_the_command_prints_texts_and_the_next_commands(tmp_path, monkeypatch, capsys):
    diverged(tmp_path / "log", bugs.the_first_admitted_is_preempted)
    words = {f"w{number}": number for number in range(9000)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    arguments = ["mmengine", "log", "verify", str(tmp_path / "log"), "--tokenizer", str(tmp_path)]
    monkeypatch.setattr("sys.argv", arguments)
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr().out
    assert end.value.code == 3
    assert "likely rule" in said and "which running request is preempted" in said
    assert "next:\n  mmengine log show" in said and "  mmengine log why" in said
    assert "prompt [" in said and "= 'w" in said
    monkeypatch.setattr("sys.argv", [*arguments[:4], "--json"])
    with pytest.raises(SystemExit):
        cli.main()
    found = json.loads(capsys.readouterr().out)["divergence"]
    assert found["likely_rule"] == "which running request is preempted" and len(found["next"]) == 2
    monkeypatch.setattr("sys.argv", [*arguments[:4], "--tokenizer", str(tmp_path / "log")])
    with pytest.raises(SystemExit):
        cli.main()
    assert "cannot read" in capsys.readouterr().err


def test_long_lists_are_cut():
    assert tokens_text(list(range(20))).endswith("and 8 more")
    assert tokens_text([1, 2], lambda tokens: str(len(tokens))) == "[1, 2] = '2'"


def test_a_call_of_a_host_shows_both_values():
    # In a log recorded in vLLM, a divergence names an outcome of a scheduling call, with the logged and the
    # derived value.
    found = Divergence(88, 24, "Scheduled", "preempted", ["r10"], ["r5"], [])
    assert sides(found) == [("preempted", "['r10']", "['r5']")]
