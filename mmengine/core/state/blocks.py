"""The KV block pool: reference counts, the free list, and the contents of full blocks."""

import hashlib
import struct
from typing import Protocol

import numpy as np

from mmengine.config import EngineConfig
from mmengine.core.state.columns import ReadOnlyArray, RowColumns
from mmengine.core.state.free_list import FreeList
from mmengine.core.state.lazy_windows import LazyWindowIndex
from mmengine.core.state.prefix_index import NO_CONTENT, PrefixIndex
from mmengine.core.state.window_blocks import WindowIndex
from mmengine.events.vocabulary import Admitted
from mmengine.request import Request, num_before

# Special values of the last field in _PART, which otherwise is an embedding's index. They say what the
# preceding hash was computed from.
OF_SALT = -1  # a tenant's salt
OF_ADAPTER = -2  # a LoRA adapter
OF_PROMPT = -3  # the whole prompt
# Fields: length of the preceding hash, position relative to the block, index of the first embedding.
_PART = struct.Struct("<Iqq")


class BlockPool:
    """One engine's KV blocks. Only `evolve` (core/fold) calls methods that change the pool.

    `num_blocks` includes block 0, which pads batches and belongs to no request. `content_width`: how many
    tokens determine a block's content. `num_windows`: how many block groups have a sliding window. `is_lazy`:
    whether prefix hits in these groups follow vLLM's rules (lazy_windows.py).
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        content_width: int,
        num_windows: int = 0,
        *,
        is_lazy: bool = False,
    ):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.references = np.zeros(num_blocks, np.int32)
        self.free_list = FreeList(num_blocks)
        self.index = PrefixIndex(num_blocks, content_width)
        self.windows = (LazyWindowIndex if is_lazy else WindowIndex)(num_blocks, num_windows)
        self.content, self.find_first = self.index.content, self.index.find_first
        # For each block in the first group, the content id with which `find_windows` finds blocks in other
        # groups.
        self.window_content = self.content
        if is_lazy and num_windows:
            self.window_content = np.zeros(num_blocks, np.int64)
        self.find_windows = self.windows.find
        self.peek = self.free_list.peek

    @property
    def num_free(self) -> int:
        return self.free_list.num_free

    def take_new(self, blocks: np.ndarray) -> None:
        """Give free blocks to a request, and forget their contents."""
        self.forget(blocks)
        self.free_list.take(blocks)
        self.references[blocks] = 1

    def share(self, blocks: np.ndarray) -> None:
        """Add a reference to each of these cached blocks. Free blocks leave the free list."""
        self.free_list.take(blocks[self.references[blocks] == 0])
        self.references[blocks] += 1

    def release(self, blocks: np.ndarray) -> None:
        """Remove a reference from each block. `blocks` has the order of the block table. Blocks without
        references become free. Among the cached blocks, the table's last block is reused first, so that
        prefixes stay cached longest.
        """
        self.references[blocks] -= 1
        self._free(blocks[self.references[blocks] == 0])

    def release_shared(self, blocks: np.ndarray) -> None:
        """Remove references from blocks of several rows. A block that n rows share occurs n times in
        `blocks`.
        """
        np.subtract.at(self.references, blocks, 1)
        freed = blocks[self.references[blocks] == 0]
        self._free(freed[np.sort(np.unique(freed, return_index=True)[1])])

    def _is_cached(self, blocks: np.ndarray) -> np.ndarray:
        cached: np.ndarray = self.index.content[blocks] != NO_CONTENT
        if self.windows.num_groups:
            cached |= self.windows.keys[blocks] != NO_CONTENT
        return cached

    def _free(self, freed: np.ndarray) -> None:
        cached = self._is_cached(freed)
        self.free_list.give_front(freed[~cached])
        self.free_list.give_back(freed[cached][::-1])

    def order_after_release(self, groups: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return the blocks that would become free if `release` were called for each array in `groups`, as a
        pair: (blocks for the front of the free list, blocks for its back). The free list gives out blocks
        from the front.
        """
        front, back = [np.zeros(0, np.int32)], [np.zeros(0, np.int32)]
        for blocks in groups:
            freed = blocks[self.references[blocks] == 1]
            cached = self._is_cached(freed)
            front.insert(0, freed[~cached][::-1])
            back.append(freed[cached][::-1])
        return np.concatenate(front), np.concatenate(back)

    def forget(self, blocks: np.ndarray) -> None:
        """Forget these blocks' contents."""
        self.index.forget(blocks)
        if self.windows.num_groups:
            self.windows.forget(blocks)

    def reset_cache(self) -> None:
        """Forget all cached contents. Requests keep the blocks that they hold."""
        self.index.clear()
        self.windows.clear()


def further_blocks(
    columns: RowColumns[ReadOnlyArray],
    config: EngineConfig,
    rows: ReadOnlyArray,
    num_tokens: np.ndarray | int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows that need more blocks (indices into `rows`, intp), and how many more each row needs
    (int32).

    `num_tokens`: each row's number of further tokens, or a single number for every row. The drafter's
    lookahead is added, but no row gets blocks for more than max_model_len tokens.
    """
    slots, size = columns.num_computed[rows] + num_tokens, config.block_size
    held = columns.num_blocks[rows] * size
    lacking = slots + config.lookahead_tokens - held if config.lookahead_tokens else slots - held
    places = (lacking > 0).nonzero()[0]
    if len(places) and config.lookahead_tokens:
        lacking = np.minimum(lacking, config.max_model_len - held)
        places = (lacking > 0).nonzero()[0]
    return places, (lacking[places] - 1) // size + 1


class Groups(Protocol):
    """The attributes that `hit_tokens` reads from a state or from a state's view."""

    @property
    def block_size(self) -> int: ...
    @property
    def config(self) -> EngineConfig: ...


def hit_tokens(state: Groups, event: Admitted) -> int:
    """Return how many tokens an admission's prefix hits contain."""
    if state.config.block_groups:  # `cached_blocks` may be longer or shorter than the prefix
        return max(0, event.num_computed)
    return len(event.cached_blocks) // 4 * state.block_size


def content_windows(token_ids: ReadOnlyArray, first: int, last: int, size: int, width: int) -> np.ndarray:
    """Return the tokens that determine the contents of blocks [first, last), int32 [last - first, width]."""
    if width == size:
        return token_ids[first * size : last * size].reshape(-1, size)
    starts = np.arange(first, last)[:, None] * size
    return token_ids[starts + np.arange(width)]


def block_extras(
    request: Request, first: int, last: int, block_size: int, ahead: int = 0, whole_prompt: bool = False
) -> dict[int, bytes]:
    """Return the inputs, other than tokens, that determine the KV in blocks [first, last).

    The result maps a block's number to bytes. Blocks that depend only on tokens are left out. The bytes
    describe each run of media embeddings in the block and in the `ahead` tokens after the block: the item's
    hash, the run's position relative to the block, and the index of the run's first embedding. Block 0 also
    has the salt's hash and the adapter's digest. With `whole_prompt`, each token's KV depends on the whole
    prompt, so block 0 also has the prompt's hash.
    """
    extras: dict[int, bytes] = {}
    for item in request.media[num_before(request.media, first * block_size) :]:
        embedding = 0
        for start, length in item.runs:
            end = (start + length - 1) // block_size + 1
            for number in range(max(first, (start - ahead) // block_size), min(last, end)):
                part = item.mm_hash + _PART.pack(len(item.mm_hash), start - number * block_size, embedding)
                extras[number] = extras.get(number, b"") + part
            embedding += length
    if request.cache_salt and first == 0 < last:
        salt = hashlib.sha256(request.cache_salt.encode()).digest()
        extras[0] = extras.get(0, b"") + salt + _PART.pack(len(salt), 0, OF_SALT)
    if request.adapter is not None and first == 0 < last:
        digest = request.adapter.digest
        extras[0] = extras.get(0, b"") + digest + _PART.pack(len(digest), 0, OF_ADAPTER)
    if whole_prompt and first == 0 < last:
        digest = _prompt_hash(request)
        extras[0] = extras.get(0, b"") + digest + _PART.pack(len(digest), 0, OF_PROMPT)
    return extras


def _prompt_hash(request: Request) -> bytes:
    """Return the SHA-256 hash over the prompt's token ids and media."""
    found = hashlib.sha256(request.prompt_token_ids.astype("<i4").tobytes())
    for item in request.media:
        found.update(_PART.pack(len(item.mm_hash), item.start, len(item.runs)) + item.mm_hash)
        found.update(np.array(item.runs, "<i8").tobytes())
    return found.digest()


def threshold_of(config: EngineConfig, num_requests: int) -> int:
    """Return the maximum number of tokens per request in a step; 0: no limit. A sole request has no limit."""
    return config.long_prefill_token_threshold if num_requests > 1 else 0
