"""Captures decode-only steps in several sizes, and replays them.

On a GPU, launching a small step's kernels takes longer than running them. The embedding, the layers and
the final norm are captured, with fixed addresses for their inputs. The attention plan, block copies, the
output head and sampling are not captured, because their shapes depend on the requests.
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

ADAPTED = "adapters"  # why a step is not replayed: some rows use LoRA adapters


class DecodeGraphs:
    """The captured decode steps. Capturing writes to the pool's dummy block.

    `dtype`: the hidden states' dtype. `num_drafts`: maximum number of drafts for a row.
    `aux_hidden_states`: tensors for the auxiliary states that a draft head reads; None without a head.
    `capture`: the function that captures all buckets (capture.py). `num_steps`: the number of steps by
    outcome, which is REPLAYED or the reason why a step was not replayed.
    """

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
        # The inputs of a bucket: token ids [t], positions [3, t], sampling positions, pending tokens
        # (inputs.py).
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
        """Return the frame in which the step is replayed, or the reason why it is not replayed."""
        return frame_of(plan, self._sizes, self._num_drafts) if self._replays else CAPTURE_FAILED

    def frame(self, plan: StepPlan, *, adapted: bool = False) -> Frame | None:
        """Count the step, and return the frame in which it is replayed, or None.

        `adapted`: whether rows use LoRA adapters, which graphs do not support.
        """
        found = ADAPTED if adapted else self.find(plan)
        self.num_steps[REPLAYED if isinstance(found, Frame) else found] += 1
        return found if isinstance(found, Frame) else None

    def run(self, frame: Frame, meta: AttentionMeta) -> torch.Tensor:
        """Replay a step whose inputs are in `inputs` and `meta`.

        Returns the normed hidden states [num_tokens, hidden_size] for all tokens in the bucket, valid until
        the next step.
        """
        self._attention.begin(fill_up(meta, frame, self._block_size), frame.bucket)
        self._replays[frame.bucket]()
        return self._hidden[: frame.bucket.num_tokens]

    def run_empty(self, bucket: Bucket) -> None:
        """Replay a step that consists only of padding.

        Clears `inputs` first, because pending tokens (core.executor.PENDING) have invalid ids.
        """
        with torch.inference_mode():
            self.inputs.zero_()
            self._attention.begin(empty_step(bucket, self._block_size), bucket)
            self._replays[bucket]()

    def copy_aux_states(
        self, frame: Frame, aux_hidden_states: AuxHiddenStates, positions: torch.Tensor
    ) -> torch.Tensor:
        """Copy the auxiliary states for the step's own tokens, without padding, to `aux_hidden_states`.

        `positions`: positions for all tokens in the bucket. Returns positions for the step's own
        tokens, [3, t].
        """
        assert self._aux_hidden_states is not None  # set if there is a draft head
        rows = self._aux_hidden_states.rows
        if isinstance(frame.places, slice):
            aux_hidden_states.rows.copy_(rows[frame.places])
            return positions[:, frame.places].clone()
        places = upload(frame.places.astype(np.int64), rows.device)
        torch.index_select(rows, 0, places, out=aux_hidden_states.rows)
        return positions.index_select(1, places)

    def _compute(self, bucket: Bucket) -> None:
        """Compute a step in the bucket's size. This function is captured."""
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
