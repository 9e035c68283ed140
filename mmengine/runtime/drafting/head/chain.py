"""Drafts a chain of tokens for each row. Each greedy token is the input for the head's next pass."""

import numpy as np
from torch import Tensor

from mmengine.core.executor import NO_DRAFT
from mmengine.runtime.attention.base import AttentionBackend
from mmengine.runtime.device.upload import fetch, upload
from mmengine.runtime.drafting.head.chain_rows import ChainRows
from mmengine.runtime.drafting.head.graphs import ChainGraphs
from mmengine.runtime.drafting.head.network import HeadNetwork


def draft(
    head: HeadNetwork,
    z: Tensor,
    carry: Tensor,
    rows: ChainRows,
    attention: AttentionBackend,
    first_layer: int,
    block_size: int,
    graphs: ChainGraphs | None = None,
) -> np.ndarray:
    """Return the drafts for n rows as target token ids, int64 [n, max(most)], padded with NO_DRAFT.

    `z`, `carry`: [n, h], the results of `HeadNetwork.forward` for each row's last token. `first_layer`: the
    head's first layer in `attention`'s pool. Call `attention.begin` again afterwards, because this function
    begins its own steps. `graphs`: captured passes for this head and pool.
    """

    def chain(z: Tensor, carry: Tensor, rows: ChainRows) -> np.ndarray:
        drafts = graphs.chain(z, carry, rows) if graphs is not None else None
        if drafts is None:
            drafts = head.chain(z, carry, rows, attention, first_layer, block_size)
        return fetch(drafts)

    rows.check(block_size)
    longest = int(rows.most.max(initial=0))
    if longest and longest == rows.most.min():  # usual case: all rows have the same number of drafts
        return chain(z, carry, rows).T
    drafts = np.full((len(rows.most), longest), NO_DRAFT, np.int64)
    going, order = rows.longest_first()
    if not len(order):
        return drafts
    places = upload(order, z.device)
    found = chain(z[places], carry[places], going)
    behind = np.arange(longest)[:, None] >= going.most
    drafts[order] = np.where(behind, NO_DRAFT, found).T
    return drafts
