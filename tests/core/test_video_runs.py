"""Tests that prompts with equal tokens and videos share blocks only before the first run that has a different
position.
"""

import numpy as np

from mmengine.config import EngineConfig
from mmengine.core.engine import EngineCore
from mmengine.request import MediaItem, Request, SamplingParams, num_before
from mmengine.simulation.simulated_executor import SimulatedExecutor, reference_tokens
from tests.core.small_engine import image, video


def test_runs_at_other_places_are_other_content():
    config = EngineConfig(
        max_num_seqs=1, token_budget=64, max_model_len=64, num_blocks=33, block_size=2, encoder_cache_size=64
    )
    core = EngineCore(config, SimulatedExecutor(config, check_kv=True))
    for name, runs in (("one", ((3, 8), (14, 2), (18, 1))), ("other", ((3, 8), (13, 2), (15, 1)))):
        item = MediaItem(b"v" * 32, "video", runs, (1, 2, 2))
        request = Request(name, np.zeros(30, np.int32), SamplingParams(max_tokens=6, seed=0), (item,))
        core.submit(request)
        tokens = []
        while core.has_work:
            for output in core.step():
                tokens += output.token_ids
                cached = output.num_cached_tokens
        assert tokens == reference_tokens(request, config)[0]
    assert cached == 12, "hits end before the first run whose position differs"


def test_items_before_a_position_end_there_at_the_latest():
    media = (image(1, 0, 3), image(2, 3, 1), video(3, (6, 2), (10, 1)), image(4, 12, 4))
    for position in range(20):
        assert num_before(media, position) == sum(item.end <= position for item in media)
    assert num_before((), 5) == 0
