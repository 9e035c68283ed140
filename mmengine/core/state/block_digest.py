"""A digest of a KV block's content that is equal in all processes.

Content ids (core/state/prefix_index.py) are counters, so a content id has a meaning only in its process.
Block stores, and routers that read KV events, identify a block by

    digest(block) = BLAKE2b-128(the previous block's digest | its tokens | its extra)

`extra`, the result of `block_extras`, identifies the media embeddings in the block with their positions
and, in the first block, the tenant's salt and the adapter.
"""

import hashlib

import numpy as np

from mmengine.core.state.blocks import block_extras
from mmengine.core.state.prefix_index import NO_CONTENT, ROOT, PrefixIndex
from mmengine.request import Request

DIGEST_BYTES = 16
ROOT_DIGEST = bytes(DIGEST_BYTES)  # the parent digest of a prompt's first block


def block_digest(parent: bytes, tokens: np.ndarray, extra: bytes) -> bytes:
    """Return the digest of a block with these tokens, int32 [block_size]. `parent`: the digest of the
    previous block, or ROOT_DIGEST.
    """
    said = b"".join((parent, tokens.astype("<i4").tobytes(), extra))
    return hashlib.blake2b(said, digest_size=DIGEST_BYTES, person=b"mmengine-block").digest()


def event_hash(digest: bytes) -> int:
    """Return the low 64 bits of a block's digest, which identify the block in KV events."""
    return int.from_bytes(digest[8:], "big")


def prompt_digests(request: Request, tokens: np.ndarray, block_size: int) -> list[bytes]:
    """Return the digests of the full blocks in `tokens`, int32 [n], that can be prefix hits. The block with
    the last token is left out, because the last token is always computed to get its logits.
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
    """The digests of the contents in `index`, by content id. The code that applies a log's events calls `add`
    and `drop`.
    """

    def __init__(self, index: PrefixIndex, block_size: int):
        self._index, self._size = index, block_size
        self._by_content: dict[int, bytes] = {ROOT: ROOT_DIGEST}

    def get(self, content: int) -> bytes | None:
        return self._by_content.get(content)

    def add(self, blocks: np.ndarray) -> None:
        """Add digests for these blocks' contents (int [n]). A content whose parent has no digest gets
        none.
        """
        content, parent, tokens, _ = self._index.columns()
        blocks = blocks[content[blocks] != NO_CONTENT]
        for block in blocks[np.argsort(content[blocks], kind="stable")].tolist():  # parents come first
            before = self._by_content.get(int(parent[block]))
            if before is not None and int(content[block]) not in self._by_content:
                extra = self._index.extra.get(block, b"")
                own = tokens[block, : self._size]
                self._by_content[int(content[block])] = block_digest(before, own, extra)

    def drop(self, content: int) -> None:
        """Remove the digest of a content that no block holds any more. Contents that extend this content keep
        their digests.
        """
        self._by_content.pop(content, None)

    def prune(self) -> None:
        """Remove digests for contents that no block holds, if there are many. Callers that never call `drop`
        call this method.
        """
        if len(self._by_content) > 2 * len(self._index.content) + 64:
            held = {ROOT, *self._index.content.tolist()}
            self._by_content = {each: self._by_content[each] for each in held & self._by_content.keys()}

    def clear(self) -> None:
        self._by_content = {ROOT: ROOT_DIGEST}
