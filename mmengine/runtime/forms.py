"""Tokens of a step in which some rows have a grammar."""

import numpy as np
import torch

from mmengine.core.runs import Runs
from mmengine.runtime.following import Followed, follow, followers
from mmengine.runtime.rows import CLOSES, GRAMMAR
from mmengine.runtime.sample_rows import SampleRows
from mmengine.runtime.sampler import Sampled, Sampler
from mmengine.structured_output.rows import Masks, RowMatchers

NO_GRAMMARS = "this executor follows no grammars"


def sample_forms(
    sampler: Sampler,
    matchers: RowMatchers | None,
    logits: torch.Tensor,
    batch: SampleRows,
    runs: Runs | None,
) -> tuple[Sampled, Followed]:
    """As `Sampler.sample`, float32 logits [s, vocab_size]: by masks, or on a CPU by following. Without
    `matchers` rows with a grammar are in error."""
    options = batch.columns["options"]
    row_options = options if runs is None else options[runs.first]
    if matchers is None:
        nothing = dict.fromkeys(np.flatnonzero(row_options & GRAMMAR).tolist(), NO_GRAMMARS)
        return sampler.sample(logits, batch), Followed({}, nothing)
    is_bound = (options & GRAMMAR) != 0
    going: list[int] = []
    if sampler.device.type == "cpu":
        is_bound &= ~followers(options)
        going = followers(row_options).nonzero()[0].tolist()
    masks, errors = _masks(matchers, batch, runs, is_bound.nonzero()[0])
    chosen = sampler.choose(logits, batch, masks)
    if masks is not None and masks.closing is not None:
        sampler.close(chosen, masks.closing)
    followed = follow(sampler, matchers, chosen, batch, runs, going)
    followed.errors.update(errors)
    return sampler.conclude(chosen, batch), followed


def _masks(
    matchers: RowMatchers, batch: SampleRows, runs: Runs | None, picked: np.ndarray
) -> tuple[Masks | None, dict[int, str]]:
    """What may be said at positions `picked`, those of whole rows; and why some rows (of those that sample)
    can say nothing. On a device, while it computes."""
    if not len(picked):
        return None, {}
    heads, drafts = picked, None
    if runs is not None:
        heads, drafts = runs.drafts_at(picked)
    owners = heads if runs is None else runs.row_of[heads]
    rows = batch.rows[heads].tolist()
    bits, errors = matchers.masks(rows, drafts)
    closing = matchers.closing(heads, rows) if batch.wanted & CLOSES else None
    return Masks(picked, bits, closing), {int(owners[index]): what for index, what in errors.items()}
