"""What a device has room for: pure arithmetic, and the sentence that shows it where something does not fit.

    memory - what is taken (weights, other programs) - peak of a step - encoder cache - reserve = KV blocks

A step's peak is that of its two passes which needs more, because the encoder's memory is free again when the
layers run. The reserve is for what no pass shows: workspaces, graphs, gaps between pieces.
"""

from dataclasses import dataclass

from mmengine.errors import ConfigError
from mmengine.runtime.kv import MIN_BLOCKS

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one device: `total`; `taken` with the weights in it; `layers` and `encoder`: peaks of the two
    passes of the largest step; `features`: the encoder cache when it is full; `reserve`."""

    total: int
    taken: int
    layers: int = 0
    encoder: int = 0
    features: int = 0
    reserve: int = 0

    @property
    def left(self) -> int:
        """For the KV pool; negative where the rest does not fit by itself."""
        return self.total - self.taken - max(self.layers, self.encoder) - self.features - self.reserve

    def __str__(self) -> str:
        parts = (
            ("taken, with the weights", self.taken),
            ("the peak of a step", max(self.layers, self.encoder)),
            ("the encoder cache", self.features),
            ("reserve", self.reserve),
        )
        sums = "".join(f" - {_gib(size)} ({name})" for name, size in parts if size)
        return f"{_gib(self.total)}{sums} = {_gib(self.left)} GiB"

    def blocks(self, block_bytes: int, least: int) -> int:
        """KV blocks that fit, the dummy among them. Raises ConfigError where they are fewer than `least`."""
        count = max(0, self.left) // block_bytes
        if count < max(MIN_BLOCKS, least):
            raise ConfigError(self._refusal(max(MIN_BLOCKS, least), block_bytes))
        return count

    def check(self, num_blocks: int, block_bytes: int) -> None:
        """Raise ConfigError where so many blocks do not fit."""
        if num_blocks * block_bytes > self.left:
            raise ConfigError(self._refusal(num_blocks, block_bytes))

    def _refusal(self, num_blocks: int, block_bytes: int) -> str:
        return (
            f"the KV cache does not fit: {num_blocks} blocks of {block_bytes:,} bytes are "
            f"{_gib(num_blocks * block_bytes)} GiB, and {self} are left for them; lower num_blocks or "
            f"max_model_len{self._largest()}, or cut the model over more GPUs (tensor_parallel)"
        )

    def _largest(self) -> str:
        """Which setting makes the largest part but the weights smaller."""
        settings = {
            "token_budget": self.layers if self.layers >= self.encoder else 0,
            "encoder_budget": self.encoder if self.encoder > self.layers else 0,
            "encoder_cache_size": self.features,
        }
        name = max(settings, key=lambda each: settings[each])
        return f", or {name}" if settings[name] else ""


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"
