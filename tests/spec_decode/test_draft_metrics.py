"""Tests that answers, metrics and `log show` report the draft counts in the log's steps."""

import json
import os
from collections import Counter, defaultdict

import numpy as np
import pytest

from mmengine.config import EngineConfig
from mmengine.core.state.draft_counts import DraftCounts
from mmengine.events import vocabulary as ev
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.queries.summaries import request_lines
from mmengine.replay.timeline import fold
from mmengine.serve.engine.engine import Engine
from tests.cli.cli_process import call_cli
from tests.spec_decode.equality import Scripted, answers, drawn_alike, known_as, mixed
from tests.spec_decode.test_failing_drafters import Failing


def counted(folder):
    """Return (proposed drafts by request, accepted drafts by request, counts by drafter) from the log's
    events.
    """
    proposed, accepted, drafters = Counter(), Counter(), defaultdict(DraftCounts)
    for state, record in fold(CheckedLog(folder)):
        event = record.event
        if not isinstance(event, ev.Executed):
            continue
        if event.num_drafts is not None:
            ended = [index for index, _ in (*event.stops, *event.errors)]
            assert not np.frombuffer(event.num_drafts, np.int32)[ended].any(), "a row that ended has drafts"
        if event.counts is None:
            continue
        kept = np.frombuffer(event.counts, np.int32).tolist()
        for index, number in Counter(index for index, _ in event.logprobs).items():
            assert number == kept[index], "logprobs of tokens that were not accepted"
        for row, count in zip(state.sampled_rows().tolist(), kept, strict=True):
            num_drafts = int(state.scheduled_drafts[row])
            name = state.requests_by_row[row].request.request_id.partition("/")[0]
            proposed[name] += num_drafts
            accepted[name] += count - 1
            if num_drafts:
                number = int(state.drafter[row])
                with_run = zip(drafters[number], (1, num_drafts, count - 1), strict=True)
                drafters[number] = DraftCounts(*map(sum, with_run))
    return proposed, accepted, dict(drafters)


@pytest.mark.parametrize("spec", ["auto", "script"])
def test_answers_metrics_and_log_agree(spec, tmp_path):
    asked = mixed(14, seed=21)
    want = answers(asked, spec="none")
    with known_as("script", Scripted(want.truth)):
        found = answers(asked, spec=spec, log=tmp_path / "log", max_num_seqs=6, token_budget=40)
    proposed, accepted, drafters = counted(tmp_path / "log")
    total, kept = proposed.total(), accepted.total()
    assert 0 < kept < total or spec == "auto"
    assert found.stats.drafts == drafters and len(drafters) == (2 if spec == "auto" else 1)
    for name, answer in found.by_id.items():
        details = answer.usage.get("completion_tokens_details", {})
        reasons = details.pop("reasoning_tokens", None)
        assert {"reasoning_tokens": reasons} == want.by_id[name].usage.get(
            "completion_tokens_details", {"reasoning_tokens": None}
        )
        assert (reasons is not None) == bool(asked.by_id[name][1].reasoning)
        assert details == (
            {
                "accepted_prediction_tokens": accepted[name],
                "rejected_prediction_tokens": proposed[name] - accepted[name],
            }
            if proposed[name]
            else {}
        )
    lines = request_lines(tmp_path / "log")
    assert sum(line.num_drafts for line in lines) == total
    assert sum(line.num_accepted for line in lines) == kept
    shown = call_cli("log", "show", str(tmp_path / "log"), env={**os.environ, "COLUMNS": "200"})
    assert shown.returncode == 0 and "drafts kept" in shown.stdout
    assert all(f" {line.num_accepted} of {line.num_drafts} " in shown.stdout for line in lines)
    assert want.stats.drafts == {}


def test_metrics_name_drafters_and_their_failures():
    asked = mixed(8, seed=5)
    want = answers(asked, spec="none")
    config = EngineConfig(spec="failing", draft_policy="all")
    with known_as("failing", Failing(want.truth)), drawn_alike(), Engine(config=config) as engine:
        for prepared, options in asked.by_id.values():
            engine.submit_prepared(prepared, options)
        while not engine.is_idle:
            engine.step()
        counts, text = engine.stats().drafts[0], engine.metrics_text()
        failures = engine.drafters[0][1]
    assert failures > 0 and counts.accepted > 0
    for line in (
        f'mmengine_draft_runs_total{{drafter="scripted"}} {float(counts.runs)}',
        f'mmengine_draft_tokens_total{{drafter="scripted"}} {float(counts.proposed)}',
        f'mmengine_accepted_draft_tokens_total{{drafter="scripted"}} {float(counts.accepted)}',
        f'mmengine_drafter_failures_total{{drafter="scripted"}} {float(failures)}',
    ):
        assert line in text


def test_a_batch_reports_draft_counts_at_its_end(tmp_path):
    lines = [
        {"custom_id": f"{n}", "messages": [{"role": "user", "content": "Say"}], "grammar": {"choice": [a]}}
        for n, a in enumerate(("a red circle, " * 12, "one green triangle, " * 12))
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    done = call_cli("run", "--batch", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out.jsonl"))
    assert done.returncode == 0, done.stderr
    usages = [json.loads(line)["usage"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    details = [usage["completion_tokens_details"] for usage in usages]
    kept, lost = (
        sum(each[f"{kind}_prediction_tokens"] for each in details) for kind in ("accepted", "rejected")
    )
    assert kept > 4 and f"grammar: {kept} of {kept + lost} drafts accepted, " in done.stderr


def test_lengths_of_runs():
    assert DraftCounts().length == 0
    assert str(DraftCounts(4, 12, 10)) == (
        "10 of 12 drafts accepted, 2.50 a run and 3.50 with the token after them"
    )
