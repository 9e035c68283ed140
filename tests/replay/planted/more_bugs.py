"""Twelve more planted bugs, of the same kinds as in bugs.py. They were written without a look at how the
tools find the first twelve bugs.
"""

import numpy as np
import pytest
from msgspec.structs import replace

from mmengine.core import batch as planning
from mmengine.core.decide import admission, running
from mmengine.core.decide.encoder_draft import EncoderDraft
from mmengine.core.fold import evolve, sessions, steps
from mmengine.core.outputs import OutputCollector
from mmengine.core.state import blocks, overlap
from mmengine.core.state.blocks import BlockPool
from mmengine.events import vocabulary as ev
from tests.replay.planted.bugs import DRAFTS, LORAS, PARTS, SESSIONS
from tests.replay.planted.finding import Bug
from tests.replay.planted.nights import Night


def the_encoder_budget_is_exceeded(patch: pytest.MonkeyPatch) -> None:
    real = EncoderDraft.__init__

    def init(draft: EncoderDraft, view) -> None:
        real(draft, view)
        draft._left += 4

    patch.setattr(EncoderDraft, "__init__", init)


def a_preempted_request_waits_at_the_back(patch: pytest.MonkeyPatch) -> None:
    real = evolve._apply_preempted

    def apply_preempted(state, event: ev.Preempted) -> None:
        state.requests_by_row[event.row].arrival = state.num_arrived
        real(state, event)

    patch.setattr(evolve, "_apply_preempted", apply_preempted)


def a_shared_block_is_released_twice(patch: pytest.MonkeyPatch) -> None:
    real = BlockPool.release

    def release(pool: BlockPool, freed: np.ndarray) -> None:
        shared = freed[pool.references[freed] > 2]
        pool.references[shared] -= 1
        real(pool, freed)

    patch.setattr(BlockPool, "release", release)


def an_overwritten_block_stays_cached(patch: pytest.MonkeyPatch) -> None:
    def take_new(pool: BlockPool, new: np.ndarray) -> None:
        pool.index.forget(new[:-1])
        pool.free_list.take(new)
        pool.references[new] = 1

    patch.setattr(BlockPool, "take_new", take_new)


def the_last_draft_is_never_verified(patch: pytest.MonkeyPatch) -> None:
    real = running.with_drafts

    def with_drafts(view, rows, wanted):
        found = real(view, rows, wanted)
        return np.where(found - wanted > 2, found - 1, found).astype(found.dtype)

    patch.setattr(running, "with_drafts", with_drafts)


def a_token_goes_to_the_block_before(patch: pytest.MonkeyPatch) -> None:
    real = planning.batch

    def batch(view, decisions, tables):
        plan = real(view, decisions, tables)
        slots, size = plan.slot_mapping.copy(), view.block_size
        first = (plan.token_index % size == 0) & (plan.token_index > 0)
        owners = np.repeat(plan.rows, plan.num_scheduled)
        earlier = view.block_table[owners, np.maximum(plan.token_index // size - 1, 0)]
        slots[first] = earlier[first].astype(np.int64) * size
        return replace(plan, slot_mapping=slots)

    patch.setattr(planning, "batch", batch)


def adapters_share_prefixes(patch: pytest.MonkeyPatch) -> None:
    real = blocks.block_extras

    def without_adapter(request, first, last, block_size, ahead=0):
        extras = real(request, first, last, block_size, ahead)
        if request.adapter is not None and first == 0 < last:
            extras[0] = extras[0][: -len(request.adapter.digest) - 20]
        return {number: extra for number, extra in extras.items() if extra}

    for module in ("core.decide.start", "core.fold.rows", "replay.row_invariants"):
        patch.setattr(f"mmengine.{module}.block_extras", without_adapter)


def a_session_forgets_its_last_token(patch: pytest.MonkeyPatch) -> None:
    real = sessions.grow

    def grow(state, req_state, reason: str) -> None:
        session = state.sessions.of_request.get(req_state.request.request_id)
        before = -1 if session is None else session.num_grown
        real(state, req_state, reason)
        if session is not None and session.num_grown > before and before > 0:
            session.tokens = session.tokens[:-1]

    patch.setattr(sessions, "grow", grow)


def a_grammar_blocks_the_queue(patch: pytest.MonkeyPatch) -> None:
    real = admission.Admission.admit_next

    def admit_next(self, view, may_start=None):
        blocked = False

        def may(req_state) -> bool:
            nonlocal blocked
            blocked = blocked or req_state.waits_for_grammar
            return not blocked and (may_start is None or may_start(req_state))

        return real(self, view, may)

    patch.setattr(admission.Admission, "admit_next", admit_next)


def a_step_does_not_wait_for_drafts(patch: pytest.MonkeyPatch) -> None:
    real = overlap.waits_for

    def waits_for(view) -> str:
        reason = real(view)
        return "" if reason == overlap.DRAFTS and view.step % 5 == 0 else reason

    patch.setattr(overlap, "waits_for", waits_for)


def a_failed_part_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(steps, "drop_part", lambda state: None)


def an_end_is_lost_on_the_way(patch: pytest.MonkeyPatch) -> None:
    real = OutputCollector.before

    def before(collector: OutputCollector, event: ev.Event) -> None:
        if isinstance(event, ev.Finished) and event.reason == "abort" and len(collector._state.running) > 2:
            return
        real(collector, event)

    patch.setattr(OutputCollector, "before", before)


FAILED_PARTS = Night(PARTS, patches=4, fail_at=(30, 60, 90))
GRAMMARS = Night(grammars=0.4)
ENCODER = Night({"encoder_budget": 10}, images=0.9)
BOTH = {**DRAFTS, "max_in_flight": 2}
BUGS = (
    Bug("the encoder budget is exceeded", "budgets", the_encoder_budget_is_exceeded, ENCODER, "budgets"),
    Bug("at the back", "victims", a_preempted_request_waits_at_the_back, Night(), "Checkpoint.digest"),
    Bug("released twice", "references", a_shared_block_is_released_twice, Night(salts=0.0), "references"),
    Bug("a stale block", "prefix hits", an_overwritten_block_stays_cached, Night(), "writes"),
    Bug("a draft less", "drafts", the_last_draft_is_never_verified, Night(DRAFTS), "Scheduled.num_tokens"),
    Bug("the block before", "slots", a_token_goes_to_the_block_before, Night(), "plan"),
    Bug("adapters share prefixes", "adapters", adapters_share_prefixes, Night(LORAS), "hits"),
    Bug("a forgotten token", "sessions", a_session_forgets_its_last_token, SESSIONS, "answers"),
    Bug("a grammar blocks", "grammar waits", a_grammar_blocks_the_queue, GRAMMARS, "Executed.event"),
    Bug("no wait for drafts", "overlap", a_step_does_not_wait_for_drafts, Night(BOTH), "overlap"),
    Bug("a failed part", "encoder parts", a_failed_part_counts, FAILED_PARTS, "Checkpoint.digest"),
    Bug("a lost end", "deliveries", an_end_is_lost_on_the_way, Night(), "deliveries"),
)
