"""The form of KV events on the wire: vLLM's, which Dynamo and llm-d read.

A batch is a msgpack array [ts, events, rank], an event a map that its `type` tells apart. Fields without a
default are always there, the others only where they say something. Read in vLLM 0.33,
vllm/distributed/kv_events.py. Hashes are 64-bit integers.
"""

from typing import TypeAlias

import msgspec

DEVICE = "GPU"  # the tier of blocks that a step can read, whatever the device is
MAX_EVENT_BLOCKS = 4096  # of one BlockStored, which a consumer reads at once
# One for each thing that tokens alone do not say: [media id, offset of its beginning against the block's], or
# a tenant's salt behind SALT.
ExtraKeys: TypeAlias = list[tuple[str, int] | str]
SALT = "dynamo-cache-salt:"


def media_id_of(mm_hash: bytes) -> str:
    """The name of an image or video: 64 hex digits, as vLLM's are. Only the first 16 say something, because
    Dynamo's index takes an id for one that its router may match when the others are zeros (ai-dynamo-runtime
    1.6, kv-router/zmq_wire/extra_keys.rs)."""
    return mm_hash[:8].hex() + "0" * 48


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """A chain of blocks can be hit from now on, the first of them behind `parent_block_hash`."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]  # of all of them
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[ExtraKeys | None] | None = None  # by block


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """They cannot be hit any more."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """Nothing can be hit."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True):
    """`ts`: seconds since 1970. `data_parallel_rank`: engines are not numbered here, so 0."""

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int = 0


_encoder = msgspec.msgpack.Encoder()


def packed(batch: EventBatch) -> bytes:
    return _encoder.encode(batch)
