"""Steps that only decode, captured once in each size and replayed: on a GPU, launching the kernels of a small
step one by one takes longer than they do.

What is captured: embedding, layers and final norm, over inputs that stay where they are. What is not, because
its shape follows from what rows ask for: the plan of attention, copies of blocks, the head and sampling.
"""

import numpy as np
import torch

from mmengine.core.executor import StepPlan
from mmengine.models.plugin import AuxHiddenStates, VisionLanguageModel
from mmengine.runtime.attention.base import AttentionBackend, AttentionMeta, Bucket
from mmengine.runtime.device.port import Recorder
from mmengine.runtime.device.upload import upload
from mmengine.runtime.graphs.buckets import (
    REASONS,
    Frame,
    all_buckets,
    empty_step,
    fill_up,
    frame_of,
    row_sizes,
)
from mmengine.runtime.graphs.capture import CAPTURE_FAILED, REPLAYED, Capture, capture, capture_steps

ADAPTED = "adapters"  # why a step is not replayed: rows have LoRA adapters


class DecodeGraphs:
    """`dtype`: of hidden states. `num_drafts`: the most of one row. `aux_hidden_states`: as many tokens as
    the model's draft head asks for them; None without one. Captured at once, by `capture`: the pool's dummy
    block is written to."""

    def __init__(
        self,
        model: VisionLanguageModel,
        attention: AttentionBackend,
        recorder: Recorder,
        device: torch.device,
        dtype: torch.dtype,
        *,
        block_size: int,
        max_rows: int,
        num_drafts: int = 0,
        aux_hidden_states: AuxHiddenStates | None = None,
        capture: Capture = capture,
    ) -> None:
        self._model, self._attention, self._block_size = model, attention, block_size
        self._sizes, self._num_drafts = row_sizes(max_rows), num_drafts
        buckets = all_buckets(max_rows, num_drafts)
        most = buckets[0].num_tokens
        # Token ids [t] and positions [3, t] of a bucket; behind them what else the step uploads.
        self.inputs = torch.zeros(5 * most + 2 * max_rows, dtype=torch.int64, device=device)
        self._hidden = torch.zeros(most, model.spec.hidden_size, dtype=dtype, device=device)
        self._aux_hidden_states = (
            None
            if aux_hidden_states is None
            else AuxHiddenStates(
                aux_hidden_states.layers,
                aux_hidden_states.rows.new_zeros(most, aux_hidden_states.rows.shape[1]),
            )
        )
        self.num_steps = dict.fromkeys((REPLAYED, *REASONS, ADAPTED, CAPTURE_FAILED), 0)
        self._replays = capture_steps(
            "steps that decode", buckets, self._compute, attention, recorder, block_size, capture
        )

    def find(self, plan: StepPlan) -> Frame | str:
        """Where the step is replayed, or why it is not: follows from the plan alone."""
        return frame_of(plan, self._sizes, self._num_drafts) if self._replays else CAPTURE_FAILED

    def frame(self, plan: StepPlan, *, adapted: bool = False) -> Frame | None:
        """Where the step is replayed; None: it is not. Which is counted. `adapted`: rows have adapters, which
        were not captured."""
        found = ADAPTED if adapted else self.find(plan)
        self.num_steps[REPLAYED if isinstance(found, Frame) else found] += 1
        return found if isinstance(found, Frame) else None

    def run(self, frame: Frame, meta: AttentionMeta) -> torch.Tensor:
        """Normed hidden states of the bucket [num_tokens, hidden_size], good until the next step, for what
        lies in `inputs` and `meta` of the step itself."""
        self._attention.begin(fill_up(meta, frame, self._block_size), frame.bucket)
        self._replays[frame.bucket]()
        return self._hidden[: frame.bucket.num_tokens]

    def run_empty(self, bucket: Bucket) -> None:
        """Replay a step without rows, whatever lies in `inputs`: PENDING, too, is no token."""
        with torch.inference_mode():
            self.inputs.zero_()
            self._attention.begin(empty_step(bucket, self._block_size), bucket)
            self._replays[bucket]()

    def give(self, frame: Frame, aux_hidden_states: AuxHiddenStates, positions: torch.Tensor) -> torch.Tensor:
        """Copy what a draft head reads of the step's own tokens into `aux_hidden_states`; and their positions
        [3, t], of the bucket's `positions`."""
        assert self._aux_hidden_states is not None  # there is a head to read them
        rows = self._aux_hidden_states.rows
        if isinstance(frame.places, slice):
            aux_hidden_states.rows.copy_(rows[frame.places])
            return positions[:, frame.places].clone()
        places = upload(frame.places.astype(np.int64), rows.device)
        torch.index_select(rows, 0, places, out=aux_hidden_states.rows)
        return positions.index_select(1, places)

    def _compute(self, bucket: Bucket) -> None:
        """What is captured."""
        count = bucket.num_tokens
        embeds = self._model.embed(self.inputs[:count])
        positions = self.inputs[count : 4 * count].view(3, count)
        asked = (
            ()
            if self._aux_hidden_states is None
            else (AuxHiddenStates(self._aux_hidden_states.layers, self._aux_hidden_states.rows[:count]),)
        )
        hidden = self._model.forward(embeds, None, positions, self._attention, *asked)
        self._hidden[:count].copy_(hidden)
