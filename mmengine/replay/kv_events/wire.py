"""KV events on the wire, in vLLM's format, which Dynamo and llm-d read.

A batch is a msgpack array [ts, events, rank]; an event is a map with a `type`. Fields without a default are
always present, the others only with a value. Taken from vLLM 0.33, vllm/distributed/kv_events.py. Hashes are
64-bit integers.
"""

from typing import TypeAlias

import msgspec

DEVICE = "GPU"  # The tier of blocks that a step can read, on any device.
MAX_EVENT_BLOCKS = 4096  # Most blocks in a BlockStored, which a consumer reads at once.
# An entry for each property beyond the tokens: [media id, offset of its beginning from the block's], or a
# tenant's salt after SALT.
ExtraKeys: TypeAlias = list[tuple[str, int] | str]
SALT = "dynamo-cache-salt:"


def media_id_of(mm_hash: bytes) -> str:
    """Return an image's or video's name: 64 hex digits, as in vLLM.

    Only the first 16 carry information. With zeros in the others, Dynamo's index accepts an id as one that
    its router may match (ai-dynamo-runtime 1.6, kv-router/zmq_wire/extra_keys.rs).
    """
    return mm_hash[:8].hex() + "0" * 48


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """A chain of blocks can be hit from now on; the first follows `parent_block_hash`."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]  # The tokens in all blocks.
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[ExtraKeys | None] | None = None  # By block.


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """These blocks can no longer be hit."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """No block can be hit any more."""


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
