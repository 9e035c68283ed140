"""Samples the tokens of a step in which some rows have a grammar."""

import numpy as np
import torch

from mmengine.runtime.rows import CLOSES, GRAMMAR
from mmengine.runtime.sampling.lazy_masks import LazyMaskResult, apply_lazy_masks, uses_lazy_mask
from mmengine.runtime.sampling.runs import Runs
from mmengine.runtime.sampling.sample_rows import SampleRows
from mmengine.runtime.sampling.sampler import NO_FORCED_TOKENS, ForcedTokens, SampledTokens, Sampler
from mmengine.structured_output.rows.rows import Masks, RowMatchers

NO_GRAMMARS = "this executor does not support grammars"


def sample_grammar_rows(
    sampler: Sampler,
    matchers: RowMatchers | None,
    logits: torch.Tensor,
    batch: SampleRows,
    runs: Runs | None,
    forced: ForcedTokens = NO_FORCED_TOKENS,
) -> tuple[SampledTokens, LazyMaskResult]:
    """Sample from float32 logits [s, vocab_size], among the tokens that grammars allow. See `Sampler.sample`.

    On a CPU, rows get lazy masks (lazy_masks.py) if possible. Other rows with a grammar get a mask over the
    whole vocabulary. If `matchers` is None, rows with a grammar fail.
    """
    options = batch.columns["options"]
    row_options = options if runs is None else options[runs.first]
    if matchers is None:
        nothing = dict.fromkeys(np.flatnonzero(row_options & GRAMMAR).tolist(), NO_GRAMMARS)
        return sampler.sample(logits, batch, forced=forced), LazyMaskResult({}, nothing)
    is_bound = (options & GRAMMAR) != 0
    continuing: list[int] = []
    if sampler.device.type == "cpu":
        is_bound &= ~uses_lazy_mask(options)
        continuing = uses_lazy_mask(row_options).nonzero()[0].tolist()
    masks, errors = _masks(matchers, batch, runs, is_bound.nonzero()[0])
    chosen = sampler.choose(logits, batch, masks)
    sampler.put(chosen, forced)
    if masks is not None and masks.closing is not None:
        sampler.close(chosen, masks.closing)
    lazy_masked = apply_lazy_masks(sampler, matchers, chosen, batch, runs, continuing)
    lazy_masked.errors.update(errors)
    return sampler.conclude(chosen, batch), lazy_masked


def _masks(
    matchers: RowMatchers, batch: SampleRows, runs: Runs | None, selected: np.ndarray
) -> tuple[Masks | None, dict[int, str]]:
    """Return masks for the positions `selected`, and row -> reason for each row without an allowed token.

    For each row, `selected` must contain all the row's positions or no position.
    """
    if not len(selected):
        return None, {}
    heads, drafts = selected, None
    if runs is not None:
        heads, drafts = runs.drafts_at(selected)
    owners = heads if runs is None else runs.row_of[heads]
    rows = batch.rows[heads].tolist()
    bits, errors = matchers.masks(rows, drafts)
    closing = matchers.closing(heads, rows) if batch.wanted & CLOSES else None
    return Masks(selected, bits, closing), {int(owners[index]): what for index, what in errors.items()}
