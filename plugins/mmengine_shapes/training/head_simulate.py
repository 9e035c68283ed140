"""Computes how many tokens each target pass yields with a head's drafts.

Head and target are greedy, so the number of accepted drafts depends only on where drafting begins. The head
drafts from all positions in an answer in parallel. In the simulated decode, each pass yields the accepted
drafts and one token from the target.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mmengine.config import EngineConfig
from mmengine.serve.engine.engine import Engine
from mmengine_shapes import checkpoint_path
from mmengine_shapes.training.head_batch import collate
from mmengine_shapes.training.head_data import Sample, regenerate
from mmengine_shapes.training.head_model import DraftHead
from mmengine_shapes.training.head_target import Target
from mmengine_shapes.training.held_out import held_out_items

BATCH = 50


def held_out_samples(target: Target, tasks: Sequence[str], number: int, seed: int) -> list[Sample]:
    """Return `number` held-out conversations per task, at mixed sizes, answered greedily by the target."""
    samples: list[Sample] = []
    with Engine(checkpoint_path(), config=EngineConfig(num_threads=1)) as engine:
        for task in tasks:
            items = held_out_items(task, number, None, seed)
            conversations = list(regenerate(engine, items, seed, greedy_share=1.0))
            for start in range(0, number, BATCH):
                samples += target.samples(conversations[start : start + BATCH])
    return samples


@torch.no_grad()
def accepted_from(head: DraftHead, vocabulary: Tensor, samples: Sequence[Sample], k: int) -> list[list[int]]:
    """Return how many of the k drafts the target accepts, for each sample and each drafting position."""
    batch = collate(samples)

    def token_of(step: int, logits: Tensor | None) -> Tensor:
        return batch.ids.gather(1, batch.rows + 1) if logits is None else vocabulary[logits.argmax(-1)]

    last = batch.lengths[:, None] - 1
    going, accepted = batch.valid.clone(), torch.zeros_like(batch.rows)
    for step, logits in enumerate(head.unroll(batch, k, token_of)):
        places = batch.rows + 2 + step
        truth = batch.ids.gather(1, places.clamp(max=last))
        going &= (vocabulary[logits.argmax(-1)] == truth) & (places <= last)
        accepted += going
    return [row[valid].tolist() for row, valid in zip(accepted, batch.valid, strict=True)]


def passes_of(accepted: Sequence[int], num_answer: int) -> list[int]:
    """Return how many tokens each pass yields for an answer of `num_answer` tokens.

    The prefill yields the first token and is not counted. `accepted[i]`: how many drafts are accepted if
    token i of the answer is the last known token.
    """
    yields, known = [], 0
    while known < num_answer - 1:
        taken = min(accepted[known] + 1 if known < len(accepted) else 1, num_answer - 1 - known)
        yields.append(taken)
        known += taken
    return yields


def acceptance(head: DraftHead, vocabulary: Tensor, samples: Sequence[Sample], k: int) -> float:
    """Return the mean number of tokens per pass over all answers, including the target's token.

    Answers of one token need no pass and are not counted.
    """
    passes: list[int] = []
    for start in range(0, len(samples), BATCH):
        part = samples[start : start + BATCH]
        for sample, accepted in zip(part, accepted_from(head, vocabulary, part, k), strict=True):
            passes += passes_of(accepted, len(sample.ids) - sample.num_prompt)
    return sum(passes) / max(1, len(passes))
