"""The pool for recurrent states: a slot for each running row and for each state kept for prefix hits."""

import numpy as np
import torch

from mmengine.config import EngineConfig
from mmengine.core.executor import StatePlan, StepPlan
from mmengine.errors import ConfigError, ExecutorFailed
from mmengine.events.vocabulary import NO_STATE
from mmengine.models.plugin import ModelSpec
from mmengine.models.states import StateSpec, StepStates
from mmengine.runtime.device.placement import Placement
from mmengine.runtime.kv.pool import fresh_zeros


class StatePool:
    """The slots for recurrent states. A slot contains all layers' states, contiguously.

    A recurrent state cannot be rolled back to a shorter length, so a row's state does not include the row's
    drafts. The drafts' inputs wait in `pending` until the next step knows which drafts were accepted. Inputs
    are about 100 times smaller than states.
    """

    def __init__(self, spec: StateSpec, config: EngineConfig, placement: Placement) -> None:
        """Allocate the pool. Raises ConfigError if the memory is too small."""
        slots, layers, device = config.num_state_slots, spec.num_layers, placement.device
        try:
            self._conv = fresh_zeros((slots, layers, spec.taps - 1, spec.width), placement.dtype, device)
            self._recurrent = fresh_zeros(
                (slots, layers, spec.num_heads, spec.key_dim, spec.value_dim), torch.float32, device
            )
            room = (config.max_num_seqs, layers, config.num_draft_tokens, spec.input_width)
            self._pending = fresh_zeros(room, placement.dtype, device)
        except (RuntimeError, MemoryError, ValueError, OSError, OverflowError) as error:
            need = slots * spec.slot_bytes(placement.dtype.itemsize) / 2**30
            raise ConfigError(
                f"{slots} slots for recurrent states need {need:.2f} GiB on {device.name}, which cannot be "
                "allocated; lower num_state_slots"
            ) from error
        self._lengths = np.zeros(slots, np.int64)  # number of tokens that each state covers
        self._num_pending = np.zeros(config.max_num_seqs, np.int64)

    def begin(self, plan: StepPlan) -> StepStates:
        """Copy the initial states for new rows. Returns the states that the layers read and write in this
        step.

        Raises ExecutorFailed if a row's state does not match the row's computed token count.
        """
        states = plan.states
        assert states is not None
        for source, target in states.begins.tolist():
            self._copy(source, target)
        self._num_pending[plan.rows[np.isin(states.slots, states.begins[:, 1])]] = 0
        stayed = plan.num_computed - self._lengths[states.slots]
        if ((stayed < 0) | (stayed > self._num_pending[plan.rows])).any():
            raise ExecutorFailed("a row's recurrent state does not match its number of computed tokens")
        drafts = np.zeros_like(plan.num_scheduled) if plan.num_drafts is None else plan.num_drafts
        certain = plan.num_scheduled - drafts
        kept_starts, kept_after, kept_slots = self._kept_states(plan, states)
        self._lengths[states.slots] += stayed + certain
        self._num_pending[plan.rows] = drafts
        starts = np.zeros(len(plan.rows) + 1, np.int32)
        np.cumsum(plan.num_scheduled, out=starts[1:])
        return StepStates(
            self._conv,
            self._recurrent,
            self._pending,
            slots=np.ascontiguousarray(states.slots, np.int32),
            rows=np.ascontiguousarray(plan.rows, np.int32),
            query_starts=starts,
            stayed=stayed.astype(np.int32),
            certain=certain.astype(np.int32),
            kept_starts=kept_starts,
            kept_after=kept_after,
            kept_slots=kept_slots,
        )

    def _copy(self, source: int, target: int) -> None:
        if source == target:
            return
        if source == NO_STATE:
            self._conv[target], self._recurrent[target], self._lengths[target] = 0, 0, 0
            return
        self._conv[target], self._recurrent[target] = self._conv[source], self._recurrent[source]
        self._lengths[target] = self._lengths[source]

    def _kept_states(self, plan: StepPlan, states: StatePlan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return kept_starts, kept_after and kept_slots, which are fields of StepStates."""
        kept = states.kept[np.lexsort((states.kept[:, 1], states.kept[:, 0]))]
        places, tokens, slots = (np.ascontiguousarray(column) for column in kept.T)
        starts = np.searchsorted(places, np.arange(len(plan.rows) + 1)).astype(np.int32)
        after = (tokens - self._lengths[states.slots[places]]).astype(np.int32)
        self._lengths[slots] = tokens
        return starts, after, slots

    def close(self) -> None:
        """Free the memory on a GPU, as `KVPool.close` does."""
        for tensor in (self._conv, self._recurrent, self._pending):
            if tensor.device.type != "cpu":
                tensor.untyped_storage().resize_(0)


def state_bytes(spec: ModelSpec, config: EngineConfig, dtype: torch.dtype) -> int:
    """Return the pool's size in bytes for `config`; 0 for a model without recurrent states."""
    if spec.state is None:
        return 0
    pending = config.max_num_seqs * config.num_draft_tokens * spec.state.input_bytes(dtype.itemsize)
    return config.num_state_slots * spec.state.slot_bytes(dtype.itemsize) + pending


def slots_for(spec: ModelSpec, config: EngineConfig, dtype: torch.dtype, memory_bytes: int) -> int:
    """Return the default slot count: one for each row, and as many again for kept states.

    The slots take at most `memory_bytes`, but there are at least two: one for a row and one for a kept state.
    Returns 0 for a model without recurrent states.
    """
    if spec.state is None:
        return 0
    return max(2, min(2 * config.max_num_seqs, memory_bytes // spec.state.slot_bytes(dtype.itemsize)))


def state_pool(spec: ModelSpec, config: EngineConfig, placement: Placement) -> StatePool | None:
    return None if spec.state is None else StatePool(spec.state, config, placement)
