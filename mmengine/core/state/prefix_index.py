"""Finds KV blocks by content for prefix caching.

A block's content is the previous block's content, the block's token ids, and its extra digest (media, salt,
adapter). Each distinct content has a number, the content id. A block's parent is the previous block's content
id.

A block's hash key is a sum modulo 2^64: the parent and each token id, all multiplied by fixed odd factors,
plus the extra digest's hash. A lookup also compares the parent, the tokens and the extra digest, so a hit is
exact. A key collision only causes a miss.
"""

import zlib
from collections import deque
from collections.abc import Iterable

import numpy as np

NO_CONTENT = -1
NO_BLOCK = -1
ROOT = 0  # the parent of a prompt's first block
_MASK = 2**64 - 1
_FEW = 4  # `insert_many`: for fewer blocks, a Python loop is faster than numpy
_MANY = 8  # `insert_chain`: for at least this many blocks, numpy is faster than a Python loop
_PARENT_FACTOR = 0x9E3779B97F4A7C15


class PrefixIndex:
    """A block pool's prefix index: each block's content id (or NO_CONTENT), parent, tokens and hash key.

    `width`: the number of tokens that determine a block's content (the block size, or one more).
    """

    def __init__(self, num_blocks: int, width: int):
        self.content = np.full(num_blocks, NO_CONTENT, np.int64)
        self._parent = np.zeros(num_blocks, np.int64)
        self._tokens = np.zeros((num_blocks, width), np.int32)
        self._key = np.zeros(num_blocks, np.uint64)
        # block -> extra digest, for blocks with media, and for a prompt's first block with a salt or adapter
        self.extra: dict[int, bytes] = {}
        self._owner: dict[int, int] = {}  # key -> the block that lookups return
        # key -> other blocks with the owner's content
        self.twins: dict[int, list[int]] = {}
        self.next_content = ROOT + 1
        powers = [pow(0xD1342543DE82EF95, j + 1, 2**64) for j in range(width)]
        self._factors = np.array(powers, np.uint64)

    def token_parts(self, tokens: np.ndarray) -> np.ndarray:
        """Return the sum of the weighted token ids in each block's key, uint64 [n].

        `tokens`: int32 [n, width].
        """
        return tokens.astype(np.uint64) @ self._factors

    def find(self, parent: int, part: int, tokens: np.ndarray, extra: bytes) -> int:
        """Return the block with this content, or NO_BLOCK. `part`: the result of `token_parts` for
        `tokens`.
        """
        block = self._owner.get(_key(parent, part, extra), NO_BLOCK)
        if block != NO_BLOCK and self._holds(block, parent, tokens, extra):
            return block
        return NO_BLOCK

    def find_first(self, tokens: np.ndarray, extras: dict[int, bytes]) -> np.ndarray:
        """Return the blocks, int32, with the longest cached prefix of `tokens`.

        `tokens`: each block's tokens, int32 [n, width]. `extras`: index into `tokens` -> extra digest.
        """
        blocks, parent = list[int](), ROOT
        for number, part in enumerate(self.token_parts(tokens).tolist()):
            extra = extras.get(number, b"")
            block = self._owner.get(_key(parent, part, extra), NO_BLOCK)
            if block == NO_BLOCK or not self._follows(block, parent, extra):
                break
            blocks.append(block)
            parent = int(self.content[block])
        found = np.array(blocks, np.int32)
        equal = (self._tokens[found] == tokens[: len(found)]).all(1)
        return found if equal.all() else found[: int(equal.argmin())]

    def _follows(self, block: int, parent: int, extra: bytes) -> bool:
        return bool(self._parent[block] == parent) and self.extra.get(block, b"") == extra

    def _holds(self, block: int, parent: int, tokens: np.ndarray, extra: bytes) -> bool:
        return self._follows(block, parent, extra) and bool((self._tokens[block] == tokens).all())

    def insert(self, block: int, parent: int, part: int, tokens: np.ndarray, extra: bytes) -> int:
        """Record the content of `block`, and return its content id. If `parent` is NO_CONTENT or another
        content has the same key, nothing is recorded, and NO_CONTENT is returned.
        """
        if parent == NO_CONTENT:
            return NO_CONTENT
        key = _key(parent, part, extra)
        owner = self._owner.setdefault(key, block)
        if owner == block:
            content = self.next_content
            self.next_content += 1
        elif self._holds(owner, parent, tokens, extra):
            content = int(self.content[owner])
            self.twins.setdefault(key, []).append(block)
        else:
            return NO_CONTENT
        self.content[block], self._parent[block], self._key[block] = content, parent, key
        self._tokens[block] = tokens
        if extra:
            self.extra[block] = extra
        return content

    def insert_chain(
        self, blocks: np.ndarray, parent: int, tokens: np.ndarray, extras: dict[int, bytes]
    ) -> int:
        """Record the contents of a row's n consecutive blocks, and return the last block's content id.

        If a block's key collides, this block and later blocks are not recorded, and NO_CONTENT is returned.
        `blocks`: int32 [n]. `tokens`: int32 [n, width]. `extras`: index into `blocks` -> extra digest.
        """
        parts, content = self.token_parts(tokens), parent
        for place, block in enumerate(blocks.tolist()):
            # The newest content has no successor yet. If the newest content is the parent, all further blocks
            # probably have new contents.
            newest = content == self.next_content - 1
            if newest and len(blocks) - place >= _MANY:
                rest = {number - place: extra for number, extra in extras.items() if number >= place}
                if self._append_chain(blocks[place:], parts[place:], tokens[place:], rest):
                    return self.next_content - 1
            content = self.insert(block, content, int(parts[place]), tokens[place], extras.get(place, b""))
        return content

    def _append_chain(
        self, blocks: np.ndarray, parts: np.ndarray, tokens: np.ndarray, extras: dict[int, bytes]
    ) -> bool:
        """Record all blocks as successors of the newest content. If a key exists already, nothing changes,
        and False is returned.
        """
        content, numbers = np.arange(self.next_content, self.next_content + len(blocks)), blocks.tolist()
        keys = _keys(content - 1, parts)
        if extras:
            keys[list(extras)] += np.fromiter(map(_head, extras.values()), np.uint64, len(extras))
        owned = dict(zip(keys.tolist(), numbers, strict=True))
        if len(owned) < len(blocks) or not self._owner.keys().isdisjoint(owned):
            return False
        self._owner.update(owned)
        self.next_content += len(blocks)
        self._write(blocks, content - 1, tokens, keys, content)
        self.extra.update({numbers[place]: extra for place, extra in extras.items()})
        return True

    def insert_many(self, blocks: np.ndarray, parents: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Record the contents of n blocks from different rows, and return their content ids, int64 [n].

        The blocks have no extra digests. `blocks`: int32 [n]. `parents`: content ids, int64 [n]. `tokens`:
        int32 [n, width].
        """
        if len(blocks) < _FEW:
            columns = blocks.tolist(), parents.tolist(), self.token_parts(tokens).tolist()
            return np.array([self.insert(*row, b"") for row in zip(*columns, tokens, strict=True)])
        if parents.min() == NO_CONTENT:
            content = np.full(len(blocks), NO_CONTENT, np.int64)
            known = parents != NO_CONTENT
            if known.any():
                content[known] = self.insert_many(blocks[known], parents[known], tokens[known])
            return content
        keys, numbers = _keys(parents, self.token_parts(tokens)), blocks.tolist()
        served_by = list(map(self._owner.setdefault, keys.tolist(), numbers))
        if served_by == numbers:  # all contents are new
            content = np.arange(self.next_content, self.next_content + len(numbers))
            self.next_content += len(numbers)
            self._write(blocks, parents, tokens, keys, content)
            return content
        owners = np.array(served_by)
        new = owners == blocks
        content = np.full(len(blocks), NO_CONTENT, np.int64)
        content[new] = self.next_content + np.arange(int(new.sum()))
        self.next_content += int(new.sum())
        self._write(blocks[new], parents[new], tokens[new], keys[new], content[new])
        old = np.flatnonzero(~new)
        old = old[self._same_content(owners[old], parents[old], tokens[old])]
        content[old] = self.content[owners[old]]
        self._write(blocks[old], parents[old], tokens[old], keys[old], content[old])
        for index in old.tolist():
            self.twins.setdefault(int(keys[index]), []).append(numbers[index])
        return content

    def _same_content(self, owners: np.ndarray, parents: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        same = (self._parent[owners] == parents) & (self._tokens[owners] == tokens).all(axis=1)
        if self.extra:
            same &= ~np.fromiter(map(self.extra.__contains__, owners.tolist()), bool, len(owners))
        return same

    def _write(
        self,
        blocks: np.ndarray,
        parents: np.ndarray,
        tokens: np.ndarray,
        keys: np.ndarray,
        content: np.ndarray,
    ) -> None:
        where = blocks.astype(np.intp)  # converted once for four assignments
        self.content[where], self._parent[where], self._key[where] = content, parents, keys
        self._tokens[where] = tokens

    def forget(self, blocks: np.ndarray) -> None:
        """Forget the contents of blocks that will be overwritten. If another block has the same content (a
        twin), lookups return the twin from now on.
        """
        content = self.content[blocks]
        if content.max(initial=NO_CONTENT) == NO_CONTENT:
            return
        blocks = blocks[content != NO_CONTENT]
        self.content[blocks] = NO_CONTENT
        keys = self._key[blocks].tolist()
        if self.extra:
            deque(map(self.extra.pop, blocks.tolist(), [b""] * len(blocks)), maxlen=0)
        if not self.twins:
            deque(map(self._owner.pop, keys), maxlen=0)
            return
        for key, block in zip(keys, blocks.tolist(), strict=True):
            self._forget_one(key, block)

    def _forget_one(self, key: int, block: int) -> None:
        twins = self.twins.get(key, [])
        if self._owner[key] != block:
            twins.remove(block)
        elif twins:
            self._owner[key] = twins.pop(0)
        else:
            del self._owner[key]
        if not twins:
            self.twins.pop(key, None)

    def columns(self) -> tuple[np.ndarray, ...]:
        """Return each block's content id, parent, tokens and key, as four arrays. Values are valid only for
        blocks with content.
        """
        return self.content, self._parent, self._tokens, self._key

    def fill(
        self,
        blocks: np.ndarray,
        columns: tuple[np.ndarray, ...],
        extra: dict[int, bytes],
        twins: Iterable[tuple[int, ...]],
        next_content: int,
    ) -> None:
        """Restore a saved index into this empty index. `blocks`: the saved blocks, intp. `columns`: the
        values for `blocks` in the arrays that `columns()` returned. `twins`: groups of blocks with equal
        content, each without the block that lookups return.
        """
        for column, values in zip(self.columns(), columns, strict=True):
            column[blocks] = values
        self.extra.update(extra)
        self.twins.update({int(self._key[group[0]]): list(group) for group in twins})
        behind = {block for group in self.twins.values() for block in group}
        keys = self._key[blocks].tolist()
        self._owner.update((key, b) for key, b in zip(keys, blocks.tolist(), strict=True) if b not in behind)
        self.next_content = next_content

    def follows(self, parent: int) -> np.ndarray:
        """Return the blocks, int64, whose parent is the content id `parent`."""
        return np.flatnonzero((self.content != NO_CONTENT) & (self._parent == parent))

    def tokens_of(self, blocks: np.ndarray) -> np.ndarray:
        """Return the tokens of n blocks, int32 [n, width]."""
        return self._tokens[blocks]

    def clear(self) -> None:
        """Forget all contents. The forgotten content ids are never used again."""
        self.content[:] = NO_CONTENT
        self._owner.clear()
        self.twins.clear()
        self.extra.clear()


def _key(parent: int, part: int, extra: bytes) -> int:
    return (part + parent * _PARENT_FACTOR + _head(extra)) & _MASK


def _head(extra: bytes) -> int:
    """Return a 64-bit hash of an extra digest: its first 8 bytes, combined with a checksum of all bytes.

    The checksum distinguishes blocks whose first image is the same and whose later images differ.
    """
    return int.from_bytes(extra[:8], "little") ^ zlib.crc32(extra)


def _keys(parents: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Return the keys of many blocks without extra digests, equal to the results of `_key`."""
    return parts + parents.view(np.uint64) * _PARENT_FACTOR
