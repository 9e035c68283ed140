"""What a device has room for: pure arithmetic, and the sentence that shows it where something does not fit.

    memory - what is taken (weights, other programs) - peak of a step - graphs - reserve = what is left
    what is left = encoder cache + KV blocks

A step's peak is that of its two passes which needs more, because the encoder's memory is free again when the
layers run. Graphs are captured when the rest is there, and have memory of their own. The reserve is for what
no pass shows: workspaces, the counts of penalties, what the driver keeps of graphs, gaps between pieces.
"""

from dataclasses import dataclass

from mmengine.errors import ConfigError
from mmengine.runtime.kv.pool import MIN_BLOCKS

GIB = 2**30
CACHE_PART = 20  # of what is left, one part in so many is the encoder cache
MOST_CACHED = 2**17  # embeddings that it is given by itself: those of 128 images of 1,024


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one device: `total`; `taken` with the weights in it; `layers` and `encoder`: peaks of the two
    passes of the largest step; `features`: the encoder cache when it is full; `states`: the pool of
    recurrent states likewise; `adapters`: all of LoRA that may be there; `reserve`; `graphs`.
    `cache_setting`: which setting makes the encoder cache smaller."""

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
        """For the KV pool, and for the encoder cache where `features` is 0; negative where the rest does not
        fit by itself."""
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
    """Embeddings for the encoder cache, where nobody says how many, of `left` bytes for it and the KV pool.

    One part in CACHE_PART, up to MOST_CACHED, and `wanted` where that is more; not so many that the KV pool
    has less than half, or less than `kv_bytes`. But always `least`, the largest item: it could never be
    encoded else.
    """
    share = min(left // CACHE_PART // embed_bytes, MOST_CACHED)
    room = min(left // 2, left - kv_bytes) // embed_bytes
    return max(least, min(max(share, wanted), room))


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"
