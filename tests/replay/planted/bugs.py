"""Twelve planted bugs, each for a different resource of the scheduler or the engine. Each function patches
this process with a small mistake.
"""

import numpy as np
import pytest

from mmengine.core.decide import admission, encoder_parts, running, start
from mmengine.core.decide.adapter_places import AdapterPlaces
from mmengine.core.engine import EngineCore
from mmengine.core.fold import steps
from mmengine.core.state import policy
from mmengine.core.state.blocks import BlockPool
from mmengine.core.state.sessions import Sessions
from mmengine.core.state.state_slots import StateSlots
from mmengine.events import vocabulary as ev
from tests.replay.planted.finding import Bug
from tests.replay.planted.nights import Night


def one_token_too_many(patch: pytest.MonkeyPatch) -> None:
    real = running._within_budget
    patch.setattr(running, "_within_budget", lambda wanted, budget: real(wanted, budget + 1))


def the_first_admitted_is_preempted(patch: pytest.MonkeyPatch) -> None:
    changed = policy.FCFS._replace(victim=lambda view: int(view.running[0]))
    patch.setattr("mmengine.core.state.state.policy_of", lambda config: changed)


def the_last_block_is_not_released(patch: pytest.MonkeyPatch) -> None:
    real = BlockPool.release

    def release(pool: BlockPool, blocks: np.ndarray) -> None:
        real(pool, blocks[:-1] if len(blocks) > 9 else blocks)

    patch.setattr(BlockPool, "release", release)


def tenants_share_prefixes(patch: pytest.MonkeyPatch) -> None:
    real = start.block_extras

    def without_salt(request, *others):
        extras = real(request, *others)
        if request.cache_salt:
            extras.pop(0, None)
        return extras

    patch.setattr(start, "block_extras", without_salt)


def rejected_drafts_stay_computed(patch: pytest.MonkeyPatch) -> None:
    real = steps.take_drafts

    def take_drafts(state, rows, sampled, event):
        if event.counts is not None:
            rejected = state.scheduled_drafts[sampled] + 1 - np.frombuffer(event.counts, np.int32)
            state.num_computed[sampled] += np.minimum(rejected, 1)
        real(state, rows, sampled, event)

    patch.setattr(steps, "take_drafts", take_drafts)


def a_held_state_slot_is_found(patch: pytest.MonkeyPatch) -> None:
    def _forget(slots: StateSlots, slot: int) -> None:
        slots.content[slot], slots.block[slot], slots.used[slot] = -1, 0, 0

    patch.setattr(StateSlots, "_forget", _forget)


def one_adapter_too_many(patch: pytest.MonkeyPatch) -> None:
    real = AdapterPlaces.has_place

    def has_place(places: AdapterPlaces, req_state) -> bool:
        adapter = req_state.request.adapter
        fits = adapter is not None and places._pool.room_for(adapter) is not None
        return real(places, req_state) or fits and places._pool.num_held == places._view.config.max_loras

    patch.setattr(AdapterPlaces, "has_place", has_place)


def the_newest_lease_is_taken(patch: pytest.MonkeyPatch) -> None:
    real = Sessions.by_age
    patch.setattr(Sessions, "by_age", lambda sessions: real(sessions)[::-1])


def some_requests_do_not_wait_for_grammars(patch: pytest.MonkeyPatch) -> None:
    real = start.start_of

    def start_of(view, req_state):
        if req_state.waits_for_grammar and req_state.request.priority == 0:
            cached = start._cached_prefix(view, req_state)
            return start.Start(cached, len(cached) * view.block_size)
        return real(view, req_state)

    patch.setattr(admission, "start_of", start_of)


def a_row_runs_ahead_of_its_end(patch: pytest.MonkeyPatch) -> None:
    def _ahead_of_results(view, rows, wanted):
        return wanted + view.num_pending[rows]

    patch.setattr(running, "_ahead_of_results", _ahead_of_results)


def the_last_part_is_skipped(patch: pytest.MonkeyPatch) -> None:
    real = encoder_parts.next_part

    def next_part(view, admission):
        event = real(view, admission)
        if event is not None:
            work = view.requests[event.request_id].media_work[event.index]
            if work - event.until < view.config.encoder_piece:
                return ev.Encoded(event.request_id, event.index, work, event.evict)
        return event

    patch.setattr("mmengine.core.decide.scheduler.next_part", next_part)


def an_answer_is_delivered_before_its_end(patch: pytest.MonkeyPatch) -> None:
    real = EngineCore._collect

    def _collect(core: EngineCore) -> None:
        real(core)
        for row in core.state.running.tolist():
            if core.state.num_tokens[row] >= core.state.max_total[row]:
                core.record_delivered(ev.Delivered(core.state.requests_by_row[row].request.request_id))
                return

    patch.setattr(EngineCore, "_collect", _collect)


OVERLAP = {"max_in_flight": 2}
DRAFTS = {"num_draft_tokens": 3}
SLOTS = {"num_state_slots": 8, "snapshot_every": 8}
LORAS = {"max_loras": 2, "lora_bytes": 1000}
PARTS = {"encoder_piece": 5, "encoder_even_patches": 16}
SESSIONS = Night({"session_blocks": 12}, num_sessions=4)
BUGS = (
    Bug("one token too many", "budgets", one_token_too_many, Night({"token_budget": 10}), "budgets"),
    Bug(
        "the first admitted is preempted",
        "victims",
        the_first_admitted_is_preempted,
        Night(),
        "Preempted.request_id",
    ),
    Bug("a block is lost", "references", the_last_block_is_not_released, Night(), "references"),
    Bug("tenants share prefixes", "prefix hits", tenants_share_prefixes, Night(salts=0.5), "hits"),
    Bug("rejected drafts stay", "drafts", rejected_drafts_stay_computed, Night(DRAFTS), "computed"),
    Bug("a held slot is found", "slots", a_held_state_slot_is_found, Night(SLOTS), "state_slots"),
    Bug("one adapter too many", "adapters", one_adapter_too_many, Night(LORAS), "adapters"),
    Bug(
        "the newest lease is taken",
        "sessions",
        the_newest_lease_is_taken,
        SESSIONS,
        "LeaseTaken.session_id",
    ),
    Bug(
        "no wait for the grammar",
        "grammar waits",
        some_requests_do_not_wait_for_grammars,
        Night(grammars=0.5),
        "grammars",
    ),
    Bug("a row runs past its end", "overlap", a_row_runs_ahead_of_its_end, Night(OVERLAP), "ends"),
    Bug(
        "the last part is skipped",
        "encoder parts",
        the_last_part_is_skipped,
        Night(PARTS, patches=4),
        "parts",
    ),
    Bug("an early delivery", "deliveries", an_answer_is_delivered_before_its_end, Night(), "deliveries"),
)
