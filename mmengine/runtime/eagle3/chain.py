"""A chain of greedy drafts: each is fed to the head's next pass."""

import numpy as np
import torch
from torch import Tensor

from mmengine.runtime.attention.base import AttentionBackend
from mmengine.runtime.eagle3.chain_rows import ChainRows
from mmengine.runtime.eagle3.head import DraftHead

NO_DRAFT = -1


def draft(
    head: DraftHead,
    z: Tensor,
    carry: Tensor,
    rows: ChainRows,
    attention: AttentionBackend,
    first_layer: int,
    block_size: int,
) -> np.ndarray:
    """Drafts of n rows, int64 [n, max(most)], ids of the target, NO_DRAFT behind a row's last.

    z and carry [n, h]: what `DraftHead.forward` gave for the last token of each row. `first_layer`: the
    head's first one in the pool of `attention`, whose step is another one afterwards.
    """
    rows.check(block_size)
    longest = int(rows.most.max(initial=0))
    if longest and longest == rows.most.min():  # all alike, as they mostly are
        return head.chain(z, carry, rows, attention, first_layer, block_size).cpu().numpy().T
    drafts = np.full((len(rows.most), longest), NO_DRAFT, np.int64)
    going, order = rows.longest_first()
    if not len(order):
        return drafts
    places = torch.from_numpy(order).to(z.device)
    found = head.chain(z[places], carry[places], going, attention, first_layer, block_size).cpu().numpy()
    behind = np.arange(longest)[:, None] >= going.most
    drafts[order] = np.where(behind, NO_DRAFT, found).T
    return drafts
