"""A digest of what a KV block holds that is the same in every process.

Content ids (core/state/prefix_index.py) are counters, and mean something in one process alone. Whoever must
name a block to others (routers that read KV events, a store of blocks) names it by

    digest(block) = BLAKE2b-128(digest of the block before it | its tokens | its extra)

where `extra` is that of `block_extras`: which embeddings of which media lie where in the block, and in the
first block a hash of the tenant's salt. Equal digests are equal contents, unless BLAKE2b is broken.
"""

import hashlib

import numpy as np

from mmengine.core.state.blocks import block_extras
from mmengine.core.state.prefix_index import NO_CONTENT, ROOT, PrefixIndex
from mmengine.request import Request

DIGEST_BYTES = 16
ROOT_DIGEST = bytes(DIGEST_BYTES)  # before the first block


def block_digest(parent: bytes, tokens: np.ndarray, extra: bytes) -> bytes:
    """Of a block with these tokens, int32 [block_size], behind the one with the digest `parent`."""
    said = b"".join((parent, tokens.astype("<i4").tobytes(), extra))
    return hashlib.blake2b(said, digest_size=DIGEST_BYTES, person=b"mmengine-block").digest()


def event_hash(digest: bytes) -> int:
    """The low 64 bits, by which KV events name a block."""
    return int.from_bytes(digest[8:], "big")


def prompt_digests(request: Request, tokens: np.ndarray, block_size: int) -> list[bytes]:
    """Of the blocks that a request's `tokens`, int32 [n], fill, without the one that holds the last token:
    what it could find computed, because that one's logits are wanted."""
    count = (len(tokens) - 1) // block_size
    extras = block_extras(request, 0, count, block_size)
    digests, digest = [], ROOT_DIGEST
    for number in range(count):
        own = tokens[number * block_size : (number + 1) * block_size]
        digest = block_digest(digest, own, extras.get(number, b""))
        digests.append(digest)
    return digests


class ContentDigests:
    """The digests of an index's content ids, as far as blocks hold them: kept up by whoever folds a log."""

    def __init__(self, index: PrefixIndex, block_size: int):
        self._index, self._size = index, block_size
        self._by_content: dict[int, bytes] = {ROOT: ROOT_DIGEST}

    def get(self, content: int) -> bytes | None:
        return self._by_content.get(content)

    def add(self, blocks: np.ndarray) -> None:
        """These blocks (int [n]) hold something now. Nothing is known of what stands behind a content that
        is not known itself."""
        content, parent, tokens, _ = self._index.columns()
        blocks = blocks[content[blocks] != NO_CONTENT]
        for block in blocks[np.argsort(content[blocks], kind="stable")].tolist():  # parents first
            before = self._by_content.get(int(parent[block]))
            if before is not None and int(content[block]) not in self._by_content:
                extra = self._index.extra.get(block, b"")
                own = tokens[block, : self._size]
                self._by_content[int(content[block])] = block_digest(before, own, extra)

    def drop(self, content: int) -> None:
        """No block holds it any more. Who stands behind it was added before, for its row held this one."""
        self._by_content.pop(content, None)

    def prune(self) -> None:
        """Drop what no block holds any more, where there is much of it: for who does not hear of each."""
        if len(self._by_content) > 2 * len(self._index.content) + 64:
            held = {ROOT, *self._index.content.tolist()}
            self._by_content = {each: self._by_content[each] for each in held & self._by_content.keys()}

    def clear(self) -> None:
        self._by_content = {ROOT: ROOT_DIGEST}
