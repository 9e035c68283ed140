"""The messages that carry KV events, in vLLM's format, which Dynamo and llm-d read.

A batch is a msgpack array [ts, events, rank], and an event is a map with a `type`. A field is left out if its
value equals the default. Hashes are 64-bit integers. Source of the format: vLLM 0.33,
vllm/distributed/kv_events.py.
"""

from typing import TypeAlias

import msgspec

DEVICE = "GPU"  # The storage tier of blocks that a step can read. The name is the same on a CPU.
# Maximum number of blocks in a BlockStored event. Consumers decode an event as a whole, so events must stay
# small.
MAX_EVENT_BLOCKS = 4096
# Further inputs to a block's hash: an adapter's name, (media id, the item's start relative to the block's
# start), and SALT followed by a cache salt.
ExtraKeys: TypeAlias = list[tuple[str, int] | str]
SALT = "dynamo-cache-salt:"


def media_id_of(mm_hash: bytes) -> str:
    """Return the name of an image or video: 64 hex digits, as in vLLM.

    The last 48 digits are zero. Dynamo's router requires these zeros (ai-dynamo-runtime 1.6,
    kv-router/zmq_wire/extra_keys.rs).
    """
    return mm_hash[:8].hex() + "0" * 48


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Announces blocks that can be prefix cache hits from now on. Each block follows the preceding block, and
    the first block follows `parent_block_hash`.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]  # The tokens of all blocks, concatenated.
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[ExtraKeys | None] | None = None  # An entry for each block.


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """Announces that these blocks can no longer be hit."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """Announces that no block can be hit any more."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True):
    """A batch of events. `ts`: seconds since 1970. `data_parallel_rank` is always 0."""

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int = 0


_encoder = msgspec.msgpack.Encoder()


def packed(batch: EventBatch) -> bytes:
    return _encoder.encode(batch)
