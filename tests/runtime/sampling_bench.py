"""Random sampling parameters and logits for tests of samplers, and a sampler with one row per request
(Bench).
"""

import numpy as np
import torch

from mmengine.core.executor import Admission
from mmengine.request import Request, SamplingParams
from mmengine.runtime.rows import RowColumns
from mmengine.runtime.sampling.sample_rows import SampleRows
from mmengine.runtime.sampling.sampler import Sampler

CPU = torch.device("cpu")


class Bench:
    def __init__(self, vocab_size, samplings, random):
        count = len(samplings)
        self.columns = RowColumns(count, vocab_size, (), lambda ids, media: (np.zeros((3, len(ids))), 0))
        self.sampler = Sampler(self.columns, count, vocab_size, CPU)
        for row, sampling in enumerate(samplings):
            request = Request(f"r{row}", np.array([0, 1], np.int32), sampling, sample_index=row % 3)
            self.columns.admit(Admission(row, request, request.prompt_token_ids))
            self.sampler.admit(Admission(row, request, request.prompt_token_ids))
        known = 2 + random.integers(0, 2000, count).astype(np.int32)
        self.batch = SampleRows.of(self.columns, np.arange(count, dtype=np.int32), known)

    def tokens(self, logits):
        return self.sampler.sample(logits, self.batch).token_ids.tolist()


def random_sampling(random, vocab_size):
    return SamplingParams(
        seed=int(random.integers(-(2**62), 2**62)),
        temperature=float(random.choice([1e-12, 0.01, 0.3, 0.7, 1.0, 2.0, 20.0])),
        top_k=int(random.choice([0, 1, 2, 20, 50, max(1, vocab_size // 2), vocab_size])),
        top_p=float(random.choice([1.0, 0.9, 0.5, 0.05, 0.99, 0.999999])),
        min_p=float(random.choice([0.0, 0.0, 0.05, 0.5])),
    )


def random_logits(random, count, vocab_size):
    """Return random logits, float32 [count, vocab_size]: flat or peaked, sometimes with many ties or excluded
    tokens.
    """
    logits = random.standard_normal((count, vocab_size)) * random.choice([0.1, 1, 3, 10])
    if random.random() < 0.3:
        logits = (logits * 2).round() / 2
    if random.random() < 0.3:
        logits[:, random.integers(0, vocab_size, vocab_size // 3)] = -np.inf
    return torch.from_numpy(logits.astype(np.float32))
