"""Packed masks of allowed tokens, applied to logits."""

import numpy as np
import torch

from mmengine.runtime.filters import NEVER
from mmengine.runtime.upload import upload
from mmengine.structured_output.rows import Masks


def keep_allowed(logits: torch.Tensor, masks: Masks) -> None:
    """Set what the masks do not allow to -inf in float32 logits [s, vocab_size], in place."""
    if logits.device.type == "cpu":
        _keep_here(logits.numpy(), masks)
        return
    places, bits = upload(masks.picked, logits.device), upload(masks.bits.view(np.int32), logits.device)
    shifts = torch.arange(32, device=logits.device, dtype=torch.int32)
    allowed = ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, : logits.shape[1]].bool()
    logits[places] = logits[places].masked_fill(~allowed, NEVER)


def _keep_here(logits: np.ndarray, masks: Masks) -> None:
    for place, words in zip(masks.picked.tolist(), masks.bits, strict=True):
        allowed = np.unpackbits(words.view(np.uint8), count=logits.shape[1], bitorder="little")
        np.copyto(logits[place], np.float32(NEVER), where=allowed == 0)
