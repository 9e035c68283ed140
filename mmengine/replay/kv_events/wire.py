"""KV events on the wire, in vLLM's format, which Dynamo and llm-d read.

A batch is a msgpack array [ts, events, rank]; an event is a map with a `type`. Fields without a default are
always present; the other fields only if they have a value. Taken from vLLM 0.33,
vllm/distributed/kv_events.py. Hashes are 64-bit integers.
"""

from typing import TypeAlias

import msgspec

DEVICE = "GPU"  # The tier of blocks that a step can read, on any device.
# Maximum number of blocks in a BlockStored, because a consumer reads an event as a whole.
MAX_EVENT_BLOCKS = 4096
# An entry for each property of a block beside its tokens: an adapter's name, [media id, offset of the item's
# beginning from the block's], or SALT and a tenant's salt.
ExtraKeys: TypeAlias = list[tuple[str, int] | str]
SALT = "dynamo-cache-salt:"


def media_id_of(mm_hash: bytes) -> str:
    """Return an image's or video's name: 64 hex digits, as in vLLM.

    Only the first 16 digits carry information. Dynamo's router matches an id only if all others are zero
    (ai-dynamo-runtime 1.6, kv-router/zmq_wire/extra_keys.rs).
    """
    return mm_hash[:8].hex() + "0" * 48


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Says that a chain of blocks can be hit from now on. The first block follows `parent_block_hash`."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]  # The tokens of all blocks, concatenated.
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[ExtraKeys | None] | None = None  # An entry per block.


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """Says that these blocks can no longer be hit."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """Says that no block can be hit any more."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True):
    """A batch. `ts` is in seconds since 1970. `data_parallel_rank` is 0, because engines are not numbered
    here.
    """

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int = 0


_encoder = msgspec.msgpack.Encoder()


def packed(batch: EventBatch) -> bytes:
    return _encoder.encode(batch)
