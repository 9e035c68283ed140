"""A digest of a KV block's contents that is the same in every process.

Content ids (core/state/prefix_index.py) are counters with a meaning in one process only. Routers that read KV
events and stores of blocks name a block by

    digest(block) = BLAKE2b-128(digest of the block before it | its tokens | its extra)

where `extra` comes from `block_extras`: which embeddings of which media lie where in the block, and in the
first block the tenant's salt hash. Equal digests mean equal contents, unless BLAKE2b is broken.
"""

import hashlib

import numpy as np

from mmengine.core.state.blocks import block_extras
from mmengine.core.state.prefix_index import NO_CONTENT, ROOT, PrefixIndex
from mmengine.request import Request

DIGEST_BYTES = 16
ROOT_DIGEST = bytes(DIGEST_BYTES)  # the parent of a first block


def block_digest(parent: bytes, tokens: np.ndarray, extra: bytes) -> bytes:
    """Return a block's digest with these tokens, int32 [block_size], after the block with the digest
    `parent`.
    """
    said = b"".join((parent, tokens.astype("<i4").tobytes(), extra))
    return hashlib.blake2b(said, digest_size=DIGEST_BYTES, person=b"mmengine-block").digest()


def event_hash(digest: bytes) -> int:
    """Return the low 64 bits, by which KV events name a block."""
    return int.from_bytes(digest[8:], "big")


def prompt_digests(request: Request, tokens: np.ndarray, block_size: int) -> list[bytes]:
    """Return the blocks' digests that `tokens`, int32 [n], fill, without the last token's block. A
    request can find these blocks computed; the last token is computed for its logits.
    """
    count = (len(tokens) - 1) // block_size
    extras = block_extras(request, 0, count, block_size)
    digests, digest = [], ROOT_DIGEST
    for number in range(count):
        own = tokens[number * block_size : (number + 1) * block_size]
        digest = block_digest(digest, own, extras.get(number, b""))
        digests.append(digest)
    return digests


class ContentDigests:
    """Digests for an index's content ids that blocks hold. The code that folds a log keeps them up to
    date.
    """

    def __init__(self, index: PrefixIndex, block_size: int):
        self._index, self._size = index, block_size
        self._by_content: dict[int, bytes] = {ROOT: ROOT_DIGEST}

    def get(self, content: int) -> bytes | None:
        return self._by_content.get(content)

    def add(self, blocks: np.ndarray) -> None:
        """Add the contents of these blocks (int [n]). A content whose parent has no digest gets none."""
        content, parent, tokens, _ = self._index.columns()
        blocks = blocks[content[blocks] != NO_CONTENT]
        for block in blocks[np.argsort(content[blocks], kind="stable")].tolist():  # parents first
            before = self._by_content.get(int(parent[block]))
            if before is not None and int(content[block]) not in self._by_content:
                extra = self._index.extra.get(block, b"")
                own = tokens[block, : self._size]
                self._by_content[int(content[block])] = block_digest(before, own, extra)

    def drop(self, content: int) -> None:
        """Remove a content that no block holds. Contents after it were added before, because their row held
        this block.
        """
        self._by_content.pop(content, None)

    def prune(self) -> None:
        """Remove contents that no block holds, if there are many, for callers that do not call `drop` for
        each.
        """
        if len(self._by_content) > 2 * len(self._index.content) + 64:
            held = {ROOT, *self._index.content.tolist()}
            self._by_content = {each: self._by_content[each] for each in held & self._by_content.keys()}

    def clear(self) -> None:
        self._by_content = {ROOT: ROOT_DIGEST}
