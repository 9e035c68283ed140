"""Tests penalties. On a CPU, the sampler changes only the logits of tokens that a row already has. On a GPU,
it computes the penalty for the whole vocabulary. The results must be equal bit by bit.
"""

import numpy as np
import pytest
import torch

from mmengine.core.executor import Admission
from mmengine.request import Request, SamplingParams
from mmengine.runtime.rows import RowColumns
from mmengine.runtime.sampling.penalties import TokenCounts

VOCAB, ROWS = 50, 6


def test_listed_and_whole_rows_agree():
    random = np.random.default_rng(0)
    columns = RowColumns(ROWS, VOCAB, (), lambda ids, media: (np.zeros((3, len(ids))), 0))
    counts = TokenCounts(ROWS, VOCAB, torch.device("cpu"))

    def admit(row):
        known = random.integers(0, VOCAB, random.integers(1, 90)).astype(np.int32)
        sampling = SamplingParams(presence_penalty=0.5)
        admission = Admission(row, Request(f"{row}", known[: len(known) // 2 + 1], sampling), known)
        columns.admit(admission)
        counts.admit(admission, columns)

    for row in range(ROWS):
        admit(row)
    for turn in range(120):  # more tokens than fit into a list's initial memory
        rows = random.permutation(ROWS)[: random.integers(1, ROWS + 1)]
        logits = torch.from_numpy(random.standard_normal((len(rows) + 2, VOCAB)).astype(np.float32) * 3)
        penalties = random.uniform(-2, 2, (3, len(rows), 1)).astype(np.float32)
        penalties[0] = random.uniform(0.5, 2, (len(rows), 1))
        selected = np.sort(random.permutation(len(logits))[: len(rows)])
        want = logits.clone()
        want[torch.from_numpy(selected)] = counts.penalise(
            logits[selected].clone(), rows, torch.from_numpy(penalties)
        )
        counts.penalise_on_cpu(logits.numpy(), selected, rows, penalties)
        assert torch.equal(logits, want)
        counts.count(rows, torch.from_numpy(random.integers(-1, VOCAB, len(rows))))
        if turn % 10 == 0:
            admit(int(random.integers(0, ROWS)))


def test_lists_grow_with_a_row_that_repeats_nothing():
    # Each of 300 output tokens is new, so the row's token list outgrows its first size.
    vocab = 1000
    columns = RowColumns(1, vocab, (), lambda ids, media: (np.zeros((3, len(ids))), 0))
    counts = TokenCounts(1, vocab, torch.device("cpu"))
    prompt = np.arange(60, dtype=np.int32)
    admission = Admission(0, Request("r", prompt, SamplingParams(frequency_penalty=1.0)), prompt)
    columns.admit(admission)
    counts.admit(admission, columns)
    for token in range(500, 800):
        counts.count(np.array([0]), torch.tensor([token]))
    logits = np.zeros((1, vocab), np.float32)
    counts.penalise_on_cpu(
        logits, np.array([0]), np.array([0]), np.array([[[1.0]], [[0.0]], [[1.0]]], np.float32)
    )
    assert np.flatnonzero(logits[0]).tolist() == list(range(500, 800))


def test_a_row_that_found_no_memory_leaves_no_place_behind(monkeypatch):
    # After an admission that ran out of memory, the same row can be admitted again.
    columns = RowColumns(2, VOCAB, (), lambda ids, media: (np.zeros((3, len(ids))), 0))
    counts = TokenCounts(2, VOCAB, torch.device("cpu"))
    prompt = np.arange(9, dtype=np.int32)
    admissions = [
        Admission(row, Request(f"{row}", prompt, SamplingParams(presence_penalty=0.5)), prompt)
        for row in range(2)
    ]
    for admission in admissions:
        columns.admit(admission)

    def full(*tensors):
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError):
        patched.setattr(torch, "cat", full)
        counts.admit(admissions[0], columns)
    for admission in admissions:
        counts.admit(admission, columns)
    logits = torch.zeros(2, VOCAB)
    counts.penalise_on_cpu(
        logits.numpy(),
        np.arange(2),
        np.arange(2),
        np.array([1, 1, 0], np.float32).reshape(3, 1, 1).repeat(2, 1),
    )
    assert (logits[0] == logits[1]).all()
