"""Computes how many KV blocks fit into a device's memory. If too few fit, the error shows the
calculation.

    total - taken (weights, other programs) - step peak - graphs - recurrent states - LoRA adapters - reserve
        = encoder cache + KV blocks

The step peak is the larger of the encoder's peak and the layers' peak, because the encoder's memory is free
again when the layers run. Graphs are captured last and have their own memory. The reserve is for memory that
the measured passes do not show: workspaces, penalty counts, the driver's memory for graphs, fragmentation.
"""

from dataclasses import dataclass

from mmengine.errors import ConfigError
from mmengine.runtime.kv.pool import MIN_BLOCKS

GIB = 2**30
CACHE_PART = 20  # by default the encoder cache gets 1 / CACHE_PART of the remaining memory
MOST_CACHED = 2**17  # maximum size of the default encoder cache, in embeddings: 128 images with 1,024 each


@dataclass(frozen=True, slots=True)
class Memory:
    """A device's memory, in bytes.

    `taken`: memory in use after the weights were loaded. `layers`, `encoder`: both passes' peaks in
    the largest step. `features`: the full encoder cache. `states`: the full pool for recurrent states.
    `adapters`: all LoRA adapters that may be on the device at once. `cache_setting`: the setting that limits
    the encoder cache.
    """

    total: int
    taken: int
    layers: int = 0
    encoder: int = 0
    features: int = 0
    states: int = 0
    adapters: int = 0
    reserve: int = 0
    graphs: int = 0
    cache_setting: str = "encoder_cache_size"

    @property
    def left(self) -> int:
        """How many bytes are left for the KV pool. If `features` is 0, the KV pool shares these bytes with
        the encoder cache. Negative if the parts other than the KV pool do not fit.
        """
        needed = max(self.layers, self.encoder) + self.graphs + self.features + self.states + self.reserve
        needed += self.adapters
        return self.total - self.taken - needed

    def __str__(self) -> str:
        parts = (
            ("taken, with the weights", self.taken),
            ("the peak of a step", max(self.layers, self.encoder)),
            ("graphs", self.graphs),
            ("the encoder cache", self.features),
            ("recurrent states", self.states),
            ("adapters", self.adapters),
            ("reserve", self.reserve),
        )
        sums = "".join(f" - {_gib(size)} ({name})" for name, size in parts if size)
        return f"{_gib(self.total)}{sums} = {_gib(self.left)} GiB"

    def blocks(self, block_bytes: int, least: int) -> int:
        """Return how many KV blocks fit, including the dummy block.

        Raises ConfigError if fewer than `least` blocks fit.
        """
        count = max(0, self.left) // block_bytes
        if count < max(MIN_BLOCKS, least):
            raise ConfigError(self._refusal(max(MIN_BLOCKS, least), block_bytes))
        return count

    def check(self, num_blocks: int, block_bytes: int) -> None:
        """Raise ConfigError if `num_blocks` blocks do not fit."""
        if num_blocks * block_bytes > self.left:
            raise ConfigError(self._refusal(num_blocks, block_bytes))

    def _refusal(self, num_blocks: int, block_bytes: int) -> str:
        return (
            f"the KV cache does not fit: {num_blocks} blocks of {block_bytes:,} bytes are "
            f"{_gib(num_blocks * block_bytes)} GiB, and {self} are left for them; lower num_blocks or "
            f"max_model_len{self._largest()}, or use more GPUs (tensor_parallel)"
        )

    def _largest(self) -> str:
        """Return ", or NAME", where the setting NAME reduces the largest part except the weights. Returns ""
        if all these parts are 0.
        """
        settings = (
            ("token_budget", self.layers if self.layers >= self.encoder else 0),
            ("encoder_budget", self.encoder if self.encoder > self.layers else 0),
            (self.cache_setting, self.features),
            ("max_num_seqs", self.graphs),
            ("num_state_slots", self.states),
            ("lora_bytes", self.adapters),
        )
        name, size = max(settings, key=lambda setting: setting[1])
        return f", or {name}" if size else ""


def cached_embeds(left: int, embed_bytes: int, kv_bytes: int, *, least: int, wanted: int) -> int:
    """Return the encoder cache's default size, in embeddings. It shares `left` bytes with the KV pool.

    The cache gets `left` / CACHE_PART bytes, at most MOST_CACHED embeddings, but at least `wanted`
    embeddings. The KV pool keeps at least half the bytes, and at least `kv_bytes`. In any case the cache has
    room for `least` embeddings, because otherwise the largest item could never be encoded.
    """
    share = min(left // CACHE_PART // embed_bytes, MOST_CACHED)
    room = min(left // 2, left - kv_bytes) // embed_bytes
    return max(least, min(max(share, wanted), room))


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"
