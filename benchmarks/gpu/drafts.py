"""Compare a draft head with and without CUDA graphs: its drafts, KV and time."""

import time
from dataclasses import replace
from statistics import median

import numpy as np
import torch

from benchmarks.gpu.graphs import BLOCK_SIZE, MAX_ROWS, make_recorder
from benchmarks.gpu.roofline import BYTES, layer_weights
from benchmarks.gpu.shapes import SHAPES, reduced
from benchmarks.gpu.tokens import Verdict
from mmengine.checkpoint.rope import RopeConfig
from mmengine.errors import ConfigError
from mmengine.native.decoder_weights import LayerWeights
from mmengine.native.feed_forward import Dense
from mmengine.runtime.attention.registry import make_backend
from mmengine.runtime.device.placement import Placement
from mmengine.runtime.device.registry import open_device
from mmengine.runtime.device.upload import fetch
from mmengine.runtime.drafting.eagle3.head import DraftHead, HeadWeights
from mmengine.runtime.drafting.head.chain_rows import ChainRows
from mmengine.runtime.drafting.head.graphs import ChainGraphs
from mmengine.runtime.drafting.head.linears import gated, linear_of, scores_of
from mmengine.runtime.drafting.head.network import kv_spec
from mmengine.runtime.kv.pool import KVPool
from mmengine.spec_decode.eagle3.config import MAX_DRAFTS, HeadConfig
from mmengine_qwen3_vl.config import ModelConfig

DRAFT_VOCAB = 32_000  # as in published heads
LONGEST = 8  # maximum KV blocks per row in the comparison
REPEATS = 30


def random_head(shape: ModelConfig, device: str, dtype: torch.dtype) -> DraftHead:
    """Return a draft head with one layer as wide as the model, a separate embedding and a small draft
    vocabulary.
    """
    c, where = shape.text, torch.device(device)
    generator = torch.Generator(where).manual_seed(3)

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, device=where, dtype=dtype).normal_(0, 0.02, generator=generator)

    width, vocab = c.hidden_size, min(DRAFT_VOCAB, c.vocab_size // 2)
    ones = torch.ones(width, device=where, dtype=dtype)
    embedding, (scores, packed) = drawn(c.vocab_size, width) * 50, scores_of(drawn(vocab, width))
    config = HeadConfig(
        family="random",
        hidden_size=width,
        target_hidden_size=width,
        embed_size=width,
        intermediate_size=c.intermediate_size,
        num_layers=1,
        num_heads=c.num_heads,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        vocab_size=c.vocab_size,
        draft_vocab_size=vocab,
        aux_layers=(0, 1, 2),
        rms_norm_eps=c.rms_norm_eps,
        rope=RopeConfig(theta=1e4),
        norm_before_fc=False,
        fc_norm=False,
        norm_before_residual=False,
        norm_output=False,
        qk_norm=False,
        attention_bias=False,
        own_embedding=True,
        head="own",
        num_drafts=MAX_DRAFTS,
    )
    heads = c.num_heads * c.head_dim
    layer = LayerWeights(
        input_norm=ones,
        qkv=linear_of(drawn(heads + 2 * c.num_kv_heads * c.head_dim, 2 * width)),
        qk_norm=None,
        out=linear_of(drawn(width, heads)),
        post_norm=ones,
        feed_forward=Dense(
            gated(drawn(2 * c.intermediate_size, width)), linear_of(drawn(width, c.intermediate_size))
        ),
    )
    weights = HeadWeights(
        fc=linear_of(drawn(width, 3 * width)),
        fc_norms=(),
        hidden_norm=ones,
        layers=[layer],
        norm=ones,
        scores=scores,
        packed_scores=packed,
        embed=embedding.__getitem__,
        target_ids=torch.arange(vocab, device=where) * 2,
    )
    return DraftHead(config, weights, Placement(open_device(str(where)), dtype))


def pass_bytes(shape: ModelConfig) -> int:
    """Return how many bytes a draft head's pass reads. The pass reads each matrix once."""
    c = shape.text
    twice = c.hidden_size * c.head_dim * (c.num_heads + 2 * c.num_kv_heads)
    return BYTES * (layer_weights(c) + twice + min(DRAFT_VOCAB, c.vocab_size // 2) * c.hidden_size)


class Chains:
    """Drafts several tokens per row, with or without CUDA graphs. Each row has up to `blocks` blocks with
    random KV.

    Raises ConfigError if the attention backend cannot be captured.
    """

    def __init__(self, head: DraftHead, device: str, max_rows: int, blocks: int) -> None:
        self.head, self._blocks = head, blocks
        spec = kv_spec(head.config, blocks * BLOCK_SIZE)
        self.pool = KVPool(spec, 1 + max_rows * blocks, BLOCK_SIZE, head.dtype, head.placement.device)
        self._attention = make_backend("auto", spec, self.pool)
        if device == "cuda" and not self._attention.captures:
            raise ConfigError(f"{type(self._attention).__name__} cannot be captured")
        self._graphs = ChainGraphs(
            head,
            self._attention,
            make_recorder(device),
            block_size=BLOCK_SIZE,
            max_rows=max_rows,
            most=MAX_DRAFTS,
        )
        self._generator = torch.Generator(head.device).manual_seed(4)
        self.pool.blocks.normal_(generator=self._generator)

    def rows(self, lens: np.ndarray, most: np.ndarray, given: np.ndarray | None = None) -> ChainRows:
        table = 1 + np.random.default_rng(len(lens)).permutation(len(lens) * self._blocks)
        table = table.astype(np.int32).reshape(len(lens), -1)
        return ChainRows(most.astype(np.int32), lens.astype(np.int32), lens.astype(np.int32), table, given)

    def states(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        z, carry = torch.empty(
            2, count, self.head.config.hidden_size, dtype=self.head.dtype, device=self.head.device
        ).normal_(generator=self._generator)
        return z, carry

    def launched(self, z: torch.Tensor, carry: torch.Tensor, rows: ChainRows) -> np.ndarray:
        return fetch(self.head.chain(z, carry, rows, self._attention, 0, BLOCK_SIZE))

    def captured(self, z: torch.Tensor, carry: torch.Tensor, rows: ChainRows) -> np.ndarray:
        drafts = self._graphs.chain(z, carry, rows)
        if drafts is None:
            raise ConfigError("no pass could be captured; a warning above says why")
        return fetch(drafts)


def compare_chains(device: str, dtype: torch.dtype) -> Verdict:
    """Compare draft chains with and without CUDA graphs, for every number of rows and for the head sizes 128
    and 32.

    With fixed random drafts, both chains' KV may differ only within the tolerance. If the head chooses the
    drafts, both chains must agree in more than half of the drafts. Raises ConfigError if passes cannot be
    captured.
    """
    gaps: list[float] = []
    same = total = 0
    for head_dim in (128, 32):
        shape = reduced(SHAPES["2B"])
        shape = replace(shape, text=replace(shape.text, head_dim=head_dim))
        with torch.inference_mode():
            chains = Chains(random_head(shape, device, dtype), device, MAX_ROWS, LONGEST)
            for count in range(1, MAX_ROWS + 1):
                gap, equal, of = _compare(chains, count)
                gaps, same, total = [*gaps, gap], same + equal, total + of
    bound = max(8 * torch.finfo(dtype).eps, 1e-5)
    said = (
        f"largest gap {max(gaps):.1e} in {len(gaps)} chains (tolerance {bound:.1e}); {same} of {total} drafts"
    )
    # If two tokens score almost equally, rounding may decide which token is drafted. All later drafts then
    # differ.
    return Verdict("drafts captured beside launched", said, max(gaps) <= bound and 2 * same > total)


def _compare(chains: Chains, count: int) -> tuple[float, int, int]:
    """Return (gap, number of equal drafts, number of drafts) for `count` rows.

    `_gap` defines the gap.
    """
    rng = np.random.default_rng(count)
    lens = rng.integers(1, LONGEST * BLOCK_SIZE - MAX_DRAFTS, count)
    most = -np.sort(-rng.integers(1, MAX_DRAFTS + 1, count))
    states = chains.states(count)
    tokens = rng.integers(0, chains.head.config.vocab_size, (count, MAX_DRAFTS))
    gap, rows = _gap(chains, states, chains.rows(lens, most, tokens)), chains.rows(lens, most)
    found, wanted = chains.captured(*states, rows), chains.launched(*states, rows)
    there = np.arange(len(found))[:, None] < most
    return gap, int((found == wanted)[there].sum()), int(there.sum())


def _gap(chains: Chains, states: tuple[torch.Tensor, torch.Tensor], rows: ChainRows) -> float:
    """Return the largest difference between the KV with and without CUDA graphs, divided by the largest value
    without CUDA graphs. Returns infinity if the written positions differ.
    """
    before = chains.pool.blocks.clone()
    written = []
    for chain in (chains.launched, chains.captured):
        chains.pool.blocks.copy_(before)
        chain(*states, rows)
        written.append(chains.pool.blocks[:, 1:].float().clone())
    wanted, found = written
    before = before[:, 1:].float()
    changed = wanted != before
    if not changed.any():
        return 0.0 if torch.equal(found, before) else float("inf")
    if not torch.equal(found[~changed], before[~changed]):
        return float("inf")
    gap = float((found - wanted)[changed].abs().max() / wanted[changed].abs().max())
    return gap if gap == gap else float("inf")


def chain_seconds(shape: ModelConfig, device: str, dtype: torch.dtype, context: int) -> dict[str, float]:
    """Return the median seconds that a row with `context` tokens takes for MAX_DRAFTS drafts.

    The keys are "captured" (with CUDA graphs) and "launched" (without). The time includes copying the drafts
    to the host.
    """
    blocks = -(-(context + MAX_DRAFTS) // BLOCK_SIZE)
    with torch.inference_mode():
        chains = Chains(random_head(shape, device, dtype), device, 1, blocks)
        rows, states = chains.rows(np.array([context]), np.array([MAX_DRAFTS])), chains.states(1)
        seconds: dict[str, list[float]] = {"captured": [], "launched": []}
        for _ in range(REPEATS):
            for how, chain in (("captured", chains.captured), ("launched", chains.launched)):
                begin = time.perf_counter()
                chain(*states, rows)
                seconds[how].append(time.perf_counter() - begin)
    return {how: median(taken) for how, taken in seconds.items()}
