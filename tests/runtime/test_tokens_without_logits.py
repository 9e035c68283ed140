"""Tests prompts with token ids beyond the logits, such as Molmo 2's image placeholders."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmengine.core.executor import Admission
from mmengine.request import Request, SamplingParams
from mmengine.runtime.rows import RowColumns
from mmengine.runtime.sampling.history import _repeats
from mmengine.runtime.sampling.penalties import TokenCounts
from mmengine.runtime.sampling.prompt_logprobs import _Prompt, _take
from mmengine.spec_decode.base import within_vocabulary

VOCAB = 20
PROMPT = np.array([3, 25, 3, 25, 21, 7], np.int32)


def test_the_log_probability_of_such_a_token_is_minus_infinity():
    logits = torch.randn(len(PROMPT) - 1, VOCAB)
    prompt = _Prompt(PROMPT, np.zeros((len(PROMPT), 3), np.int32), np.zeros((len(PROMPT), 3), np.float32))
    _take(prompt, 0, len(PROMPT) - 1, logits)
    assert prompt.ids[:, 0].tolist() == [0, *PROMPT[1:].tolist()]
    wanted = logits.log_softmax(-1)
    assert prompt.logprobs[1:, 0].tolist() == [
        float(wanted[place, token]) if token < VOCAB else -np.inf
        for place, token in enumerate(PROMPT[1:].tolist())
    ]


def test_penalties_ignore_such_tokens():
    columns = RowColumns(1, VOCAB, (), lambda ids, media: (np.zeros((3, len(ids))), 0))
    counts = TokenCounts(1, VOCAB, torch.device("cpu"))
    admission = Admission(0, Request("r", PROMPT, SamplingParams(repetition_penalty=2.0)), PROMPT)
    columns.admit(admission)
    counts.admit(admission, columns)
    logits = np.ones((1, VOCAB), np.float32)
    penalties = np.array([[[2.0]], [[0.0]], [[0.0]]], np.float32)
    counts.penalise_on_cpu(logits, np.array([0]), np.array([0]), penalties)
    assert np.flatnonzero(logits[0] != 1).tolist() == [3, 7]


def test_such_tokens_are_never_banned_as_repeats():
    tokens = torch.tensor([[3, 25, 3, 7, 3]])
    banned = _repeats(tokens, torch.tensor([5]), torch.tensor([2]), 2, VOCAB)
    assert banned[0].nonzero().flatten().tolist() == [7]


@given(st.lists(st.lists(st.integers(0, VOCAB + 3), max_size=6), max_size=5))
def test_drafts_end_before_such_a_token(rows):
    drafts = np.array([token for row in rows for token in row], np.int32)
    cut = within_vocabulary(drafts, np.array([len(row) for row in rows], np.intp), VOCAB)
    wanted = [row[: next((n for n, token in enumerate(row) if token >= VOCAB), len(row))] for row in rows]
    assert cut.token_ids.tolist() == [token for row in wanted for token in row]
    assert cut.counts.tolist() == [len(row) for row in wanted]
