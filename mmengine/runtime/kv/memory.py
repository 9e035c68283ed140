"""Compute what fits into a device's memory, and explain in a sentence what does not.

    memory - what is taken (weights, other programs) - peak of a step - graphs - reserve = what is left
    what is left = encoder cache + KV blocks

A step's peak is its larger pass, because the encoder's memory is free again when the layers run.
Graphs are captured last, and use their own memory. The reserve covers everything that no pass shows:
workspaces, penalty counts, the driver's memory for graphs, fragmentation.
"""

from dataclasses import dataclass

from mmengine.errors import ConfigError
from mmengine.runtime.kv.pool import MIN_BLOCKS

GIB = 2**30
CACHE_PART = 20  # the encoder cache gets 1 / CACHE_PART of the remaining memory
MOST_CACHED = 2**17  # most embeddings by default: 128 images of 1,024


@dataclass(frozen=True, slots=True)
class Memory:
    """A device's memory in bytes.

    `total`; `taken` with the weights loaded; `layers` and `encoder`: peaks for the two passes in the largest
    step; `features`: the full encoder cache; `states`: the full state pool; `adapters`: all
    LoRA adapters that may be resident; `reserve`; `graphs`. `cache_setting`: the setting that shrinks the
    encoder cache.
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
        """Bytes for the KV pool, and for the encoder cache if `features` is 0; negative if even the rest does
        not fit.
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
        """Return how many KV blocks fit, including the dummy block. Raises ConfigError for fewer than
        `least`.
        """
        count = max(0, self.left) // block_bytes
        if count < max(MIN_BLOCKS, least):
            raise ConfigError(self._refusal(max(MIN_BLOCKS, least), block_bytes))
        return count

    def check(self, num_blocks: int, block_bytes: int) -> None:
        """Raise ConfigError if so many blocks do not fit."""
        if num_blocks * block_bytes > self.left:
            raise ConfigError(self._refusal(num_blocks, block_bytes))

    def _refusal(self, num_blocks: int, block_bytes: int) -> str:
        return (
            f"the KV cache does not fit: {num_blocks} blocks of {block_bytes:,} bytes are "
            f"{_gib(num_blocks * block_bytes)} GiB, and {self} are left for them; lower num_blocks or "
            f"max_model_len{self._largest()}, or cut the model over more GPUs (tensor_parallel)"
        )

    def _largest(self) -> str:
        """Return the setting that shrinks the largest part apart from the weights."""
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
    """Return the default embedding count for the encoder cache, given `left` bytes for the cache and the
    KV pool.

    The cache gets 1 / CACHE_PART, up to MOST_CACHED embeddings, or `wanted` if that is more. The KV
    pool keeps at least half, and at least `kv_bytes`. The cache always has `least` embeddings, for the
    largest item, which could never be encoded otherwise.
    """
    share = min(left // CACHE_PART // embed_bytes, MOST_CACHED)
    room = min(left // 2, left - kv_bytes) // embed_bytes
    return max(least, min(max(share, wanted), room))


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"
