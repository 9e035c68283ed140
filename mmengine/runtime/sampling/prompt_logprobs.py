"""Gathers logprobs for prompt tokens while the prompt's chunks are computed.

A token's logprob comes from the position before it, so the first token has none. If a request is
preempted within its prompt, its KV is not swapped but dropped (core/decide). The whole prompt is then
computed again, and all logprobs too.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from mmengine.core.executor import Admission, PromptLogprobs, StepPlan
from mmengine.runtime.device.upload import upload
from mmengine.runtime.sampling.topk import topk_tokens_of

POSITIONS_AT_ONCE = 64  # maximum number of positions whose logits, float32 [64, vocab_size], are in memory


@dataclass(slots=True)
class _Prompt:
    """The logprobs that were gathered for one prompt so far."""

    token_ids: np.ndarray  # int32 [n]
    ids: np.ndarray  # int32 [n, 1 + k]: the prompt's token, then the k likeliest tokens
    logprobs: np.ndarray  # float32 [n, 1 + k]


class PromptLogprobsGatherer:
    """Gathers logprobs for rows whose request wants prompt logprobs."""

    def __init__(self) -> None:
        self._by_row: dict[int, _Prompt] = {}

    def admit(self, admission: Admission) -> None:
        prompt, most = admission.request.prompt_token_ids, admission.request.sampling.prompt_logprobs
        self._by_row.pop(admission.row, None)
        if most is None or len(admission.token_ids) > len(prompt):
            return
        ids, logprobs = (
            np.zeros((len(prompt), 1 + most), np.int32),
            np.zeros((len(prompt), 1 + most), np.float32),
        )
        ids[0, 0], logprobs[0] = prompt[0], np.nan
        self._by_row[admission.row] = _Prompt(prompt, ids, logprobs)

    def gather(
        self,
        plan: StepPlan,
        hidden: torch.Tensor,
        places: np.ndarray | None,
        logits_of: Callable[[torch.Tensor], torch.Tensor],
    ) -> tuple[PromptLogprobs, ...]:
        """Store the logprobs that this step computed, and return those for prompts that end in this step.

        Waits for the device if any row in the step wants prompt logprobs. `hidden`: the step's hidden states.
        `places`: indices of the plan's tokens in `hidden` (intp [n]; None: the first n).
        """
        asking = np.flatnonzero(np.isin(plan.rows, list(self._by_row))).tolist() if self._by_row else ()
        if not asking:
            return ()
        if places is not None:
            hidden = hidden[upload(places.astype(np.int64), hidden.device)]
        whole = []
        ends = np.cumsum(plan.num_scheduled)
        for place in asking:
            row = int(plan.rows[place])
            prompt = self._by_row[row]
            begin, count = int(plan.num_computed[place]), int(plan.num_scheduled[place])
            behind = int(ends[place]) - count - begin  # index in the step minus position in the prompt
            last = min(begin + count, len(prompt.token_ids) - 1)
            for start in range(begin, last, POSITIONS_AT_ONCE):
                stop = min(start + POSITIONS_AT_ONCE, last)
                _take(prompt, start, stop, logits_of(hidden[behind + start : behind + stop]))
            if begin + count >= len(prompt.token_ids):
                del self._by_row[row]
                index = int(np.searchsorted(plan.sample, place))
                whole.append(PromptLogprobs(index, prompt.ids, prompt.logprobs))
        return tuple(whole)


def _take(prompt: _Prompt, start: int, stop: int, logits: torch.Tensor) -> None:
    """Store the logprobs for the tokens that follow the positions `start` to `stop`, which have these
    `logits`.
    """
    logprobs = logits.log_softmax(dim=-1)
    start, stop = start + 1, stop + 1
    said = prompt.token_ids[start:stop].astype(np.int64)
    chosen = logprobs.gather(-1, upload(said, logits.device)[:, None])
    prompt.ids[start:stop, 0], prompt.logprobs[start:stop, 0] = said, chosen[:, 0].cpu().numpy()
    most = prompt.ids.shape[1] - 1
    if most:
        best, best_ids = topk_tokens_of(logprobs, most)
        prompt.ids[start:stop, 1:] = best_ids.cpu().numpy()
        prompt.logprobs[start:stop, 1:] = best.cpu().numpy()
