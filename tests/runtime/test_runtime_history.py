"""Tests suppressed tokens, typical-p, and sampling rules that depend on earlier tokens, against transformers'
logits processors.
"""

import numpy as np
import pytest
import torch

from mmengine.core.executor import Admission
from mmengine.request import Request, SamplingParams
from mmengine.runtime.rows import GRAMMAR, HISTORY, RANDOM, TYPICAL, RowColumns
from mmengine.runtime.sampling.filters import keep_typical
from mmengine.runtime.sampling.lazy_masks import uses_lazy_mask
from mmengine.runtime.sampling.runs import NOTHING, Runs
from mmengine.runtime.sampling.sample_rows import SampleRows
from mmengine.runtime.sampling.sampler import Sampler

VOCAB, ROWS = 12, 5


def rules(random):
    """Return sampling parameters with a random subset from the tested rules."""
    words = [tuple(map(int, random.integers(0, VOCAB, random.integers(1, 4)))) for _ in range(6)]
    words = list(dict.fromkeys(words))
    bias = {word: float(random.uniform(-4, 4)) for word in words[:3]} if random.random() < 0.7 else {}
    banned = words[3:] if random.random() < 0.7 else []
    ngram = int(random.integers(0, 4))
    suppressed = tuple(map(int, random.integers(0, VOCAB, 2))) if random.random() < 0.5 else ()
    return SamplingParams(
        sequence_bias=tuple(bias.items()),
        bad_words_ids=tuple(banned),
        no_repeat_ngram_size=ngram,
        suppress_tokens=suppressed,
    )


def theirs(sampling, known, logits):
    """Return transformers' processed logits, float32 [VOCAB], after the tokens `known`."""
    transformers = pytest.importorskip("transformers")
    ids, scores = torch.tensor([known]), torch.from_numpy(logits.copy())[None]
    if sampling.sequence_bias:
        scores = transformers.SequenceBiasLogitsProcessor(dict(sampling.sequence_bias))(ids, scores)
    if sampling.no_repeat_ngram_size:
        scores = transformers.NoRepeatNGramLogitsProcessor(sampling.no_repeat_ngram_size)(ids, scores)
    if sampling.bad_words_ids:
        words = [list(word) for word in sampling.bad_words_ids]
        scores = transformers.NoBadWordsLogitsProcessor(words)(ids, scores)
    if sampling.suppress_tokens:
        scores = transformers.SuppressTokensLogitsProcessor(list(sampling.suppress_tokens))(ids, scores)
    return scores[0].numpy()


class Table:
    """A sampler with ROWS rows, and each row's tokens and sampling parameters as plain lists."""

    def __init__(self, random):
        self.random = random
        self.columns = RowColumns(ROWS, VOCAB, (), lambda ids, media: (np.zeros((3, len(ids))), 0))
        self.sampler = Sampler(self.columns, ROWS, VOCAB, torch.device("cpu"))
        self.known, self.sampling = [[] for _ in range(ROWS)], [None] * ROWS

    def admit(self, row):
        """Admit a request to `row`, perhaps with output tokens, as after a preemption."""
        known = self.random.integers(0, VOCAB, self.random.integers(1, 20)).astype(np.int32)
        self.known[row], self.sampling[row] = known.tolist(), rules(self.random)
        prompt = known[: self.random.integers(1, len(known) + 1)]
        admission = Admission(row, Request(f"{row}", prompt, self.sampling[row]), known)
        self.columns.admit(admission)
        self.sampler.admit(admission)

    def logits(self, count):
        return self.random.standard_normal((count, VOCAB)).astype(np.float32) * 3

    def expect(self, row, drafts, logits, token):
        want = theirs(self.sampling[row], [*self.known[row], *drafts], logits)
        if np.isfinite(want).any():
            assert want[token] >= want.max() - 1e-5, (self.sampling[row], self.known[row], drafts)


def test_tokens_equal_transformers_processors():
    table = Table(np.random.default_rng(1))
    random = table.random
    for row in range(ROWS):
        table.admit(row)
    for turn in range(150):
        rows = random.permutation(ROWS)[: random.integers(1, ROWS + 1)]
        num_known = np.array([len(table.known[row]) for row in rows])
        logits = table.logits(len(rows))
        batch = SampleRows.of(table.columns, rows, num_known)
        tokens = table.sampler.sample(torch.from_numpy(logits.copy()), batch).token_ids.tolist()
        for index, row in enumerate(rows):
            table.expect(row, [], logits[index], tokens[index])
            table.known[row].append(tokens[index])
        if turn % 6 == 0:
            table.admit(int(random.integers(0, ROWS)))


def test_drafts_count_as_earlier_tokens_until_rejected():
    table = Table(np.random.default_rng(2))
    random = table.random
    for row in range(ROWS):
        table.admit(row)
    for turn in range(100):
        rows = random.permutation(ROWS)[: random.integers(1, ROWS + 1)]
        drafts = [random.integers(0, VOCAB, random.integers(0, 4)).tolist() for _ in rows]
        sizes = np.array([len(draft) + 1 for draft in drafts])
        ends = np.cumsum(sizes)
        row_of = np.repeat(np.arange(len(rows)), sizes)
        follows = np.array([token for draft in drafts for token in (*draft, NOTHING)], np.int32)
        runs = Runs(np.arange(ends[-1]), ends - sizes, row_of, follows)
        depth = np.arange(ends[-1]) - runs.first[row_of]
        num_known = np.array([len(table.known[row]) for row in rows])[row_of] + depth
        logits = table.logits(len(row_of))
        batch = SampleRows.of(table.columns, rows[row_of], num_known, runs)
        sampled = table.sampler.sample(torch.from_numpy(logits.copy()), batch).token_ids
        for position, token in enumerate(sampled.tolist()):
            before = drafts[row_of[position]][: depth[position]]
            table.expect(rows[row_of[position]], before, logits[position], token)
        counts = runs.counts(sampled.numpy().astype(np.int32))
        for each in range(int(counts.max())):  # a token per row at a time, as in result_reader.py
            positions = runs.first[counts > each] + each
            table.sampler.count(batch.take(positions), sampled[positions])
        for index, row in enumerate(rows):
            first = int(runs.first[index])
            table.known[row] += sampled[first : first + int(counts[index])].tolist()
        if turn % 6 == 0:
            table.admit(int(random.integers(0, ROWS)))


def test_typical_p_equals_transformers():
    transformers = pytest.importorskip("transformers")
    logits = torch.randn(20, 40, generator=torch.Generator().manual_seed(3)) * 3
    logits[:, 7] = float("-inf")
    for mass in (0.2, 0.5, 0.9):
        kept = keep_typical(logits, torch.full((20, 1), mass)).isfinite()
        want = transformers.TypicalLogitsWarper(mass)(None, logits.clone()).isfinite()
        assert torch.equal(kept, want)


def test_a_grammar_with_typical_p_is_masked_first():
    """Typical-p must see masked logits, because it compares each token with all tokens."""
    options = np.array([GRAMMAR | RANDOM, GRAMMAR | RANDOM | TYPICAL, GRAMMAR | RANDOM | HISTORY])
    assert uses_lazy_mask(options).tolist() == [True, False, True]
