"""The simulated KV for models that must compute an image, or a whole prompt, in a single step.

For these models, the simulated KV value of a token also depends on later tokens in the step, as with
bidirectional attention. A scheduler that splits an image over steps therefore changes the output. A prefix
hit with another prompt's KV also changes the output.
"""

import hashlib

import numpy as np

from mmengine.core.executor import StepPlan
from mmengine.request import Request

_FACTOR = 0x94D049BB133111EB


def run_value(length: int) -> np.uint64:
    """Return the number that a step with `length` image tokens adds to each image token's KV value."""
    return np.uint64(length * _FACTOR % 2**64)


def prompt_value(request: Request, num_known: int) -> np.uint64:
    """Return the number that a step which ends at token `num_known` adds to each prompt token's KV value."""
    num_known = min(num_known, len(request.prompt_token_ids))
    found = hashlib.blake2b(request.prompt_token_ids[:num_known].tobytes(), digest_size=8)
    for item in request.media:
        found.update(item.mm_hash)
    return np.uint64(int.from_bytes(found.digest(), "little"))


def add_prompts(plan: StepPlan, requests: list[Request | None], values: np.ndarray) -> None:
    """Add each row's `prompt_value` in place to `values` (uint64 [t]), for the row's prompt tokens."""
    starts = np.cumsum(plan.num_scheduled) - plan.num_scheduled
    for place, row in enumerate(plan.rows.tolist()):
        request, computed = requests[row], int(plan.num_computed[place])
        assert request is not None
        reach = computed + int(plan.num_scheduled[place])
        count = min(reach, len(request.prompt_token_ids)) - computed
        if count > 0:
            values[starts[place] : starts[place] + count] += prompt_value(request, reach)
