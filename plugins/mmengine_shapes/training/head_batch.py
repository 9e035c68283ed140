"""Groups a draft head's training samples into padded batches of similar lengths."""

import random
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from mmengine_shapes.training.head_data import Sample
from mmengine_shapes.training.head_model import HeadBatch

POOL = 16  # Number of batches whose samples are sorted together by length.


def collate(samples: Sequence[Sample]) -> HeadBatch:
    """Return the samples as a batch, padded at the end. `rows` has the positions at which drafts begin: the
    last prompt token, and every answer token except the last two. After these two, a draft has no token to
    predict.
    """
    length = max(len(sample.ids) for sample in samples)
    counts = [max(1, len(sample.ids) - sample.num_prompt - 1) for sample in samples]
    rows = torch.stack(
        [
            (torch.arange(max(counts)).clamp(max=count - 1) + sample.num_prompt - 1)
            for sample, count in zip(samples, counts, strict=True)
        ]
    )
    return HeadBatch(
        ids=torch.stack([F.pad(sample.ids, (0, length - len(sample.ids))) for sample in samples]),
        positions=torch.stack(
            [F.pad(sample.positions, (0, length - len(sample.ids))) for sample in samples], 1
        ),
        aux_hidden_states=torch.stack(
            [F.pad(sample.aux_hidden_states, (0, 0, 0, 0, 0, length - len(sample.ids))) for sample in samples]
        ).float(),
        rows=rows,
        valid=torch.arange(max(counts)) < torch.tensor(counts)[:, None],
        lengths=torch.tensor([len(sample.ids) for sample in samples]),
    )


def batches(samples: Sequence[Sample], size: int, seed: int) -> Iterator[HeadBatch]:
    """Yield batches endlessly. Each epoch has a new order. A batch has samples with similar lengths, to save
    padding.
    """
    rng = random.Random(f"batches {seed}")
    while True:
        order = rng.sample(range(len(samples)), len(samples))
        for start in range(0, len(order), POOL * size):
            pool = order[start : start + POOL * size]
            pool.sort(key=lambda index: len(samples[index].ids))
            parts = [pool[k : k + size] for k in range(0, len(pool), size)]
            rng.shuffle(parts)
            for part in parts:
                yield collate([samples[index] for index in part])
