"""Finds each row's most likely tokens. If tokens are equally likely, the lowest token id comes first."""

import numpy as np
import torch


def topk_tokens(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's largest logit [r], and its token, int64 [r].

    NaN counts as the largest logit.
    """
    if logits.device.type != "cpu":
        return logits.max(dim=-1)
    values = logits.numpy()  # numpy's argmax is several times as fast as torch's
    token_ids = values.argmax(axis=-1)
    return torch.from_numpy(values[np.arange(len(values)), token_ids]), torch.from_numpy(token_ids)


def topk_tokens_of(logprobs: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's `most` largest values and their tokens, both [r, most], in descending order.

    `logprobs`: float32 [r, vocab_size]. Equal values are ordered by token id; in `torch.topk` their order
    depends on `most` and on the row count.
    """
    if logprobs.device.type == "cpu":  # on a CPU, a check for equal values is cheap
        values, token_ids = logprobs.topk(min(most + 1, logprobs.shape[1]), dim=-1)
        if not (values[:, 1:] == values[:, :-1]).any():
            return values[:, :most], token_ids[:, :most]
    bits = logprobs.view(torch.int32)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()  # integers with the floats' order
    last = logprobs.shape[1] - 1
    keys = (order << 32) | torch.arange(last, -1, -1, device=logprobs.device)
    token_ids = last - (keys.topk(most, dim=-1).values & 0xFFFFFFFF)
    return logprobs.gather(-1, token_ids), token_ids
