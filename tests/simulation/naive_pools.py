"""A simple second implementation of the block pool and the encoder cache, without arrays."""

from dataclasses import dataclass, field


@dataclass(eq=False)
class Block:
    content: tuple | None = None
    holders: int = 0


@dataclass(eq=False)
class Naive:
    """A request. `known`: prompt and output tokens. `computed`: number of tokens with KV. `queued_with`:
    number of known tokens when the request was last queued.
    """

    raw: dict
    arrival: int
    known: list
    grammar_ready: bool
    computed: int = 0
    blocks: list = field(default_factory=list)
    num_filled: int = 0
    drafts: list = field(default_factory=list)
    held: set = field(default_factory=set)  # indices of images whose encoder outputs the request references
    num_output: int = 0
    queued_with: int = 0

    @property
    def name(self):
        return self.raw["id"]

    @property
    def images(self):
        return self.raw["images"]


class Blocks:
    """The block pool. A block's content includes the first `ahead` tokens after the block. `ahead` is 1 with
    a draft head, because the head's KV for a token depends on the next token. Otherwise `ahead` is 0.
    """

    def __init__(self, count, size, ahead, caching):
        self.size, self.ahead, self.caching = size, ahead, caching
        self.free = [Block() for _ in range(count)]
        self.hits = {}  # content -> blocks with this content, in the order in which the blocks were filled

    def content(self, who, number):
        end = (number + 1) * self.size
        images = tuple((hash_, start) for start, length, hash_ in who.images if start < end)
        return (tuple(who.known[: end + self.ahead]), images)

    def prefix(self, who):
        """Return the request's prefix hits. The last token's block is never a hit, because the token's logits
        are needed.
        """
        found = []
        for number in range((len(who.known) - 1) // self.size if self.caching else 0):
            same = self.hits.get(self.content(who, number))
            if not same:
                break
            found.append(same[0])
        return found

    def take(self, count):
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            self.forget(block)
            block.holders = 1
        return taken

    def share(self, blocks):
        self.free = [block for block in self.free if block not in blocks]
        for block in blocks:
            block.holders += 1

    def forget(self, block):
        if block.content is not None:
            self.hits[block.content].remove(block)
            if not self.hits[block.content]:
                del self.hits[block.content]
        block.content = None

    def fill(self, rows):
        """Record the contents of full blocks when their tokens are scheduled. If several blocks have equal
        contents, prefix hits use the first recorded block. Rows that fill exactly one block, and have no
        images in that block or later, are recorded first.
        """
        for who in sorted(rows, key=lambda who: not self.fills_one_behind_images(who)):
            full = self.full(who)
            for number in range(who.num_filled, full):
                block = who.blocks[number]
                block.content = self.content(who, number)
                self.hits.setdefault(block.content, []).append(block)
            who.num_filled = max(who.num_filled, full)

    def full(self, who):
        return min(who.computed, len(who.known) - self.ahead) // self.size if self.caching else 0

    def fills_one_behind_images(self, who):
        behind = max((place + size for place, size, _ in who.images), default=0)
        return self.full(who) - who.num_filled == 1 and who.num_filled * self.size >= behind

    def release(self, who):
        """Free the request's blocks, last block first. Blocks without content go to the front of the free
        list, and blocks with content to the back.
        """
        for block in who.blocks:
            block.holders -= 1
        gone = [block for block in who.blocks if not block.holders]
        front = [block for block in reversed(gone) if block.content is None]
        back = [block for block in reversed(gone) if block.content is not None]
        self.free = front + self.free + back
        who.blocks, who.num_filled = [], 0


class Encoder:
    """The encoder cache: each item's size and holders, and the unreferenced items, longest unreferenced
    first.
    """

    def __init__(self, capacity):
        self.capacity, self.sizes, self.holders, self.idle = capacity, {}, {}, []

    @property
    def used(self):
        return sum(self.sizes.values())

    def evict(self, hash_):
        self.idle.remove(hash_)
        del self.sizes[hash_], self.holders[hash_]

    def add(self, hash_, size):
        self.sizes[hash_], self.holders[hash_] = size, set()
        self.idle.append(hash_)

    def hold(self, who, index):
        hash_ = who.images[index][2]
        if not self.holders[hash_]:
            self.idle.remove(hash_)
        self.holders[hash_].add((who.name, index))
        who.held.add(index)

    def let_go(self, who, index):
        hash_ = who.images[index][2]
        self.holders[hash_].remove((who.name, index))
        if not self.holders[hash_]:
            self.idle.append(hash_)
        who.held.remove(index)


class Asking:
    """Collects the images to encode and the encoder outputs to evict for rows that may be scheduled."""

    def __init__(self, encoder, budget, ahead, whole):
        self.encoder, self.left, self.ahead, self.whole = encoder, budget, ahead, whole
        self.encode, self.evict, self.used = [], [], set()

    def chunk(self, who, start, length):
        """Return how many of `length` tokens from `start` can be computed, given the images that fit."""
        for index, (place, size, hash_) in enumerate(who.images):
            end = start + length + self.ahead
            if not length or place + size <= start or place >= end:
                continue
            if self.whole and start + self.ahead < place and end < place + size:
                return place - start - self.ahead
            if not self.fits(who, index, size, hash_):
                before = place - start
                return before - self.ahead if before > self.ahead else max(0, before)
        return length

    def fits(self, who, index, size, hash_):
        if index in who.held or hash_ in [item[2] for item in self.encode]:
            return True
        if hash_ in self.encoder.sizes and hash_ not in self.evict:
            self.used.add(hash_)
            return True
        going = list(self.evict)
        sizes = self.encoder.sizes

        def room():
            new = sum(item[3] for item in self.encode)
            return self.encoder.capacity - self.encoder.used - new + sum(sizes[gone] for gone in going)

        for oldest in self.encoder.idle:
            if room() < size and oldest not in going and oldest not in self.used:
                going.append(oldest)
        if size > self.left or room() < size:
            return False
        self.evict, self.left = going, self.left - size
        self.encode.append((who, index, hash_, size))
        return True
