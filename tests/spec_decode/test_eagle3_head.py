"""Tests that a draft head with ragged batches and a paged KV cache gives the same results as the reference in
eagle3_dense.py.
"""

from dataclasses import replace

import pytest
import torch

from tests.qwen3_vl.qwen3_vl_reference import DenseAttention
from tests.spec_decode.eagle3_dense import dense, dense_fuse, plain_names
from tests.spec_decode.eagle3_heads import FAMILIES, TARGET
from tests.spec_decode.eagle3_passes import (
    FIRST_LAYER,
    LENGTHS,
    FakeTarget,
    cache,
    load,
    run_ragged,
    sequences,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_ragged_paged_forward_equals_the_dense_forward(family, compute, tmp_path):
    written = FAMILIES[family]()
    head = load(written, tmp_path)
    rows = sequences(head)
    got = run_ragged(head, rows, cache(head, compute, len(rows)))
    for (aux_hidden_states, tokens, positions), ours in zip(rows, got, strict=True):
        wanted = dense(written, dense_fuse(written, aux_hidden_states), head.embed(tokens), positions)
        for one, other in zip(ours, wanted, strict=True):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_near(family, compute, tmp_path):
    written = FAMILIES[family]()
    rounded = {n: t.bfloat16() if t.is_floating_point() else t for n, t in written.tensors.items()}
    written = replace(written, tensors=rounded)
    head = load(written, tmp_path, torch.bfloat16)
    rows = sequences(head)
    got = run_ragged(head, rows, cache(head, compute, len(rows)))
    for (aux_hidden_states, tokens, positions), (z, _) in zip(rows, got, strict=True):
        assert z.dtype == torch.bfloat16 and head.logits(z).dtype == torch.float32
        wanted, _ = dense(
            written, dense_fuse(written, aux_hidden_states.float()), head.embed(tokens).float(), positions
        )
        assert (z.float() - wanted).abs().mean() < 0.02 < 0.5 < wanted.abs().mean()


def test_the_next_pass_gets_the_configured_output(tmp_path):
    for family, normed in (("specforge", False), ("speculators", True)):
        written = FAMILIES[family]()
        head = load(written, tmp_path / family)
        (z, carry), *_ = run_ragged(head, sequences(head), cache(head, "torch", len(LENGTHS)))
        assert torch.equal(z, carry) == normed


def test_the_embedding_precedes_the_state(tmp_path):
    """The first 48 columns of q, k and v multiply the embedding, and the last 48 multiply the hidden
    state.
    """
    for half, embeds_matter in ((slice(0, 48), False), (slice(48, 96), True)):
        written = FAMILIES["specforge"]()
        for name in "qkv":
            written.tensors[f"midlayer.self_attn.{name}_proj.weight"][:, half] = 0
        head = load(written, tmp_path / str(embeds_matter))
        seen = []
        for seed in (0, 1):
            recorder = Recorder()
            embeds = torch.randn(3, 48, generator=torch.Generator().manual_seed(seed))
            head.forward(torch.ones(3, 48), embeds, torch.zeros(3, 3, dtype=torch.long), recorder, 0)
            seen.append(recorder)
        assert torch.equal(seen[0].k, seen[1].k) != embeds_matter
        assert torch.equal(seen[0].v, seen[1].v) != embeds_matter


class Recorder(DenseAttention):
    def append(self, layer, k, v):
        self.layer, self.k, self.v = layer, k.clone(), v.clone()

    def run(self, layer, q):
        self.q = q.clone()
        return q


@pytest.mark.parametrize("family", ["specforge", "modelopt", "qwen3"])
def test_keys_are_rotated_by_the_states_position(family, tmp_path):
    """The same state at a later position has keys rotated by exactly the position's angle."""
    head = load(FAMILIES[family](), tmp_path)
    h = head.config.hidden_size
    hidden, embeds = torch.ones(2, h), torch.ones(2, head.config.embed_size)
    at = Recorder()
    head.forward(hidden, embeds, torch.tensor([[0, 5]] * 3), at, FIRST_LAYER)
    assert at.layer == FIRST_LAYER
    cos, sin = head._rotary.halves(torch.tensor([[5]] * 3))
    half = head.config.head_dim // 2
    low, high = at.k[0, :, :half], at.k[0, :, half:]
    assert (cos - 1).abs().max() > 0.1
    torch.testing.assert_close(at.k[1, :, :half], low * cos - high * sin)
    torch.testing.assert_close(at.k[1, :, half:], high * cos + low * sin)
    wanted, _, _ = untouched_keys(head, hidden[:1], embeds[:1])
    torch.testing.assert_close(at.k[:1], wanted)


def untouched_keys(head, hidden, embeds):
    """Return k, v and q at position 0, where nothing is rotated."""
    at = Recorder()
    head.forward(hidden, embeds, torch.zeros(3, 1, dtype=torch.long), at, 0)
    return at.k, at.v, at.q


def test_positions_follow_their_axes(tmp_path):
    """`specforge` has consecutive M-RoPE sections, `angelslim` interleaved sections, and `speculators` no
    sections. Without sections, height and width have no effect.
    """
    for family, moves in (("specforge", True), ("angelslim", True), ("speculators", False)):
        head = load(FAMILIES[family](), tmp_path / family)
        keys = []
        for height in (7, 9):
            at = Recorder()
            positions = torch.tensor([[7], [height], [7]])
            head.forward(torch.ones(1, 48), torch.ones(1, 48), positions, at, 0)
            keys.append(at.k)
        assert torch.equal(*keys) != moves


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_target_ids(family, compute, tmp_path):
    written = FAMILIES[family]()
    target = FakeTarget()
    head = load(written, tmp_path, target=target)
    z = torch.randn(7, head.config.hidden_size)
    matrix = plain_names(written).get("lm_head.weight", target.matrix)
    logits = head.logits(z)
    torch.testing.assert_close(logits, z @ matrix.T)
    offsets = plain_names(written).get("d2t", torch.zeros(TARGET.vocab_size)).long()
    wanted = logits.argmax(-1) + offsets[logits.argmax(-1)]
    tokens = head.tokens(logits)
    assert tokens.dtype == torch.int64 and torch.equal(tokens, wanted)


def test_the_targets_embedding_is_not_stored(tmp_path):
    """A head whose file repeats the target's embedding reads the target's copy."""
    written, target, ids = FAMILIES["speculators"](), FakeTarget(), torch.arange(TARGET.vocab_size)
    own = written.tensors["embed_tokens.weight"]
    head = load(written, tmp_path / "own", target=target)
    assert torch.equal(head.embed(ids), own)
    written.tensors["embed_tokens.weight"] = target.embedding.clone()
    head = load(written, tmp_path / "same", target=target)
    assert head.embed(ids).equal(target.embedding) and head._weights.embed == target.embed


def test_a_tied_head_without_a_matrix_reads_its_own_embedding(tmp_path):
    written = FAMILIES["modelopt"]()
    written.config["tie_word_embeddings"] = True
    written.tensors["embed_tokens.weight"] = torch.randn(TARGET.vocab_size, 48)
    head = load(written, tmp_path)
    z = torch.randn(3, 48)
    torch.testing.assert_close(head.logits(z), z @ written.tensors["embed_tokens.weight"].T)
