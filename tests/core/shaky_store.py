"""A faulty block store with simulated KV, for one or more engines. Replies are late or missing. Blocks are
lost or damaged.
"""

import random
from collections import Counter, deque

import numpy as np

from mmengine.block_store.sealed import opened, seal
from mmengine.core.state.block_digest import ContentDigests, prompt_digests
from mmengine.events import vocabulary as ev

FAULTS = ("late", "lost", "wrong", "torn", "silent", "nothing offered", "told twice")


class ShakyStore:
    """Stores KV by digest, with the header from block_store/sealed.py, and returns faulty values at random.
    `chance`: the probability of each fault at each call.
    """

    def __init__(self, rng: random.Random, chance: float = 0.1):
        self.rng, self.chance = rng, chance
        self.values: dict[bytes, bytes] = {}
        self.counts: Counter[str] = Counter()

    def strikes(self, fault: str) -> bool:
        if self.rng.random() >= self.chance:
            return False
        self.counts[fault] += 1
        return True

    def read(self, key: bytes) -> tuple[bytes, np.ndarray] | None:
        """Return a value's digest and KV, or None if the value is missing or damaged."""
        value = self.values.get(key)
        if value is None or self.strikes("lost"):
            return None
        if self.strikes("wrong"):
            value = value[:40] + bytes([value[40] ^ 1]) + value[41:]
        if self.strikes("torn"):
            value = value[:-8] + bytes(8) if any(value[-8:]) else value[:-8] + b"torn    "
        digest = opened(key, memoryview(value))
        if digest is None:
            self.values.pop(key, None)
            return None
        return digest, np.frombuffer(value[32:], np.uint64)


class ShakyRemote:
    """An engine's client for the store, with the interface RemoteBlocks. In a real client, a thread puts the
    events into the inbox, as `deliver` does here.
    """

    def __init__(self, store: ShakyStore, block_size: int):
        self.store, self.block_size = store, block_size
        self.asked: dict[str, list[bytes]] = {}
        self.told: deque[ev.Event] = deque()
        self.found: dict[
            str, list[np.ndarray]
        ] = {}  # request id -> fetched blocks that were not accepted yet
        self.came: dict[
            str, list[np.ndarray]
        ] = {}  # request id -> accepted blocks that no step has copied yet
        self.digests: ContentDigests | None = None

    def connect(self, core, executor) -> None:
        self.inbox, self.executor = core.inbox, executor

    def ask(self, request, tokens) -> None:
        digests = self.asked[request.request_id] = prompt_digests(request, tokens, self.block_size)
        if self.store.strikes("silent"):
            return
        held = [digest in self.store.values for digest in digests]
        count = held.index(False) if False in held else len(held)
        self.told.append(
            ev.Offered(request.request_id, 0 if self.store.strikes("nothing offered") else count)
        )

    def fetch(self, request_id: str, first: int, count: int) -> None:
        found = []
        for key in self.asked[request_id][first : first + count]:
            if (read := self.store.read(key)) is None:
                break
            found.append(read)
        if self.store.strikes("silent"):
            return
        if found:
            self.told.append(ev.Arrived(request_id, b"".join(digest[:8] for digest, _ in found)))
            self.found[request_id] = [values for _, values in found]
        if len(found) < count:
            self.told.append(ev.Lost(request_id, "it does not hold"))
        if self.store.strikes("told twice"):
            self.told.append(ev.Lost(request_id, "again"))
            self.told.append(ev.Offered(request_id, 7))

    def accept(self, request_id: str, count: int) -> None:
        found = self.found[request_id]
        self.came.setdefault(request_id, []).extend(found[:count])
        self.found[request_id] = found[count:]

    def forget(self, request_id: str) -> None:
        """Drop the request's undelivered events."""
        self.told = deque(event for event in self.told if event.request_id != request_id)

    def take(self, request_id: str, count: int) -> np.ndarray:
        came = self.came[request_id]
        taken, self.came[request_id] = came[:count], came[count:]
        return np.stack(taken)

    def computed(self, index, blocks) -> None:
        if self.digests is None:
            self.digests = ContentDigests(index, self.block_size)
        self.digests.add(blocks)
        for block, values in zip(blocks.tolist(), self.executor.kv(blocks), strict=True):
            key = self.digests.get(int(index.content[block]))
            if key is not None and index.content[block] >= 0:
                payload = memoryview(values.tobytes())
                self.store.values.setdefault(key, bytes(seal(key, payload)) + payload)

    def deliver(self) -> None:
        while self.told and not self.store.strikes("late"):
            self.inbox.put(self.told.popleft())

    def close(self) -> None:
        """Do nothing: the client has no resources."""
