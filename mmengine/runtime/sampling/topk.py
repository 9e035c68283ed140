"""The most likely tokens of rows; of equals the lowest id first."""

import numpy as np
import torch


def topk_tokens(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit of each row [r] and its token, of equals the lowest id; NaN counts as the largest."""
    if logits.device.type != "cpu":
        return logits.max(dim=-1)
    values = logits.numpy()  # whose argmax is several times as fast
    token_ids = values.argmax(axis=-1)
    return torch.from_numpy(values[np.arange(len(values)), token_ids]), torch.from_numpy(token_ids)


def topk_tokens_of(logprobs: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `most` largest of each row of float32 [r, vocab_size] and their tokens, best first, of equals the
    lowest id first: in torch's topk those would follow from `most` and the number of rows."""
    if logprobs.device.type == "cpu":  # where there hardly are any, and looking costs little
        values, token_ids = logprobs.topk(min(most + 1, logprobs.shape[1]), dim=-1)
        if not (values[:, 1:] == values[:, :-1]).any():
            return values[:, :most], token_ids[:, :most]
    bits = logprobs.view(torch.int32)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()  # as the floats
    last = logprobs.shape[1] - 1
    keys = (order << 32) | torch.arange(last, -1, -1, device=logprobs.device)
    token_ids = last - (keys.topk(most, dim=-1).values & 0xFFFFFFFF)
    return logprobs.gather(-1, token_ids), token_ids
