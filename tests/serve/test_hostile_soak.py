"""Tests that hostile media and texts neither end the engine nor disturb other requests.

Run with -s to see the figures.
"""

import asyncio
import os
import random
from collections.abc import Sequence

import numpy as np
import pytest

from mmengine.config import EngineConfig
from mmengine.serve.async_engine.async_engine import AsyncEngine
from tests.serve.hostile_media import BOMBS
from tests.serve.hostile_requests import hostile_request
from tests.serve.hostile_run import Felt, attack

P99_S = 0.250
GROWTH = 1536 * 2**20  # allowed memory growth in bytes, for a decoder's largest picture and the caches


def under_attack(seeds: Sequence[int]) -> tuple[Felt, AsyncEngine]:
    async def main() -> tuple[Felt, AsyncEngine]:
        config = EngineConfig(prepare_timeout_s=30)
        async with AsyncEngine(config=config) as engine:
            felt = await attack(engine, list(seeds))
            assert not engine._admission.preparing and not engine._admission.preparation._requests
            assert engine.readiness()
        assert not engine._open and engine._engine.media_memory.num_bytes == 0
        return felt, engine

    return asyncio.run(main())


def check(felt: Felt, count: int) -> None:
    print(f"\n{felt.summary()}\n")
    assert not felt.bugs
    assert sum(felt.outcomes.values()) == count
    assert felt.most_bytes - felt.first_bytes < GROWTH


def test_eighty_hostile_requests():
    seeds = [seed for seed in range(150) if hostile_request(random.Random(seed))[0] not in BOMBS][:80]
    felt, _ = under_attack(seeds)
    check(felt, 80)
    ends = {end for _, end in felt.outcomes}
    assert {"InvalidMedia", "InvalidRequest"} <= ends and {"stop", "length"} & ends


@pytest.mark.soak
def test_ten_thousand_hostile_requests():
    felt, engine = under_attack(range(1000, 11_000))
    check(felt, 10_000)
    for kind in sorted({kind for kind, _ in felt.outcomes}):
        print(kind, {end: count for (one, end), count in felt.outcomes.items() if one == kind})
    print("decoders lost:", engine._engine.decoders.num_lost, "load:", os.getloadavg())
    assert np.percentile(felt.gaps, 99) <= P99_S
    assert felt.seconds < 20 * 60
