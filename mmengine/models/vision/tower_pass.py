"""Encodes an image or a video in parts, so that other work can run between the parts.

A layer processes the item's patches in tiles. First q, k and v are computed for all tiles. Then attention and
the other operations are computed for one tile after another. Between two parts, only the hidden states, one
layer's q, k and v, and the features so far are stored. With the CPU kernels, the features have the same bits
as after a single call of `VisionTower.encode`.
"""

from collections.abc import Generator, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mmengine.models.progress import report_step
from mmengine.models.vision.config import VisionConfig
from mmengine.models.vision.layers import Linear, Merger
from mmengine.models.vision.segments import Rotation, rotated
from mmengine.models.vision.tower import VisionTower

# Number of patches in a tile. Attention packs all keys of a frame again for each tile, so small tiles are
# slower. With 47,000 keys, 256 patches take 10 % longer than 1,024, and 512 take 2 % longer (bfloat16, AMD
# EPYC, 2 cores).
TILE = 512


class PatchCosts(NamedTuple):
    """Multiply-adds per patch: for the patch embedding, for a layer before attention, for a layer after
    attention, and for a merger.
    """

    embedding: int
    before: int
    behind: int
    merger: int

    @classmethod
    def of(cls, c: VisionConfig) -> "PatchCosts":
        square, merged = c.hidden_size**2, c.hidden_size * c.merge_size**2
        return cls(
            embedding=c.patch_width * c.hidden_size,
            before=3 * square,
            behind=square + 2 * c.hidden_size * c.intermediate_size,
            merger=merged * (c.out_hidden_size + (0 if c.linear_merger else merged)) // c.merge_size**2,
        )

    def whole(self, c: VisionConfig) -> int:
        """Return how many multiply-adds the tower computes for a patch, without attention."""
        layers = c.depth * (self.before + self.behind)
        return self.embedding + layers + (1 + len(c.deepstack_layers)) * self.merger


class TowerPass:
    """A pass through the vision tower that can pause. `encode_in_parts` in the plugin protocol returns
    this object.
    """

    def __init__(
        self, tower: VisionTower, patches: Tensor, grid: tuple[int, int, int], even_patches: int
    ) -> None:
        """Prepare the pass. Raises ValueError as `VisionTower.encode` does."""
        tower.check(patches, [grid])
        self._tower, self._costs = tower, PatchCosts.of(tower.config)
        frames, frame = grid[0], grid[1] * grid[2]
        each = self._costs.whole(tower.config)
        # The attention cost per patch and layer: the number of multiply-adds that linear layers compute in
        # the same time. With `even_patches` patches in a frame, attention takes as long as all other
        # operations.
        self._attention = each * frame // (even_patches * tower.config.depth)
        self._total = frames * frame * (each + tower.config.depth * self._attention)
        self._done = 0
        self._stages = self._compute(patches, grid)
        self._next = next(self._stages)  # The cost of the next stage.

    def advance(self, until: int, work: int) -> Tensor | None:
        """Compute until the share `until` / `work` of the pass is done. After the last stage, return the
        features as `encode` does. Before that, return None.
        """
        while until >= work or (self._done + self._next) * work <= until * self._total:
            self._done += self._next
            report_step()
            try:
                self._next = next(self._stages)
            except StopIteration as end:
                features: Tensor = end.value
                return features
        return None

    def _compute(self, pixels: Tensor, grid: tuple[int, int, int]) -> Generator[int, None, Tensor]:
        """Compute the stages of the pass. Yields the cost of each stage before it runs, and returns the
        features after the last stage.
        """
        tower, costs, count = self._tower, self._costs, len(pixels)
        tables = tower.frames_of([grid])
        hidden, cos, sin = (
            torch.cat([getattr(frame, name) for frame in tables]) for name in ("positions", "cos", "sin")
        )
        pack = Rotation(cos, sin, [len(frame.cos) for frame in tables])
        del tables
        for rows in _tiles(count, TILE):
            yield costs.embedding * (rows.stop - rows.start)
            tower.embed_patches(pixels[rows], hidden[rows])
        qkv = hidden.new_empty(count, 3 * hidden.shape[1])
        taps = []
        for index, block in enumerate(tower.blocks):
            for rows in _tiles(count, TILE):
                yield costs.before * (rows.stop - rows.start)
                _into(qkv[rows], block.qkv, block.norm1(hidden[rows]))
                if not tower.has_kernels:
                    qkv[rows] = rotated(qkv[rows], tower.config.num_heads, cos[rows], sin[rows])
            for rows in _tiles(count, TILE):
                yield (costs.behind + self._attention) * (rows.stop - rows.start)
                mixed = tower.attend_rows(qkv, pack, rows)
                tower.finish_block(block, mixed, hidden[rows])
            if index in tower.taps:
                taps.append((yield from self._merge(tower.taps[index], hidden)))
        merged = yield from self._merge(tower.merger, hidden)
        return torch.cat([merged, *taps], dim=-1)

    def _merge(self, merger: Merger, hidden: Tensor) -> Generator[int, None, Tensor]:
        parts = []
        for rows in _tiles(len(hidden), TILE - TILE % self._tower.config.merge_size**2):
            yield self._costs.merger * (rows.stop - rows.start)
            parts.append(self._tower.merge(merger, hidden[rows]))
        return torch.cat(parts)


def _tiles(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def _into(out: Tensor, linear: Linear, x: Tensor) -> None:
    y = linear(x, out=out)
    if y is not out:
        out.copy_(y)
