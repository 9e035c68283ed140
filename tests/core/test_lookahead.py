"""Tests `lookahead_tokens`: a drafter also reads the token after a step's tokens. This token may be a
placeholder of an image that is not encoded yet.
"""

import numpy as np
import pytest

from mmengine.config import EngineConfig
from mmengine.core.engine import EngineCore
from mmengine.request import MediaItem, Request, SamplingParams
from mmengine.simulation.simulated_executor import SimulatedExecutor, reference_tokens


@pytest.mark.parametrize("compat", ["", "vllm"])
def test_a_single_embedding_right_after_an_item_that_fills_the_cache(compat):
    config = EngineConfig(
        max_num_seqs=1,
        token_budget=32,
        max_model_len=63,
        num_blocks=6,
        encoder_budget=6,
        encoder_cache_size=6,
        num_draft_tokens=1,
        lookahead_tokens=1,
        compat=compat,
    )
    media = (
        MediaItem(b"a" * 32, "image", ((2, 6),), (1, 2, 2)),
        MediaItem(b"b" * 32, "image", ((8, 1),), (1, 2, 2)),
    )
    request = Request("r", np.zeros(20, np.int32), SamplingParams(max_tokens=5, seed=1), media)
    core = EngineCore(config, SimulatedExecutor(config, check_kv=True))
    core.submit(request)
    tokens = []
    while core.has_work:
        for output in core.step():
            tokens += output.token_ids
    assert tokens == reference_tokens(request, config)[0]
