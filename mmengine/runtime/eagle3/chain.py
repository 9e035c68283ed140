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
    drafts = np.full((len(rows.most), int(rows.most.max(initial=0))), NO_DRAFT, np.int64)
    going, order = rows.longest_first()
    if not len(order):
        return drafts
    if len(order) < len(z) or (order[1:] < order[:-1]).any():
        places = torch.from_numpy(order).to(z.device)
        z, carry = z[places], carry[places]
    found = head.chain(z, carry, going, attention, first_layer, block_size).cpu().numpy()
    behind = np.arange(drafts.shape[1])[:, None] >= going.most
    drafts[order] = np.where(behind, NO_DRAFT, found).T
    return drafts
