"""Lists the logprobs and confidences of sampled tokens for a step's result."""

from collections.abc import Sequence
from itertools import chain

import numpy as np

from mmengine.ragged import NO_PLACE
from mmengine.runtime.sampling.confidence import Confidences
from mmengine.runtime.sampling.sample_rows import SampleRows
from mmengine.runtime.sampling.sampler import Logprobs, SampledTokens
from mmengine.token_confidence import TokenConfidence, pairs_of

Pairs = list[tuple[int, float]]
TokenEntries = tuple[tuple[int, Pairs], ...]
LEAST_LOGPROB = -14.0  # a confidence leaves out less likely tokens (p < 8e-7)


def token_entries(
    sampled: SampledTokens, batch: SampleRows, token_ids: np.ndarray, places: np.ndarray
) -> TokenEntries:
    """Return (row, pairs) for each sampled position with logprobs or a confidence. `places` [p]: each
    position's row; positions with NO_PLACE are left out. If the row has logprobs, `pairs` begins with (token
    id, logprob) for the chosen token, and then for the likeliest tokens in descending order. The chosen token
    may appear again. If the row has a confidence, `pairs` ends with the pairs from `pairs_of`.
    """
    found: dict[int, Pairs] = {}
    for index, pairs in chain(
        _logprobs(sampled.logprobs, batch, token_ids), _confidences(sampled.confidences)
    ):
        if places[index] != NO_PLACE:
            found.setdefault(index, []).extend(pairs)
    return tuple((int(places[index]), found[index]) for index in sorted(found))


def _logprobs(
    lists: Logprobs | None, batch: SampleRows, token_ids: np.ndarray
) -> Sequence[tuple[int, Pairs]]:
    if lists is None:
        return ()
    chosen, best, best_ids = lists.chosen.tolist(), lists.best.tolist(), lists.best_ids.tolist()
    wanted = batch.columns["logprobs"][lists.indices].tolist()
    return [
        (
            index,
            [(int(token_ids[index]), chosen[m]), *list(zip(best_ids[m], best[m], strict=True))[: wanted[m]]],
        )
        for m, index in enumerate(lists.indices.tolist())
    ]


def _confidences(found: Confidences | None) -> Sequence[tuple[int, Pairs]]:
    if found is None:
        return ()
    likely = (found.best.numpy() >= LEAST_LOGPROB).sum(-1)
    likely[found.num_allowed.numpy() <= 1] = 0  # the token was forced
    columns = (found.chosen, found.entropy, found.best, found.best_ids)
    rows = zip(found.indices.tolist(), likely.tolist(), *(column.tolist() for column in columns), strict=True)
    return [
        (index, pairs_of(TokenConfidence(chosen, entropy, tuple(zip(ids[:count], best[:count])))))
        for index, count, chosen, entropy, best, ids in rows
    ]
