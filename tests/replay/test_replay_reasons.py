"""Tests the reasons why requests wait. Each request that gets no tokens in a step has a reason. If the reason
is a missing amount, for example of blocks, adding this amount removes the reason.
"""

import random
from collections import Counter

import msgspec
import pytest

from mmengine.core.fold.evolve import evolve
from mmengine.core.state.state import State
from mmengine.core.state.view import View
from mmengine.events import vocabulary as ev
from mmengine.replay import open_log
from mmengine.replay.queries.reasons import (
    BEHIND,
    BLOCKS,
    ENCODER_BUDGET,
    ENCODER_CACHE,
    FLIGHT,
    GAVE_WAY,
    GRAMMAR,
    GROUP,
    OTHER,
    PREEMPTING,
    PREFILL_FIRST,
    ROWS,
    TOKENS,
    TRIAL,
    Reasons,
)
from tests.core.workloads import small_config
from tests.replay.runs import busy_run
from tests.replay.step_reasons import reasons_of

SETTINGS = (
    *("policy", "compat", "num_draft_tokens", "lookahead_tokens", "admission_reserve", "split_media"),
    *("max_in_flight", "long_prefill_token_threshold", "enable_prefix_caching", "max_item_embeds"),
)


def random_log(folder, seed):
    config = small_config(random.Random(seed))
    settings = {name: getattr(config, name) for name in SETTINGS}
    busy_run(folder, seed, num_requests=20, mixed=True, **settings)
    return open_log(folder)


def test_exactly_the_requests_without_tokens_have_a_reason(tmp_path):
    kinds = Counter()
    for seed in range(15):
        for step in random_log(tmp_path / f"{seed}", seed).steps():
            reasons = reasons_of(step)
            check_all(step, reasons)
            kinds.update(reason.kind for reason in reasons)
    everything = {*ENLARGED, GRAMMAR, GROUP, BEHIND, FLIGHT, GAVE_WAY, PREEMPTING, PREFILL_FIRST, TRIAL}
    assert set(kinds) == everything, "each reason was met"


def check_all(step, reasons):
    state = step.state
    served = {state.requests_by_row[row].request.request_id for row in state.step_rows.tolist()}
    names = [reason.request_id for reason in reasons]
    assert len(set(names)) == len(names)
    assert set(names) == set(state.requests) - served
    for reason in reasons:
        check(step, reason)


def check(step, reason):
    state, req_state = step.state, step.state.requests[reason.request_id]
    assert reason.kind != OTHER, "the build that wrote the log has a reason for each"
    assert (reason.short > 0) == (reason.kind in (BLOCKS, ROWS, TOKENS, ENCODER_BUDGET, ENCODER_CACHE))
    assert reason.sentence()
    match reason.kind:
        case _ if reason.kind == GRAMMAR:
            assert req_state.waits_for_grammar
        case _ if reason.kind == GROUP:
            assert reason.other == req_state.request.group in state.requests
        case _ if reason.kind == BEHIND:
            other = state.requests[reason.other]
            assert other.row < 0 and other.rank < req_state.rank
        case _ if reason.kind == GAVE_WAY:
            assert any(isinstance(e, ev.Preempted) and e.request_id == reason.request_id for e in step.logged)
        case _ if reason.kind == PREEMPTING:
            assert any(isinstance(event, ev.Preempted) for event in step.logged)
        case _ if reason.kind == FLIGHT:
            assert req_state.row >= 0 and state.num_pending[req_state.row]
        case _ if reason.kind == TRIAL:
            assert state.suspects
        case _ if reason.kind == PREFILL_FIRST:
            assert req_state.row >= 0 and state.policy.prefill_first


ENLARGED = {
    BLOCKS: "num_blocks",
    ROWS: "max_num_seqs",
    TOKENS: "token_budget",
    ENCODER_BUDGET: "encoder_budget",
    ENCODER_CACHE: "encoder_cache_size",
}


def refold(log, number, setting="", more=0):
    """Return the reasons that step `number` would have if `setting` were larger by `more`. The earlier steps
    are as logged and do not use the surplus.
    """
    config = msgspec.structs.replace(
        log.config, **{setting: getattr(log.config, setting) + more} if more else {}
    )
    state = State(config)
    reasons = Reasons(View(state))
    step = open_log(log.folder).at(number)
    for _, record in log.events():
        if record.sequence > step.record.sequence + len(step.logged) - 1:
            break
        if record.sequence >= step.record.sequence:
            reasons.before(record.event)
        evolve(state, record.event)
    return {reason.request_id: reason for reason in reasons.at_end()}


@pytest.mark.parametrize("seed", range(100, 106))
def test_the_missing_amount_removes_the_reason(tmp_path, seed):
    log = random_log(tmp_path / "log", seed)
    rng = random.Random(seed)
    short = [
        (step.number, reason)
        for step in log.steps()
        for reason in reasons_of(step)
        if reason.kind in ENLARGED
    ]
    for number, reason in rng.sample(short, min(12, len(short))):
        setting = ENLARGED[reason.kind]
        # Requests with a better rank may take the added tokens, so the missing amount may not suffice.
        more = reason.short if reason.kind != TOKENS else 1000
        enough = refold(log, number, setting, more).get(reason.request_id)
        assert enough is None or enough.kind != reason.kind, (reason, enough)
        if reason.short > 1:
            still = refold(log, number, setting, reason.short - 1)[reason.request_id]
            assert (still.kind, still.short) == (reason.kind, 1)
