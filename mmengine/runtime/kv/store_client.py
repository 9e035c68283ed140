"""Reads and writes KV blocks and encoder outputs in a block store, in a reader thread and a writer thread.

    computed:  blocks ──gather──► rows in host memory ──writer──► values with headers in the store
    fetched:   store ──reader──► checked rows in host memory ──a step's plan──► blocks

In this file, a row is a block's KV in all layers. The engine's loop never waits for the store. If the store
is slow, rows beyond MAX_WAITING_BYTES are not stored. While a read hangs, requests do not ask the store. A
value is used only if its header's checksum is valid (block_store/sealed.py).
"""

import hashlib
import json
import queue
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from mmengine.block_store.base import BlockStore
from mmengine.block_store.sealed import SEAL_BYTES, opened, seal
from mmengine.config import EngineConfig
from mmengine.core.state.block_digest import ContentDigests, prompt_digests
from mmengine.core.state.prefix_index import PrefixIndex
from mmengine.encoder_cache.cache import encoder_key
from mmengine.events import vocabulary as ev
from mmengine.request import Request
from mmengine.runtime.device.upload import upload
from mmengine.runtime.kv.features_store import FetchedFeatures
from mmengine.runtime.kv.pool import KVPool

MAX_WAITING_BYTES = 256 * 2**20  # maximum size of computed rows that wait for the writer
# Maximum size of fetched rows that wait for a step. A single request gets at most half.
MAX_FETCHED_BYTES = 2**31
MAX_KNOWN = 2**17  # maximum number of stored values whose names are remembered
NAMESPACE_BYTES = 16  # length of a key's prefix; the value's name follows
Result = TypeVar("Result")
CLOSE_S = 10.0  # maximum time for writing the remaining rows when an engine closes


def namespace(fingerprints: Mapping[str, str], config: EngineConfig, kind: str) -> bytes:
    """Return a key prefix for stored values. Engines with different weights, dtypes, block sizes or ranks get
    different prefixes.

    `kind`: "kv" or "features".
    """
    facts = {
        **{name: value for name, value in fingerprints.items() if name != "processor"},
        "kind": kind,
        **({"kv_dtype": config.kv_dtype, "block_size": config.block_size} if kind == "kv" else {}),
        "rank": f"0/{config.tensor_parallel}",
    }
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=NAMESPACE_BYTES).digest()


class StoreClient:
    """Implements RemoteBlocks (core/remote_blocks.py) for KV blocks and encoder outputs (`features`)."""

    def __init__(
        self,
        store: BlockStore,
        pool: KVPool,
        config: EngineConfig,
        fingerprints: Mapping[str, str],
        features: FetchedFeatures | None,
    ) -> None:
        self._store, self._pool, self._features = store, pool, features
        self._timeout_s, self._block_size = config.fetch_timeout_s, config.block_size
        self._kv_names = namespace(fingerprints, config, "kv")
        self._feature_names = namespace(fingerprints, config, "features")
        layers, _, *block = pool.blocks.shape
        self._shape = (layers, *block)
        self._row_bytes = torch.Size(self._shape).numel() * pool.blocks.element_size()
        self._digests: ContentDigests | None = None
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()  # guards the fields below
        # waiting request -> its blocks' digests; the reader fills the list. The list object identifies the
        # request, because ids may be reused while the reader still processes an old request.
        self._requested: dict[str, list[bytes]] = {}
        self._offered: dict[str, Tensor] = {}  # request -> fetched rows, reported to the core
        self._accepted: dict[str, Tensor] = {}  # request -> rows for the next step
        self._waiting_bytes = self._fetched_bytes = 0
        self._reading_since = 0.0  # start time of the current store call; 0: no call is running
        self.num_put = self.num_left_out = self.num_spoiled = 0
        self._tell: Callable[[ev.Event], None] = lambda event: None
        self._news = threading.Event()
        self._reads: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_work, args=(tasks,), name=f"mmengine-store-{name}", daemon=True)
            for name, tasks in (("reads", self._reads), ("writes", self._writes))
        ]
        for thread in self._threads:
            thread.start()

    def connect(self, tell: Callable[[ev.Event], None]) -> None:
        """Set the function that receives this client's events. Any thread may call the function."""
        self._tell = tell

    def wait(self, seconds: float) -> None:
        """Wait until an event is reported, but at most `seconds`."""
        if self._news.wait(seconds):
            self._news.clear()

    def _report(self, event: ev.Event) -> None:
        self._tell(event)
        self._news.set()

    # The methods of RemoteBlocks, called in the engine loop's thread.

    def ask(self, request: Request, tokens: np.ndarray) -> None:
        if self._is_stuck():
            self._report(ev.Offered(request.request_id, 0))
            return
        digests: list[bytes] = []
        with self._lock:
            self._requested[request.request_id] = digests
        self._reads.put(lambda: self._look_up(request, tokens, digests))

    def _is_stuck(self) -> bool:
        since = self._reading_since
        return since > 0 and time.monotonic() - since > self._timeout_s

    def fetch(self, request_id: str, first: int, count: int) -> None:
        with self._lock:
            digests = self._requested.get(request_id)
        if digests is not None:
            self._reads.put(lambda: self._fetch(request_id, digests, first, count))

    def accept(self, request_id: str, count: int) -> None:
        with self._lock:
            rows = self._offered.pop(request_id)
            self._accepted[request_id] = rows[:count]

    def forget(self, request_id: str) -> None:
        with self._lock:
            self._requested.pop(request_id, None)
            rows = self._offered.pop(request_id, None)
            self._fetched_bytes -= 0 if rows is None else rows.nbytes
        if self._features is not None:
            self._features.forget(request_id)

    def take(self, request_id: str, count: int) -> Tensor:
        """Return a request's accepted rows, [count, layers, 2, block_size, num_kv_heads, head_dim]."""
        with self._lock:
            rows = self._accepted.pop(request_id)
            self._fetched_bytes -= rows.nbytes
        assert len(rows) == count
        return rows[:, SEAL_BYTES:].view(self._pool.blocks.dtype).unflatten(1, self._shape)

    def computed(self, index: PrefixIndex, blocks: np.ndarray) -> None:
        if self._digests is None:
            self._digests = ContentDigests(index, self._block_size)
        self._digests.add(blocks)
        self._digests.prune()
        content = index.content[blocks].tolist()
        named = {self._digests.get(held): block for held, block in zip(content, blocks.tolist(), strict=True)}
        new = [(digest, block) for digest, block in named.items() if digest and digest not in self._known]
        size = len(new) * self._row_bytes
        if not new or not self._may_wait(size, len(new)):
            return
        for digest, _ in new:
            self._add_known(digest)
        wanted = upload(np.array([block for _, block in new], np.int64), self._pool.blocks.device)
        rows = self._pool.blocks.index_select(1, wanted).transpose(0, 1).contiguous()
        keys = [self._kv_names + digest for digest, _ in new]
        self._writes.put(lambda: self._put(keys, list(rows.unbind(0)), size))

    def _add_known(self, digest: bytes) -> None:
        self._known[digest] = None
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def _remove_known(self, keys: Iterable[bytes]) -> None:
        """Forget the names of missing or damaged values, so that the values are written again."""
        for key in keys:
            self._known.pop(key[NAMESPACE_BYTES:], None)

    def _may_wait(self, size: int, count: int) -> bool:
        with self._lock:
            if self._waiting_bytes + size > MAX_WAITING_BYTES:
                self.num_left_out += count
                return False
            self._waiting_bytes += size
            return True

    def store_features(self, key: bytes, features: Tensor) -> None:
        """Queue an item's features, [embeddings, width], for the writer. `key`: the encoder cache key."""
        if self._features is not None and self._features.fetched_features(key) is None:
            name = self._features.name(key)
            if name not in self._known and self._may_wait(features.nbytes, 1):
                self._add_known(name)
                rows, size = [features.detach().clone()], features.nbytes
                self._writes.put(lambda: self._put([self._feature_names + name], rows, size))

    def fetched_features(self, key: bytes) -> Tensor | None:
        """Return an item's features from the store, or None."""
        return None if self._features is None else self._features.fetched_features(key)

    # Methods of the reader thread.

    def _is_given_up(self, request_id: str, digests: list[bytes]) -> bool:
        with self._lock:
            return self._requested.get(request_id) is not digests

    def _look_up(self, request: Request, tokens: np.ndarray, digests: list[bytes]) -> None:
        name = request.request_id
        if self._is_given_up(name, digests):
            return
        digests += prompt_digests(request, tokens, self._block_size)
        keys = [self._kv_names + digest for digest in digests]
        found = self._call(lambda: [bool(there) for _, there in zip(keys, self._store.has(keys))]) or []
        self._remove_known(key for key, is_there in zip(keys, found) if not is_there)
        count = found.index(False) if False in found else len(found)
        count = min(count, MAX_FETCHED_BYTES // 2 // self._row_bytes)
        items = self._fetch_items(request, count * self._block_size, digests)
        if not self._is_given_up(name, digests):
            self._report(ev.Offered(name, count, tuple(items)))
        elif self._features is not None:
            # If `forget` ran before this thread read the features, only this thread can drop the features. A
            # new request with the same id loses nothing, because this thread reads the new request's features
            # later.
            self._features.forget(name)

    def _fetch_items(
        self, request: Request, num_computed: int, digests: list[bytes]
    ) -> list[tuple[int, bytes]]:
        """Read stored features for the items that end after token `num_computed`."""
        found: list[tuple[int, bytes]] = []
        if self._features is None:
            return found
        for number, item in enumerate(request.media):
            if self._is_given_up(request.request_id, digests):
                break
            key = encoder_key(item.mm_hash, request.cache_salt, request.visual_adapter)
            value = self._features.room_for(item.num_embeds) if item.end > num_computed else None
            if value is None:
                continue
            name = self._features.name(key)
            digest = self._get(self._feature_names + name, value)
            if digest is not None:
                self._add_known(name)
                self._features.keep(request.request_id, key, value)
                found.append((number, digest[:8]))
        return found

    def _fetch(self, request_id: str, digests: list[bytes], first: int, count: int) -> None:
        with self._lock:
            if self._requested.get(request_id) is not digests:
                return
            fits = self._fetched_bytes + count * (self._row_bytes + SEAL_BYTES) <= MAX_FETCHED_BYTES
        if not fits:
            self._report(ev.Lost(request_id, "the limit for fetched bytes is reached"))
            return
        rows = torch.empty(count, SEAL_BYTES + self._row_bytes, dtype=torch.uint8)
        came = []
        for place, digest in enumerate(digests[first : first + count]):
            found = self._get(self._kv_names + digest, rows[place])
            if found is None or self._is_given_up(request_id, digests):
                break
            self._add_known(digest)
            came.append(found[:8])
        with self._lock:
            if self._requested.get(request_id) is not digests:
                return
            if came:
                self._offered[request_id] = rows = rows[: len(came)]
                self._fetched_bytes += rows.nbytes
        if came:
            self._report(ev.Arrived(request_id, b"".join(came)))
        if len(came) < count:
            self._report(ev.Lost(request_id, f"{count - len(came)} of {count} blocks are missing or damaged"))

    def _get(self, key: bytes, row: Tensor) -> bytes | None:
        """Read the value of `key` into `row` (uint8).

        Returns the value's digest, or None if the value is missing or damaged.
        """
        value = row.numpy().data
        if not self._call(lambda: bool(self._store.get([key], [value])[0])):
            self._remove_known([key])
            return None
        digest = opened(key, value)
        if digest is None:
            self._remove_known([key])
            self.num_spoiled += 1
            self._call(lambda: self._store.remove([key]))
        return digest

    def _call(self, call: Callable[[], Result]) -> Result | None:
        """Return what `call` returns, or None if it raises an exception.

        `call` must also convert the store's result, because a conversion can raise.
        """
        self._reading_since = time.monotonic()
        try:
            return call()
        except BaseException:  # a Rust panic is not an Exception
            return None
        finally:
            self._reading_since = 0.0

    # Methods of the writer thread.

    def _put(self, keys: list[bytes], rows: list[Tensor], size: int) -> None:
        try:
            for key, row in zip(keys, rows, strict=True):
                payload = row.cpu().flatten().view(torch.uint8).numpy().data
                self._store.put([key], [[seal(key, payload), payload]])
                self.num_put += 1
        except BaseException:  # a third-party store may raise anything
            self.num_left_out += 1
            self._remove_known(keys)
        finally:
            with self._lock:
                self._waiting_bytes -= size

    def close(self) -> None:
        """Write the waiting rows, for at most CLOSE_S, and stop the threads."""
        until = time.monotonic() + CLOSE_S
        self._reads.put(None)
        self._writes.put(None)
        self._threads[1].join(max(0.0, until - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            self._call(self._store.close)


def _work(tasks: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (task := tasks.get()) is not None:
        try:
            task()
        except Exception:  # the request waits until fetch_timeout_s has passed
            traceback.print_exc()
