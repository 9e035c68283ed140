"""Tests that the prefix index finds blocks by their exact content, even if hash keys collide."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmengine.core.state import prefix_index
from mmengine.core.state.prefix_index import NO_CONTENT, ROOT, PrefixIndex

SIZE = 2


def tokens_of(*values):
    return np.array(values, np.int32)


def insert(index, block, parent, tokens, extra=b""):
    part = int(index.token_parts(tokens[None])[0])
    return index.insert(block, parent, part, tokens, extra)


def find(index, parent, tokens, extra=b""):
    return index.find(parent, int(index.token_parts(tokens[None])[0]), tokens, extra)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.integers(0, 2**40), st.lists(st.integers(-(2**31), 2**31 - 1), min_size=4, max_size=4)),
        min_size=1,
        max_size=8,
    )
)
def test_keys_of_columns_are_keys_of_rows(rows):
    # `_keys` returns the hash keys of several blocks, and `_key` the key of a single block.
    index = PrefixIndex(4, 4)
    parents = np.array([parent for parent, _ in rows], np.int64)
    parts = index.token_parts(np.array([tokens for _, tokens in rows], np.int32))
    alone = [prefix_index._key(parent, part, b"") for parent, part in zip(parents.tolist(), parts.tolist())]
    assert prefix_index._keys(parents, parts).tolist() == alone


def test_keys_depend_on_parent_tokens_order_and_extra():
    index = PrefixIndex(4, 2)
    parts = index.token_parts(np.array([[1, 2], [2, 1], [1, 3]], np.int32)).tolist()
    keys = [prefix_index._key(0, part, b"") for part in parts]
    keys += [prefix_index._key(1, parts[0], b""), prefix_index._key(0, parts[0], b"x" * 32)]
    assert len(set(keys)) == 5


def collide(monkeypatch):
    monkeypatch.setattr(prefix_index, "_key", lambda parent, part, extra: 0)
    monkeypatch.setattr(prefix_index, "_keys", lambda parents, parts: np.zeros(len(parts), np.uint64))


class Model:
    """A simple reference implementation. `held`: block -> its last recorded content."""

    def __init__(self):
        self.held = {}

    def holders(self, content):
        return {block for block, held in self.held.items() if held == content}


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "many", "chain", "forget", "find", "find", "clear"]),
        st.lists(st.integers(1, 11), min_size=1, max_size=4, unique=True),
        st.integers(0, 3),
        st.lists(st.integers(0, 2), min_size=4, max_size=4),
        st.sampled_from([b"", b"", b"an image" * 4]),
    ),
    max_size=40,
)


def replay_operations(operations, collisions):
    """Run the operations on an index and on the model, and compare the results. With `collisions` (colliding
    hash keys), the index may miss blocks.
    """
    index, model, parents = PrefixIndex(12, SIZE), Model(), [ROOT]
    for kind, blocks, parent_at, draws, extra in operations:
        parent = parents[parent_at % len(parents)]
        tokens = tokens_of(draws[0], draws[1])
        if kind == "clear":
            index.clear()
            model.held.clear()
        elif kind == "forget":
            index.forget(np.array(blocks))
            for block in blocks:
                model.held.pop(block, None)
        elif kind == "insert" and blocks[0] not in model.held:
            wanted = [(parent, tuple(tokens.tolist()), extra)]
            told(model, parents, blocks[:1], [insert(index, blocks[0], parent, tokens, extra)], wanted)
        elif kind == "many":
            fresh = [block for block in blocks if block not in model.held]
            if fresh:
                columns = np.array([[draws[n % 4], draws[(n + 1) % 4]] for n in range(len(fresh))], np.int32)
                ids = index.insert_many(np.array(fresh), np.full(len(fresh), parent, np.int64), columns)
                wanted = [(parent, tuple(row), b"") for row in columns.tolist()]
                told(model, parents, fresh, ids.tolist(), wanted)
        elif kind == "chain":
            fresh = [block for block in blocks if block not in model.held]
            if fresh:
                chain(index, model, parents, fresh, parent, draws, extra)
        elif kind == "find":
            found = find(index, parent, tokens, extra)
            holders = model.holders((parent, tuple(tokens.tolist()), extra))
            assert found in holders or found == -1
            assert collisions or (found == -1) == (not holders)
            rows = np.array([tokens, draws[2:], draws[:2]], np.int32)
            assert index.find_first(rows, {1: extra}).tolist() == one_by_one(index, rows, {1: extra})
        for block in range(12):
            assert (index.content[block] == NO_CONTENT) == (block not in model.held)
        by_id = {}
        for block, held in model.held.items():
            assert by_id.setdefault(int(index.content[block]), held) == held, "equal ids mean equal contents"


def one_by_one(index, rows, extras):
    """Return the expected result of `find_first`, computed with a call of `find` for each block."""
    found, parent = [], ROOT
    for place, tokens in enumerate(rows):
        block = find(index, parent, tokens, extras.get(place, b""))
        if block == -1:
            break
        found.append(block)
        parent = int(index.content[block])
    return found


def chain(index, model, parents, blocks, parent, draws, extra):
    """Insert a chain of blocks and update the model. Only the last block has the key `extra`."""
    columns = np.array([[draws[n % 4], draws[(n + 1) % 4]] for n in range(len(blocks))], np.int32)
    extras = {len(blocks) - 1: extra} if extra else {}
    last = index.insert_chain(np.array(blocks), parent, columns, extras)
    for place, (block, tokens) in enumerate(zip(blocks, columns.tolist())):
        content = int(index.content[block])
        told(model, parents, [block], [content], [(parent, tuple(tokens), extras.get(place, b""))])
        if content == NO_CONTENT:
            assert last == NO_CONTENT and (index.content[blocks[place:]] == NO_CONTENT).all()
            return
        parent = content
    assert last == parent


def told(model, parents, blocks, ids, contents):
    for block, content_id, content in zip(blocks, ids, contents):
        if content_id != NO_CONTENT:
            model.held[block] = content
            if content_id not in parents:
                parents.append(content_id)


@pytest.mark.long
@settings(max_examples=250, deadline=None, derandomize=True)
@given(OPERATIONS)
def test_against_a_model(operations):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_index, "_MANY", 1)
        replay_operations(operations, collisions=False)


@pytest.mark.long
@settings(max_examples=250, deadline=None, derandomize=True)
@given(OPERATIONS)
def test_hits_are_exact_though_all_keys_collide(operations):
    with pytest.MonkeyPatch.context() as patch:
        collide(patch)
        patch.setattr(prefix_index, "_MANY", 1)
        replay_operations(operations, collisions=True)


def test_a_collision_costs_a_miss(monkeypatch):
    collide(monkeypatch)
    index = PrefixIndex(8, SIZE)
    first = insert(index, 1, ROOT, tokens_of(1, 2))
    assert insert(index, 2, ROOT, tokens_of(3, 4)) == NO_CONTENT
    assert index.insert_many(np.array([3]), np.array([ROOT]), np.array([[5, 6]], np.int32)).tolist() == [-1]
    assert find(index, ROOT, tokens_of(1, 2)) == 1 and first > ROOT
    assert find(index, ROOT, tokens_of(3, 4)) == find(index, ROOT, tokens_of(5, 6)) == -1
    index.forget(np.array([1, 2, 3]))
    assert insert(index, 4, ROOT, tokens_of(3, 4)) > first


def test_extras_that_begin_alike_do_not_collide():
    """Blocks with the same first image and different second images are different blocks."""
    index, tokens = PrefixIndex(8, SIZE), np.zeros(SIZE, np.int32)
    extras = [b"first image" + second for second in (b"", b"one", b"two")]
    content = [insert(index, block + 1, ROOT, tokens, extra) for block, extra in enumerate(extras)]
    assert len({*content, NO_CONTENT}) == 4
    assert [find(index, ROOT, tokens, extra) for extra in extras] == [1, 2, 3]


def test_no_block_is_recorded_after_unknown_content():
    index = PrefixIndex(8, SIZE)
    rows = np.array([[1, 2], [3, 4], [5, 6]], np.int32)
    ids = index.insert_many(np.array([1, 2, 3]), np.array([NO_CONTENT, ROOT, NO_CONTENT]), rows)
    assert ids.tolist() == [NO_CONTENT, ROOT + 1, NO_CONTENT]
    assert find(index, ROOT, tokens_of(3, 4)) == 2 and find(index, ROOT, tokens_of(1, 2)) == -1
    assert index.insert_many(np.array([4]), np.array([NO_CONTENT]), rows[:1]).tolist() == [NO_CONTENT]


def test_a_twin_takes_over():
    # A twin is another block with the same content. When a block is forgotten, `find` returns a twin.
    index = PrefixIndex(8, SIZE)
    ids = [insert(index, block, ROOT, tokens_of(1, 2)) for block in (1, 2, 3)]
    assert len(set(ids)) == 1 and find(index, ROOT, tokens_of(1, 2)) == 1
    for gone, served_by in ((2, 1), (1, 3), (3, -1)):
        index.forget(np.array([gone]))
        assert find(index, ROOT, tokens_of(1, 2)) == served_by
    assert insert(index, 1, ROOT, tokens_of(1, 2)) not in ids, "ids are never used twice"


def test_twins_within_one_column():
    """A single call to `insert_many` records two blocks with the same content."""
    index = PrefixIndex(8, SIZE)
    rows = np.array([[1, 2], [3, 4], [1, 2]], np.int32)
    ids = index.insert_many(np.array([1, 2, 3]), np.full(3, ROOT, np.int64), rows)
    assert ids[0] == ids[2] != ids[1]
    index.forget(np.array([1]))
    assert find(index, ROOT, tokens_of(1, 2)) == 3


def test_a_plain_column_is_no_twin_of_a_block_with_media(monkeypatch):
    """`insert_many` compares media too, so a block without media is not recorded if the keys collide."""
    collide(monkeypatch)
    index = PrefixIndex(8, SIZE)
    insert(index, 1, ROOT, tokens_of(1, 2), b"image" * 8)
    assert index.insert_many(np.array([2]), np.array([ROOT]), np.array([[1, 2]], np.int32)).tolist() == [-1]


@pytest.mark.parametrize("many", [1, 3, 100])
def test_a_chain_gets_the_ids_that_one_by_one_gives(monkeypatch, many):
    monkeypatch.setattr(prefix_index, "_MANY", many)
    tokens, extras = np.arange(12, dtype=np.int32).reshape(6, SIZE), {2: b"image" * 8, 4: b"video" * 8}
    at_once, alone = PrefixIndex(16, SIZE), PrefixIndex(16, SIZE)
    for index in (at_once, alone):
        insert(index, 9, ROOT, tokens[0])  # the same content as the chain's first block
    last, content = at_once.insert_chain(np.arange(1, 7, dtype=np.int32), ROOT, tokens, extras), ROOT
    for place in range(6):
        content = insert(alone, place + 1, content, tokens[place], extras.get(place, b""))
    assert last == content and at_once.content.tolist() == alone.content.tolist()
    assert find(at_once, int(alone.content[2]), tokens[2], extras[2]) == 3
    assert find(at_once, int(alone.content[2]), tokens[2]) == -1


def test_parents_chain():
    index = PrefixIndex(8, SIZE)
    first = insert(index, 1, ROOT, tokens_of(1, 2))
    other = insert(index, 2, ROOT, tokens_of(3, 4))
    insert(index, 3, first, tokens_of(9, 9))
    assert find(index, first, tokens_of(9, 9)) == 3
    assert find(index, other, tokens_of(9, 9)) == find(index, ROOT, tokens_of(9, 9)) == -1
