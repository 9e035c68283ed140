"""Measures how close output logits and router logits are to a tie. The unit is a step, the distance between
neighbouring bfloat16 numbers.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

# Maximum distance in steps at which the last chosen and the first rejected expert count as tied.
NEAR_EXPERTS = 2


def steps_below(logits: Tensor, tokens: Sequence[int]) -> Tensor:
    """Return each token's distance below the largest logit in bfloat16 steps, float32 [n]."""
    margins = logits.amax(-1) - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return margins / _step(logits.abs().amax(-1))


@contextmanager
def routers(reference: object) -> Iterator[list[tuple[Tensor, int]]]:
    """Yield a list that collects a transformers model's router outputs inside the context. Each item is a
    pair: logits [n, number of experts], and the number of experts per token.
    """
    said: list[tuple[Tensor, int]] = []

    def hear(module: torch.nn.Module, _: object, out: tuple[Tensor, ...]) -> None:
        said.append((out[0].float(), int(vars(module)["top_k"])))

    assert isinstance(reference, torch.nn.Module)
    found = [module for module in reference.modules() if type(module).__name__.endswith("TopKRouter")]
    handles = [module.register_forward_hook(hear) for module in found]
    try:
        yield said
    finally:
        for handle in handles:
            handle.remove()


def near_experts(said: Sequence[tuple[Tensor, int]]) -> Tensor:
    """Return bool [n]: True if a token's last chosen and first rejected expert nearly tie in some layer."""
    near = torch.zeros((), dtype=torch.bool)
    for logits, top_k in said:
        if top_k < logits.shape[1]:
            first, *_, last, behind = logits.topk(top_k + 1).values.unbind(1)
            near = near | (last - behind <= NEAR_EXPERTS * _step(torch.maximum(first.abs(), behind.abs())))
    return near


def _step(largest: Tensor) -> Tensor:
    """Return the distance between neighbouring bfloat16 numbers of the magnitude of `largest`."""
    return torch.exp2(torch.floor(torch.log2(largest)) - 7)
