"""Tests of draft chains (successive drafts of an EAGLE-3 head): every implementation drafts the same tokens
as the reference formulas, and the KV cache has the expected content.
"""

import numpy as np
import pytest
import torch

from mmengine.core.executor import NO_DRAFT
from mmengine.native import library
from mmengine.runtime.drafting.eagle3.head import DraftHead
from mmengine.runtime.drafting.eagle3.native_head import NativeDraftHead
from mmengine.runtime.drafting.head.chain import draft
from mmengine.runtime.drafting.head.chain_rows import ChainRows
from tests.spec_decode.eagle3_dense import dense, dense_fuse
from tests.spec_decode.eagle3_heads import FAMILIES, TARGET
from tests.spec_decode.eagle3_passes import FIRST_LAYER, cache, load, run_ragged, sequences

MOST = np.array([3, 7, 0, 1, 7], np.int32)
LENGTHS = (9, 1, 14, 3, 6)


def prefilled(written, folder, compute, dtype=torch.float32):
    """Prefill rows, and return (head, rows, attention, z, carry). The attention has the rows' KV. `z` and
    `carry` are each row's last outputs: `logits` reads `z`, and the next pass reads `carry`.
    """
    head = load(written, folder, dtype)
    assert isinstance(head, NativeDraftHead) == (compute == "kernels")
    rows = sequences(head, lengths=LENGTHS)
    attention = cache(head, compute, len(rows))
    z, carry = zip(*[(z[-1], carry[-1]) for z, carry in run_ragged(head, rows, attention)], strict=True)
    return head, rows, attention, torch.stack(z), torch.stack(carry)


def chain_rows(rows, attention, most=MOST, given=None):
    lens = np.array([len(tokens) for _, tokens, _ in rows], np.int32)
    positions = np.array([int(positions[0, -1]) + 1 for _, _, positions in rows], np.int32)
    return ChainRows(most, lens, positions, attention.table, given)


def drafted(head, rows, attention, z, carry, most=MOST, given=None):
    places = chain_rows(rows, attention, most, given)
    with torch.inference_mode():
        return draft(head, z, carry, places, attention, FIRST_LAYER, attention.block_size)


def chain_of_formulas(written, head, row, most, given=()):
    """Return `most` drafts from the reference formulas, without a KV cache. The first drafts are `given`."""
    aux_hidden_states, tokens, positions = row
    hidden, embeds, drafts = dense_fuse(written, aux_hidden_states), head.embed(tokens), []
    for _ in range(most):
        z, carry = dense(written, hidden, embeds, positions)
        own = int(head.tokens(head.logits(z[-1:])))
        drafts.append(given[len(drafts)] if len(drafts) < len(given) else own)
        hidden = torch.cat((hidden, carry[-1:]))
        embeds = torch.cat((embeds, head.embed(torch.tensor(drafts[-1:]))))
        following = positions[:1, -1:] + 1 if len(drafts) == 1 else positions[:, -1:] + 1
        positions = torch.cat((positions, following.expand(3, 1)), 1)
    return drafts


@pytest.mark.parametrize("most_of", [MOST, np.full(5, 4, np.int32)], ids=["each its own", "all alike"])
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_equal_the_formulas(family, most_of, compute, tmp_path):
    written = FAMILIES[family]()
    head, rows, attention, z, carry = prefilled(written, tmp_path, compute)
    drafts = drafted(head, rows, attention, z, carry, most_of)
    assert drafts.shape == (5, most_of.max()) and drafts.dtype == np.int64
    for row, most, found in zip(rows, most_of, drafts, strict=True):
        assert (found[most:] == NO_DRAFT).all()
        assert found[:most].tolist() == chain_of_formulas(written, head, row, most)
    assert len({tuple(found) for found in drafts}) > 2


@pytest.mark.parametrize("most_of", [MOST, np.full(5, 4, np.int32)], ids=["each its own", "all alike"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_chain_continues_after_given_tokens(family, most_of, compute, tmp_path):
    """The head continues after another drafter's tokens as after its own drafts."""
    written = FAMILIES[family]()
    head, rows, attention, z, carry = prefilled(written, tmp_path, compute)
    given = np.full((5, 9), NO_DRAFT, np.int64)
    tokens = np.random.default_rng(3).integers(0, TARGET.vocab_size, given.shape)
    for row, count in enumerate((2, 0, 1, 1, 3)):
        given[row, :count] = tokens[row, :count]
    drafts = drafted(head, rows, attention, z, carry, most_of, given)
    for row, most, found, first in zip(rows, most_of, drafts, given, strict=True):
        first = first[first != NO_DRAFT].tolist()[:most]
        assert found[:most].tolist() == chain_of_formulas(written, head, row, most, first)
        assert found[: len(first)].tolist() == first and (found[most:] == NO_DRAFT).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_one_call_and_single_passes_draft_the_same(family, tmp_path):
    if library.load() is None:
        pytest.skip(library.describe())
    for dtype in (torch.float32, torch.bfloat16):
        head, rows, attention, z, carry = prefilled(FAMILIES[family](), tmp_path, "kernels", dtype)
        assert head._native.can_chain == (family != "modelopt")
        one = drafted(head, rows, attention, z, carry)
        going, _ = chain_rows(rows, attention, np.sort(MOST)[::-1][:4]).longest_first()
        assert (going.most == [7, 7, 3, 1]).all()
        by_passes = DraftHead.chain.__get__(head)
        head.chain = by_passes
        assert np.array_equal(drafted(head, rows, attention, z, carry), one)


def test_nothing_to_draft(compute, tmp_path):
    head, rows, attention, z, carry = prefilled(FAMILIES["specforge"](), tmp_path, compute)
    drafts = drafted(head, rows, attention, z, carry, np.zeros(5, np.int32))
    assert drafts.shape == (5, 0)


def test_accepted_tokens_overwrite_provisional_drafts(compute, tmp_path):
    """After accepted tokens overwrite drafts, the outputs and the KV cache equal a run without drafts."""
    written = FAMILIES["specforge"]()
    head = load(written, tmp_path)
    rows = sequences(head, lengths=(12, 15))
    attention = cache(head, compute, 2)
    firsts = [
        (aux_hidden_states[:8], tokens[:8], positions[:, :8]) for aux_hidden_states, tokens, positions in rows
    ]
    got = run_ragged(head, firsts, attention)
    z, carry = (torch.stack([row[i][-1] for row in got]) for i in (0, 1))
    before = attention.pool(FIRST_LAYER).clone()
    drafted(head, firsts, attention, z, carry, np.array([5, 5], np.int32))
    assert not torch.equal(before, attention.pool(FIRST_LAYER))
    rest = [
        (aux_hidden_states[8:], tokens[8:], positions[:, 8:]) for aux_hidden_states, tokens, positions in rows
    ]
    after = run_ragged(head, rest, attention)
    untouched = cache(head, compute, 2)
    run_ragged(head, rows, untouched)
    for (aux_hidden_states, tokens, positions), (z, _) in zip(rows, after, strict=True):
        wanted, _ = dense(written, dense_fuse(written, aux_hidden_states), head.embed(tokens), positions)
        torch.testing.assert_close(z, wanted[8:], atol=2e-5, rtol=1e-5)
    for row, (_, tokens, _) in enumerate(rows):
        kept, never = (one.tokens_of(FIRST_LAYER, row, len(tokens)) for one in (attention, untouched))
        torch.testing.assert_close(kept, never, atol=1e-5, rtol=1e-5)


def test_drafts_stay_within_the_blocks_of_their_row(compute, tmp_path):
    head, rows, attention, z, carry = prefilled(FAMILIES["specforge"](), tmp_path, compute)
    places = chain_rows(rows, attention)
    blocks = attention.block_size
    width = -(-int((places.kv_lens + np.maximum(MOST - 1, 0)).max()) // blocks)
    narrow = ChainRows(MOST, places.kv_lens, places.positions, attention.table[:, : width - 1])
    with pytest.raises(ValueError, match="need more than"):
        draft(head, z, carry, narrow, attention, FIRST_LAYER, blocks)
    before = attention.pool(FIRST_LAYER).clone()
    # This block table is a view whose row stride exceeds its row length.
    enough = ChainRows(MOST, places.kv_lens, places.positions, attention.table[:, :width])
    with torch.inference_mode():
        draft(head, z, carry, enough, attention, FIRST_LAYER, blocks)
    changed = (before != attention.pool(FIRST_LAYER)).flatten(3).any(-1).any(1)  # [block, offset]
    allowed = torch.zeros_like(changed)
    for row, most in enumerate(MOST):
        for at in range(places.kv_lens[row], places.kv_lens[row] + most - 1):
            allowed[attention.table[row, at // blocks], at % blocks] = True
    assert torch.equal(changed, allowed)


def test_nan_drafts_are_valid_tokens(compute, tmp_path):
    head, rows, attention, z, carry = prefilled(FAMILIES["specforge"](), tmp_path, compute)
    drafts = drafted(head, rows, attention, z * torch.nan, carry)
    assert ((drafts >= 0) & (drafts < 96) | (drafts == NO_DRAFT)).all()
