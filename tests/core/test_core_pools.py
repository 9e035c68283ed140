"""Compares the free list, the block pool and the encoder cache with simple models."""

from collections import OrderedDict, deque

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mmengine.core.state.blocks import BlockPool, block_extras
from mmengine.core.state.free_list import FreeList
from mmengine.core.state.prefix_index import ROOT
from mmengine.encoder_cache.cache import EncoderCache, encoder_key
from tests.core.small_engine import image, request, video

DRAWS = st.lists(
    st.tuples(st.sampled_from(["next", "any", "front", "back", "peek"]), st.integers(1, 6), st.randoms()),
    max_size=120,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(DRAWS)
def test_free_list_against_a_deque(operations):
    size = 14
    free_list, line, used = FreeList(size), deque(range(1, size)), []
    for kind, count, rng in operations:
        if kind in ("next", "any", "peek"):
            count = min(count, len(line))
            chosen = list(line)[:count] if kind != "any" else rng.sample(list(line), count)
            assert kind == "any" or free_list.peek(count).tolist() == chosen
            if kind != "peek":
                free_list.take(np.array(chosen, np.int32))
                for block in chosen:
                    line.remove(block)
                used += chosen
        else:
            chosen = [used.pop(rng.randrange(len(used))) for _ in range(min(count, len(used)))]
            blocks = np.array(chosen, np.int32)
            if kind == "front":
                free_list.give_front(blocks)
                line.extendleft(chosen)
            else:
                free_list.give_back(blocks)
                line.extend(chosen)
        assert free_list.order().tolist() == list(line)
        assert free_list.num_free == len(line)


def test_free_list_through_many_rounds():
    """3,000 rounds make the free list compact its arrays several times."""
    rng = np.random.default_rng(3)
    free_list, line = FreeList(40), deque(range(1, 40))
    for _ in range(3000):
        taken = rng.permutation(np.array(line))[: rng.integers(0, 20)].astype(np.int32)
        free_list.take(taken)
        for block in taken.tolist():
            line.remove(block)
        split = int(rng.integers(0, len(taken) + 1))
        free_list.give_front(taken[:split])
        free_list.give_back(taken[split:])
        line.extendleft(taken[:split].tolist())
        line.extend(taken[split:].tolist())
        count = int(rng.integers(0, 39))
        assert free_list.peek(count).tolist() == list(line)[:count]
    assert free_list.order().tolist() == list(line)


def fill(pool, *blocks):
    """Record a content for each block. Each block is the parent of the next."""
    parent = ROOT
    for block in blocks:
        tokens = np.full(pool.block_size, block, np.int32)
        part = int(pool.index.token_parts(tokens[None])[0])
        parent = pool.index.insert(block, parent, part, tokens, b"")


def test_blocks_without_content_go_first_then_the_tail_of_the_longest_unused():
    pool = BlockPool(9, 2, 2)
    pool.take_new(np.array([1, 2, 3]))
    pool.take_new(np.array([4, 5, 6]))
    fill(pool, 1, 2)
    fill(pool, 4, 5)
    pool.release(np.array([1, 2, 3]))
    pool.release(np.array([4, 5, 6]))
    assert pool.free_list.order().tolist() == [6, 3, 7, 8, 2, 1, 5, 4]
    pool.share(np.array([1]))
    assert pool.free_list.order().tolist() == [6, 3, 7, 8, 2, 5, 4] and pool.references[1] == 1
    pool.share(np.array([1]))
    pool.release(np.array([1]))
    assert 1 not in pool.free_list.order().tolist(), "block 1 still has a reference"
    pool.release(np.array([1]))
    assert pool.free_list.order().tolist()[-1] == 1


def test_a_block_taken_anew_is_no_hit_any_more():
    pool = BlockPool(4, 2, 2)
    pool.take_new(np.array([1]))
    fill(pool, 1)
    pool.release(np.array([1]))
    assert pool.index.content[1] > ROOT
    pool.take_new(np.array([1]))
    assert pool.index.content[1] == -1 and pool.references[1] == 1


def test_block_extras_distinguish_equal_tokens():
    plain = request("p", 16)
    assert block_extras(plain, 0, 4, 4) == {}
    one = block_extras(request("a", 16, media=[image(1, 5, 4)]), 0, 4, 4)
    assert set(one) == {1, 2}
    assert block_extras(request("b", 16, media=[image(1, 5, 4)]), 0, 4, 4) == one
    moved = block_extras(request("c", 16, media=[image(1, 6, 4)]), 0, 4, 4)
    other = block_extras(request("d", 16, media=[image(2, 5, 4)]), 0, 4, 4)
    assert not set(one.values()) & set(moved.values()) and not set(one.values()) & set(other.values())
    assert set(block_extras(request("e", 16, cache_salt="x"), 0, 4, 4)) == {0}
    salted = block_extras(request("f", 16, media=[image(1, 1, 2)], cache_salt="x"), 0, 4, 4)
    unsalted = block_extras(request("g", 16, media=[image(1, 1, 2)]), 0, 4, 4)
    assert salted[0] != unsalted[0]
    assert set(block_extras(request("h", 16, media=[image(1, 5, 4)]), 0, 2, 4)) == {1}, (
        "block 2 is not asked for"
    )
    assert block_extras(request("a", 16, media=[image(1, 5, 4)]), 2, 4, 4) == {2: one[2]}
    assert block_extras(request("e", 16, cache_salt="x"), 1, 4, 4) == {}
    both = block_extras(request("i", 8, media=[image(1, 0, 2), image(2, 2, 2)]), 0, 2, 4)
    swapped = block_extras(request("j", 8, media=[image(2, 0, 2), image(1, 2, 2)]), 0, 2, 4)
    assert both[0] != swapped[0]
    between = block_extras(request("k", 16, media=[video(1, (1, 2), (9, 2))]), 0, 4, 4)
    assert set(between) == {0, 2}, "block 1 holds only text between the runs, so it has no extra"


class CacheModel:
    """A simple model of the encoder cache. `held`: key -> (size, references). `idle`: unreferenced entries in
    the order in which they became unreferenced.
    """

    def __init__(self, capacity):
        self.capacity, self.held, self.idle = capacity, {}, OrderedDict()

    @property
    def used(self):
        return sum(size for size, _ in self.held.values()) + sum(self.idle.values())

    def victims(self, size, keep):
        gone, room = [], self.capacity - self.used
        for key, idle_size in self.idle.items():
            if room >= size:
                break
            if key not in keep:
                gone.append(key)
                room += idle_size
        return gone if room >= size else None


CACHE_DRAWS = st.lists(
    st.tuples(
        st.sampled_from(["need", "need", "release", "fail"]),
        st.integers(0, 5),
        st.sets(st.integers(0, 5), max_size=2),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(CACHE_DRAWS)
def test_encoder_cache_against_a_model(operations):
    cache, model, broken = EncoderCache(10), CacheModel(10), set()
    for kind, number, others in operations:
        key, size, keep = bytes([number]), 1 + number, {bytes([other]) for other in others}
        known = key in model.held or key in model.idle
        if kind == "need" and key not in broken:
            assert cache.has(key) == known
            if not known:
                victims = model.victims(size, keep)
                assert cache.evictions_for(size, keep, 0) == victims
                if victims is None:
                    continue
                for victim in victims:
                    cache.evict(victim)
                    del model.idle[victim]
                cache.add(key, size)
            else:
                model.idle.pop(key, None)
            cache.reference(key)
            model.held[key] = size, model.held.get(key, (0, 0))[1] + 1
        elif kind == "release" and key in model.held:
            cache.release(key)
            count = model.held[key][1] - 1
            model.held[key] = size, count
            if not count:
                del model.held[key]
                if key not in broken:
                    model.idle[key] = size
                broken.discard(key)
        elif kind == "fail" and known and key not in broken:
            cache.invalidate(key)
            assert not cache.has(key)
            if key in model.held:
                broken.add(key)
            else:
                del model.idle[key]
        assert cache.used == model.used <= cache.capacity
        assert list(cache.idle) == list(model.idle)
        assert cache.idle_size == sum(model.idle.values())
        assert set(cache.entries) == set(model.held) | set(model.idle)


def test_entries_about_to_be_used_are_not_evicted():
    cache = EncoderCache(4)
    for key in (b"a", b"b"):
        cache.add(key, 2)
    assert cache.evictions_for(2, set(), 0) == [b"a"]
    assert cache.evictions_for(2, {b"a"}, 0) == [b"b"]
    assert cache.evictions_for(2, {b"a", b"b"}, 0) is None
    assert cache.evictions_for(2, set(), 2) == [b"a", b"b"], "another 2 are about to be added"
    assert cache.evictions_for(5, set(), 0) is None


def test_dropped_entries_are_reported_once():
    cache = EncoderCache(8)
    cache.add(b"held", 2)
    cache.reference(b"held")
    cache.add(b"idle", 2)
    cache.invalidate(b"idle")
    cache.invalidate(b"held")
    assert cache.dropped == [b"idle"] and cache.used == 2
    cache.release(b"held")
    assert cache.dropped == [b"idle", b"held"] and cache.used == 0 and not cache.entries


def test_tenants_have_keys_of_their_own():
    assert encoder_key(b"h" * 32, "") == b"h" * 32
    keys = {encoder_key(b"h" * 32, salt) for salt in ("", "a", "b")}
    assert len(keys) == 3 and all(len(key) == 32 for key in keys)
