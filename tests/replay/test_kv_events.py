"""Tests the KV events exported from a log. A test router decodes the events with vLLM's schema."""

import msgspec
import numpy as np
import pytest

from mmengine.core.continuation import open_log
from mmengine.core.resume import Resume
from mmengine.core.state.block_digest import event_hash, prompt_digests
from mmengine.core.state.prefix_index import NO_CONTENT
from mmengine.events.log import LogWriter
from mmengine.replay.kv_events.batches import batches
from mmengine.replay.kv_events.wire import SALT
from mmengine.simulation.simulated_executor import SimulatedExecutor
from tests.core.small_engine import Bench, image, request, video
from tests.log_copies import copied

# These classes repeat the schema of vLLM 0.33, vllm/distributed/kv_events.py.
Hash = int | bytes


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, forbid_unknown_fields=True):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[list | str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, forbid_unknown_fields=True):
    block_hashes: list[Hash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    pass


class KVEventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None


decoder = msgspec.msgpack.Decoder(KVEventBatch)


class Router:
    """A router's view of an engine: maps each block hash to the tokens up to the block's end."""

    def __init__(self):
        self.texts: dict[int, tuple[int, ...]] = {}
        self.stored: list[BlockStored] = []

    def hear(self, payload: bytes) -> None:
        for event in decoder.decode(payload).events:
            match event:
                case AllBlocksCleared():
                    self.texts.clear()
                case BlockRemoved(block_hashes=hashes):
                    for each in hashes:
                        # Raises KeyError if the block is not stored.
                        del self.texts[each]
                case BlockStored():
                    self._store(event)

    def _store(self, event: BlockStored) -> None:
        self.stored.append(event)
        assert len(event.token_ids) == event.block_size * len(event.block_hashes)
        assert len(event.extra_keys) == len(event.block_hashes)
        before = () if event.parent_block_hash is None else self.texts[event.parent_block_hash]
        for number, name in enumerate(event.block_hashes):
            own = event.token_ids[number * event.block_size : (number + 1) * event.block_size]
            assert name not in self.texts and 0 <= name < 2**64
            before = self.texts[name] = (*before, *own)


def heard(folder) -> Router:
    router = Router()
    for number, batch in enumerate(batches(folder)):
        assert batch.seq == number
        router.hear(batch.payload)
    return router


def ran(folder, *requests, **settings) -> Bench:
    bench = Bench(sink=LogWriter(folder), **settings)
    bench.new_events = list  # Bench.new_events requires a MemoryLog.
    for one in requests:
        bench.submit(one)
        bench.run()
    bench.core.close()
    return bench


def prompt(*numbers: int) -> list[int]:
    return [1000 + number for number in numbers for _ in range(4)]


def test_router_blocks_equal_cached_blocks(tmp_path):
    rng = np.random.default_rng(5)
    requests = [
        request(f"r{n}", prompt(*rng.integers(0, 3, rng.integers(1, 9))), max_tokens=int(rng.integers(1, 9)))
        for n in range(20)
    ]
    bench = ran(tmp_path, *requests, num_blocks=17, max_model_len=48)
    router, index = heard(tmp_path), bench.state.blocks.index
    held = np.flatnonzero(index.content != NO_CONTENT)
    assert len(router.texts) == len(set(index.content[held].tolist())) > 8
    assert sorted(text[-4:] for text in router.texts.values()) == sorted(
        map(tuple, index.tokens_of(held[np.unique(index.content[held], return_index=True)[1]]).tolist())
    )


def test_block_hashes_depend_on_content_media_and_salt_only(tmp_path):
    media = [image(7, 4, 8)]
    same = request("a", prompt(*range(6)), media=media)
    one, other = tmp_path / "one", tmp_path / "other"
    ran(one, request("x", 9), same)
    ran(other, request("y", 30), request("z", 17), same)
    both = heard(one).texts.keys() & heard(other).texts.keys()
    assert {event_hash(digest) for digest in prompt_digests(same, same.prompt_token_ids, 4)} <= both
    names = set()
    for number, own in enumerate(([image(8, 4, 8)], [image(7, 5, 8)], [video(7, (4, 4), (9, 4))], [])):
        for salt in ("", "tenant"):
            another = request("a", prompt(*range(6)), media=own, cache_salt=salt)
            ran(tmp_path / f"{number}{salt}", another)
            names |= {list(heard(tmp_path / f"{number}{salt}").texts)[3]}
    assert len(names) == 8 and not names & both


def test_extra_keys_hold_media_and_salt(tmp_path):
    media = [image(7, 2, 4), image(8, 10, 3)]
    ran(tmp_path, request("a", prompt(*range(4)), media=media, cache_salt="tenant"), request("b", 12))
    (first, *_, last) = [event for event in heard(tmp_path).stored if len(event.block_hashes) > 2]
    one, other = (item.mm_hash.hex()[:16] + "0" * 48 for item in media)
    assert first.extra_keys[:4] == [[[one, 2], SALT + "tenant"], [[one, -2]], [[other, 2]], [[other, -2]]]
    assert last.extra_keys == [None] * len(last.block_hashes)


def test_blocks_are_stored_after_their_step_and_removed_after_a_failed_step(tmp_path):
    bench = Bench(sink=LogWriter(tmp_path), fault=lambda step: "broke" if step == 0 else None)
    bench.new_events = list
    bench.submit(request("a", 12, max_tokens=3))
    told = []
    while bench.core.has_work:
        bench.step()
        told.append(len(heard(tmp_path).texts))
    bench.core.close()
    # Step 0 is scheduled, fails, and is scheduled again. The fourth block is never full.
    assert told[:3] == [0, 0, 3] and set(told[2:]) == {3}


def test_a_resumed_log_continues_the_count_and_clears_lost_blocks(tmp_path):
    log = tmp_path / "log"
    bench = Bench(sink=LogWriter(log))
    bench.new_events = list
    bench.submit(request("a", 12, max_tokens=9))
    for _ in range(4):
        bench.step()
    bench.core.sync()
    before = list(batches(log))
    copied(log, tmp_path / "next")
    opened = open_log(tmp_path / "next", Resume(), bench.config)
    core = opened.core(bench.config, SimulatedExecutor(bench.config), {})
    core.recover(opened.resumed.recovered(()))
    while core.has_work:
        core.step()
    core.close()
    after = list(batches(tmp_path / "next"))
    assert after[: len(before)] == before
    cleared = decoder.decode(after[len(before)].payload).events
    assert [type(event) for event in cleared] == [AllBlocksCleared]
    assert len(heard(tmp_path / "next").texts) == 5
    bench.core.sink.close()


def test_a_reset_clears_all(tmp_path):
    bench = Bench(sink=LogWriter(tmp_path))
    bench.new_events = list
    bench.submit(request("a", 12, max_tokens=3))
    bench.run()
    bench.core.reset_prefix_cache()
    bench.core.step()
    bench.core.close()
    assert heard(tmp_path).texts == {}


@pytest.mark.parametrize("first", [0, 2])
def test_later_batches_equal_the_full_export(tmp_path, first):
    ran(tmp_path, request("a", 12), request("b", 20))
    whole = list(batches(tmp_path))
    assert [batch for batch in batches(tmp_path, until=4) if batch.seq >= first] == whole[first:4]
