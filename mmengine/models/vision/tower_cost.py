"""Measures a vision tower's speed on this machine: times the linear layers and the attention in the tower's
first layer.
"""

import time
from collections.abc import Callable

import torch

from mmengine.models.plugin import EncoderCost
from mmengine.models.vision.segments import Rotation, rotated
from mmengine.models.vision.tower import VisionTower
from mmengine.models.vision.tower_pass import PatchCosts

PATCHES, KEYS = 256, 1024  # Numbers of patches and keys in a timed run.
TRIES = 3  # Number of timed runs; the shortest time counts.


def measure_tower(tower: VisionTower) -> EncoderCost:
    """Return the tower's cost, measured with torch's current number of threads."""
    c, block = tower.config, tower.blocks[0]
    with torch.inference_mode():
        hidden = torch.randn(PATCHES, c.hidden_size).to(tower.dtype)
        mixed = torch.zeros_like(hidden)

        def layer() -> None:
            block.qkv(block.norm1(hidden))
            tower.finish_block(block, mixed, hidden)

        qkv = torch.randn(KEYS, 3 * c.hidden_size).to(tower.dtype)
        pack = Rotation(torch.ones(KEYS, c.head_dim), torch.zeros(KEYS, c.head_dim), [KEYS])
        rows = slice(0, PATCHES)

        def attention() -> None:
            if not tower.has_kernels:
                rotated(qkv[rows], c.num_heads, pack.cos[rows], pack.sin[rows])
            tower.attend_rows(qkv, pack, rows)

        layer_ns, attention_ns = _fastest(layer), _fastest(attention)
    costs = PatchCosts.of(c)
    patch_ns = layer_ns / PATCHES * costs.whole(c) / (costs.before + costs.behind)
    pair_ns = attention_ns / (PATCHES * KEYS)
    return EncoderCost(max(1, round(patch_ns)), max(1, round(patch_ns / (c.depth * pair_ns))))


def _fastest(compute: Callable[[], None]) -> int:
    """Return the shortest time of several runs in ns, at least 1."""
    compute()  # A warm-up run, which allocates memory and starts threads.
    taken = []
    for _ in range(TRIES):
        begun = time.perf_counter_ns()
        compute()
        taken.append(time.perf_counter_ns() - begun)
    return max(1, min(taken))
