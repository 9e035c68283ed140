"""Tests rows with NaN or infinite logits: the row ends with an error, other rows continue, and the row's
blocks do not become prefix hits.
"""

import numpy as np
from msgspec.structs import replace

from mmengine.config import EngineConfig
from mmengine.core.engine import EngineCore
from mmengine.request import Request, SamplingParams
from mmengine.simulation.simulated_executor import SimulatedExecutor, reference_tokens

CONFIG = EngineConfig(
    max_num_seqs=4, token_budget=64, max_model_len=64, num_blocks=40, block_size=4, encoder_cache_size=64
)


class BreakingExecutor(SimulatedExecutor):
    """Reports non-finite logits for the first sampling row of the first step."""

    def collect(self):
        first = self._plans[0].step == 0
        result = super().collect()
        return replace(result, errors=((0, "not finite"),)) if first else result


def run(core, *requests):
    ends = {}
    for request in requests:
        core.submit(request)
    while core.has_work:
        for output in core.step():
            tokens, *_ = ends.setdefault(output.request_id, ([], ""))
            tokens.extend(output.token_ids)
            if output.finish_reason:
                ends[output.request_id] = (tokens, output.finish_reason, output.num_cached_tokens)
    return ends


def request(name):
    return Request(name, np.arange(20, dtype=np.int32), SamplingParams(max_tokens=5, seed=1))


def test_others_go_on_and_its_blocks_are_no_hits():
    core = EngineCore(CONFIG, BreakingExecutor(CONFIG))
    other = Request("other", np.full(9, 7, np.int32), SamplingParams(max_tokens=5, seed=1))
    ends = run(core, request("broken"), other)
    assert ends["broken"] == ([], "error", 0)
    assert ends["other"][:2] == reference_tokens(other, CONFIG)
    again = run(core, request("again"))["again"]
    assert again[:2] == reference_tokens(request("again"), CONFIG)
    assert again[2] == 0, "blocks that a broken row filled are not reused"
    assert run(core, request("warm"))["warm"][2] == 16
