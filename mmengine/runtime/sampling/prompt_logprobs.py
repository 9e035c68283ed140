"""Gathers logprobs for prompt tokens while the prompt's chunks are computed.

A token's logprob comes from the logits at the previous position, so the first token has no logprob. A request
with `prompt_logprobs` that is preempted within its prompt is not swapped (core/decide). Its whole prompt is
computed again, with all logprobs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from mmengine.core.executor import Admission, PromptLogprobs, StepPlan
from mmengine.runtime.device.upload import upload
from mmengine.runtime.sampling.topk import topk_tokens_of

POSITIONS_AT_ONCE = 64  # limits the logits in memory to float32 [64, vocab_size]


@dataclass(slots=True)
class _Prompt:
    """One prompt's logprobs so far."""

    token_ids: np.ndarray  # int32 [n]
    ids: np.ndarray  # int32 [n, 1 + k]: the prompt's token, then the k likeliest tokens
    logprobs: np.ndarray  # float32 [n, 1 + k]


class PromptLogprobsGatherer:
    """Gathers logprobs for requests with `prompt_logprobs`."""

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
        """Store the step's prompt logprobs. Return the logprobs for prompts that end in the step.

        Waits for the device if any row in the step has prompt logprobs. `hidden`: the step's hidden states.
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
            # index in the step's tokens minus position in the prompt
            behind = int(ends[place]) - count - begin
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
    """Store the logprobs for the tokens that follow the positions in [start, stop). `logits`: the logits at
    these positions.
    """
    logprobs = logits.log_softmax(dim=-1)
    start, stop = start + 1, stop + 1
    said = prompt.token_ids[start:stop].astype(np.int64)
    # In some models the logits do not cover the tokens of media, which are never sampled.
    is_covered = said < logprobs.shape[-1]
    chosen = logprobs.gather(-1, upload(np.where(is_covered, said, 0), logits.device)[:, None])
    scores = np.where(is_covered, chosen[:, 0].cpu().numpy(), -np.inf)
    prompt.ids[start:stop, 0], prompt.logprobs[start:stop, 0] = said, scores
    most = prompt.ids.shape[1] - 1
    if most:
        best, best_ids = topk_tokens_of(logprobs, most)
        prompt.ids[start:stop, 1:] = best_ids.cpu().numpy()
        prompt.logprobs[start:stop, 1:] = best.cpu().numpy()
