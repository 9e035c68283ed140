"""Tests that `log why` reports decisions that differ from the scheduling rules, and names the decisions that
the rules would have made.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from mmengine.core import engine
from mmengine.core.decide import admission
from mmengine.core.decide.encoder_draft import EncoderDraft
from mmengine.core.state import policy
from mmengine.encoder_cache.cache import EncoderCache
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from mmengine.replay import request_lines
from mmengine.replay.queries.why import Claim, why
from tests.replay.planted import bugs
from tests.replay.planted.finding import Plant
from tests.replay.planted.nights import Night
from tests.replay.runs import session_run


def claims(folder: Path, names: set[str] | None = None) -> list[Claim]:
    lines = request_lines(folder)
    return [
        each
        for line in lines
        if names is None or line.request_id in names
        for each in why(folder, line.request_id)
    ]


def victims_in(log: Path) -> set[str]:
    return {record.event.request_id for record in LogReader(log) if isinstance(record.event, ev.Preempted)}


def written(folder: Path, plant: Plant, night: Night) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        night.run(folder)
    return folder


@pytest.mark.parametrize(
    "settings",
    [{}, {"policy": "priority", "max_in_flight": 2}, {"num_state_slots": 8, "swap_blocks": 0}],
)
def test_a_sound_log_agrees_with_the_rules(tmp_path, settings):
    night = Night(settings, num_requests=14, fail_at=(9,), grammars=0.2, choices=0.2)
    night.run(tmp_path / "log")
    found = claims(tmp_path / "log")
    assert len(found) > 60
    assert not [each for each in found if "rules" in each.facts or "rules" in each.text]
    preempted = [each for each in found if each.kind == "preemption" and "for" not in each.facts]
    assert all("The policy" in each.text for each in preempted if "needed" in each.facts)


def test_a_sound_log_with_sessions_agrees_with_the_rules(tmp_path):
    session_run(tmp_path / "log")
    found = claims(tmp_path / "log")
    assert any(each.kind == "lease taken" for each in found)
    assert not [each for each in found if "rules" in each.text]


def test_another_victim_is_named(tmp_path):
    log = written(tmp_path / "log", bugs.the_first_admitted_is_preempted, Night(num_requests=40))
    found = [each for each in claims(log, victims_in(log)) if each.kind == "preemption"]
    wrong = [each for each in found if "rules" in each.facts]
    assert wrong and all(f"would have preempted {each.facts['rules']} (" in each.text for each in wrong)
    assert all("the last admitted of" in each.text and "the log preempts" in each.text for each in wrong)
    assert all("preempts the last admitted request." in each.text for each in found if each not in wrong)


def test_a_victim_of_the_wrong_priority_is_named(tmp_path):
    def plant(patch):
        changed = policy.PRIORITY._replace(victim=lambda view: int(view.running[-1]))
        patch.setattr("mmengine.core.state.state.policy_of", lambda config: changed)

    log = written(tmp_path / "log", plant, Night({"policy": "priority"}, num_requests=30))
    found = [each for each in claims(log, victims_in(log)) if "rules" in each.facts]
    assert found
    for each in found:
        assert "The policy priority would have preempted" in each.text
        assert "priority" in each.text and "the least important of" in each.text


def test_an_admission_out_of_order_is_named(tmp_path):
    def plant(patch):
        real = admission.Admission.admit_next

        def admit_next(self, view, may_start=None):
            waiting = [name.request.request_id for name in view.tenants.rest()]
            if may_start is None and len(waiting) > 2:
                return real(self, view, lambda req_state: req_state.request.request_id != waiting[0])
            return real(self, view, may_start)

        patch.setattr(admission.Admission, "admit_next", admit_next)

    log = written(tmp_path / "log", plant, Night(num_requests=26))
    found = claims(log)
    early = [each for each in found if each.kind == "start" and "ahead in the queue" in each.text]
    assert early and all(each.facts["rules"] in each.text for each in early)
    late = [each for each in found if each.kind == "wait" and "rules would have scheduled" in each.text]
    assert late


def test_an_admission_that_must_wait_is_named(tmp_path):
    night = Night(grammars=0.6, num_requests=24)
    log = written(tmp_path / "log", bugs.some_requests_do_not_wait_for_grammars, night)
    texts = [each.text for each in claims(log) if each.kind == "start"]
    assert any("would not have admitted the request here: the grammar is not compiled" in t for t in texts)


def test_false_prefix_hits_are_named(tmp_path):
    log = written(tmp_path / "log", bugs.tenants_share_prefixes, Night(salts=0.5, num_requests=24))
    texts = [each.text for each in claims(log) if each.kind == "start"]
    assert any("tokens are in the prefix cache" in t for t in texts)


def test_a_wrong_eviction_is_named(tmp_path):
    def plant(patch):
        real = EncoderCache.evictions_for

        def newest_first(cache, size, keep, extra):
            order = list(cache.idle)
            cache.idle = dict.fromkeys(reversed(order))
            found = real(cache, size, keep, extra)
            cache.idle = dict.fromkeys(order)
            return found

        patch.setattr(EncoderCache, "evictions_for", newest_first)

    log = written(tmp_path / "log", plant, Night(images=1.0, num_requests=24))
    texts = [each.text for each in claims(log) if each.kind == "encoder cache"]
    assert any("although this build's rules would not have evicted it" in t for t in texts)


def test_a_wrong_pick_of_the_encoder_is_named(tmp_path):
    def plant(patch):
        real = EncoderDraft._take

        def take(draft, req_state, row, index, size):
            return (
                size < 9
                and real(draft, req_state, row, index, size)
                or (
                    size >= 9
                    and draft._cache.has(req_state.media_keys[index])
                    and real(draft, req_state, row, index, size)
                )
            )

        patch.setattr(EncoderDraft, "_take", take)

    log = written(tmp_path / "log", plant, Night(images=1.0, num_requests=12))
    found = claims(log)
    assert any("items to encode: 0; in the log: none" in each.text for each in found)


def test_tokens_beyond_the_budget_are_named(tmp_path):
    log = written(tmp_path / "log", bugs.a_row_runs_ahead_of_its_end, Night(bugs.OVERLAP, num_requests=8))
    found = [each for each in claims(log) if each.kind == "rules"]
    assert any("this build's rules would have computed 0" in each.text for each in found)


def test_another_lease_is_named(tmp_path):
    log = written(tmp_path / "log", bugs.the_newest_lease_is_taken, replace(bugs.SESSIONS, num_requests=24))
    found = [each for each in claims(log) if each.kind == "lease taken"]
    assert any("This build's rules would have taken session" in each.text for each in found)


def test_an_early_end_is_named(tmp_path):
    def plant(patch):

        real = engine.complete

        def complete(view):
            ends = real(view)
            names = {event.request_id for event in ends}
            for row in view.running.tolist():
                req_state = view.requests_by_row[row]
                name = req_state.request.request_id
                left = int(view.max_total[row] - view.num_tokens[row])
                if name not in names and left == 1 and not view.in_flight[row]:
                    ends.append(ev.Finished(name, "length"))
            return ends

        patch.setattr(engine, "complete", complete)

    log = written(tmp_path / "log", plant, Night(num_requests=12))
    texts = [each.text for each in claims(log) if each.kind == "end"]
    assert any("would not have ended the request here" in t for t in texts)
