"""Computes the number of KV blocks that fit into a device's memory.

    total - taken (weights, other programs) - step peak - graphs - recurrent states - LoRA adapters - reserve
        = encoder cache + KV blocks

The step peak is the larger of the encoder's peak and the layers' peak, because the encoder and the layers
never run at the same time. CUDA graphs have separate memory. The reserve is for memory outside the measured
passes: workspaces, penalty counts, the driver's memory for graphs, and fragmentation.
"""

from dataclasses import dataclass

from mmengine.errors import ConfigError
from mmengine.runtime.kv.pool import MIN_BLOCKS

GIB = 2**30
CACHE_PART = 20  # the encoder cache's default size is 1 / CACHE_PART of the remaining memory
MOST_CACHED = 2**17  # maximum default size in embeddings: 128 images with 1,024 each


@dataclass(frozen=True, slots=True)
class Memory:
    """A device's memory, in bytes.

    `taken`: memory in use after loading the weights. `layers`, `encoder`: the peaks during the layers' pass
    and the encoder's pass in the largest step. `features`: the full encoder cache. `states`: the pool for
    recurrent states. `adapters`: maximum memory for LoRA adapters. `cache_setting`: name of the setting that
    limits the encoder cache.
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
        """The bytes that remain for the KV pool, or for the KV pool and the encoder cache if `features` is 0.
        Negative if everything else already exceeds the memory.
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
        """Return the number of KV blocks that fit, including the dummy block.

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
        """Return the text ", or NAME" for an error. NAME is the setting that reduces the largest amount.
        Return "" if all amounts are 0. The weights do not count.
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
    """Return the encoder cache's default size, in embeddings. The encoder cache and the KV pool share `left`
    bytes.

    The cache gets `left` / CACHE_PART bytes, at most MOST_CACHED embeddings, but at least `wanted`
    embeddings. The KV pool keeps at least half the bytes, and at least `kv_bytes`. However, the result is
    never less than `least`, the largest media item's embeddings, even if the KV pool then gets less.
    """
    share = min(left // CACHE_PART // embed_bytes, MOST_CACHED)
    room = min(left // 2, left - kv_bytes) // embed_bytes
    return max(least, min(max(share, wanted), room))


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"
