"""Tests of FeatureStore (put, drop and place) against a dict of tensors."""

import numpy as np
import pytest
import torch

from mmengine.core.executor import MediaSpan
from mmengine.errors import ConfigError, ExecutorFailed
from mmengine.runtime.features import FeatureStore

HIDDEN, DEEP = 6, 2


def features_of(size, generator):
    return torch.randn(size, (1 + DEEP) * HIDDEN, generator=generator)


def placed_one_by_one(held, spans, embeds):
    deepstack = torch.zeros(DEEP, *embeds.shape)
    for span in spans:
        for i in range(span.length):
            row = held[span.key][span.item_start + i]
            embeds[span.start + i] = row[:HIDDEN]
            for layer in range(DEEP):
                deepstack[layer, span.start + i] = row[(1 + layer) * HIDDEN : (2 + layer) * HIDDEN]
    return deepstack


@pytest.mark.parametrize("seed", range(4))
def test_many_puts_and_drops(seed):
    """Put and drop items in an almost full store.

    `place` must copy the latest features.
    """
    random, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    store, held, capacity = FeatureStore(HIDDEN, DEEP, 64), {}, 64
    for _ in range(120):
        keys = [b"%d" % k for k in random.choice(12, size=random.integers(1, 4), replace=False)]
        sizes = [int(n) for n in random.integers(1, 17, len(keys))]
        for key in list(held):  # like the scheduler, evict before putting
            if sum(len(f) for f in held.values()) + sum(sizes) > capacity or random.random() < 0.1:
                store.drop(key)
                del held[key]
        pack = features_of(sum(sizes), generator)
        store.put(keys, sizes, pack)
        held.update(zip(keys, [part.clone() for part in pack.split(sizes)], strict=True))
        pack.fill_(float("nan"))  # the store must have copied the pack
        assert len(store) == len(held)
        spans, at = [], 0
        for key in random.permutation(sorted(held))[:4]:
            start = int(random.integers(0, len(held[key])))
            length = int(random.integers(1, len(held[key]) - start + 1))
            spans.append(MediaSpan(bytes(key), at + 1, start, length))
            at += length + int(random.integers(1, 3))
        embeds = torch.randn(at + 2, HIDDEN, generator=generator)
        expected = embeds.clone()
        deepstack = placed_one_by_one(held, spans, expected)
        assert torch.equal(store.place(spans, embeds), deepstack)
        assert torch.equal(embeds, expected)


def test_memory_follows_the_held_features_up_to_the_capacity():
    store, generator = FeatureStore(HIDDEN, DEEP, 40), torch.Generator()
    for n in range(100):  # each item reuses the previous item's slots
        store.put([b"%d" % n], [8], features_of(8, generator))
        store.drop(b"%d" % n)
    assert len(store._cache) == 8
    for n in range(5):
        store.put([b"%d" % n], [8], features_of(8, generator))
    assert len(store._cache) == 40
    store.put([b"4"], [8], features_of(8, generator))  # replaces the earlier features
    with pytest.raises(ExecutorFailed, match="do not fit into the encoder cache of 40"):
        store.put([b"5"], [1], features_of(1, generator))
    store.clear()
    assert len(store) == 0
    store.put([b"5"], [40], features_of(40, generator))


def test_all_places_can_be_allocated_at_once():
    """With `hold_all`, as on a GPU, the tensor never moves. The features equal those in a growing store."""
    grown, whole = (FeatureStore(HIDDEN, DEEP, 24) for _ in range(2))
    whole.hold_all(torch.float32, torch.device("cpu"))
    at_first, generator = whole._cache, torch.Generator().manual_seed(0)
    for n in range(9):
        features = features_of(8, generator)
        for store in (grown, whole):
            store.drop(b"%d" % (n - 3))
            store.put([b"%d" % n], [8], features)
    spans = [MediaSpan(b"7", 0, 2, 5), MediaSpan(b"8", 6, 0, 8)]
    embeds = [torch.zeros(16, HIDDEN) for _ in range(2)]
    deep = [store.place(spans, each) for store, each in zip((grown, whole), embeds, strict=True)]
    assert whole._cache is at_first and len(at_first) == 24
    assert torch.equal(*embeds) and torch.equal(*deep)
    with pytest.raises(ExecutorFailed, match="do not fit into the encoder cache of 24: 24 are in use"):
        whole.put([b"9"], [1], features_of(1, generator))


def test_memory_for_all_places_that_cannot_be_had_is_refused(monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    store = FeatureStore(HIDDEN, DEEP, 2**28)
    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(ConfigError, match="needs 18.00 GiB on cpu, .*; lower encoder_cache_size"):
        store.hold_all(torch.float32, torch.device("cpu"))


def test_missing_features_are_named():
    store = FeatureStore(HIDDEN, DEEP, 40)
    assert store.place((), torch.zeros(3, HIDDEN)) is None
    store.put([b"here"], [4], torch.zeros(4, (1 + DEEP) * HIDDEN))
    for span in (MediaSpan(b"gone", 0, 0, 1), MediaSpan(b"here", 0, 2, 3)):
        with pytest.raises(ExecutorFailed, match=span.key.hex()):
            store.place([span], torch.zeros(9, HIDDEN))


def test_without_deepstack_only_the_embeddings_are_placed():
    store = FeatureStore(HIDDEN, 0, 40)
    store.put([b"a"], [2], torch.ones(2, HIDDEN))
    embeds = torch.zeros(4, HIDDEN)
    assert store.place([MediaSpan(b"a", 1, 0, 2)], embeds) is None
    assert embeds.sum(1).tolist() == [0, HIDDEN, HIDDEN, 0]
