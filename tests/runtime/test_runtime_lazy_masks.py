"""Tests lazy masks, which are computed only if a grammar refuses the sampled token. Masks that are applied
before sampling must give the same tokens.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmengine.core.executor import ERROR_TOKEN, Admission
from mmengine.request import GrammarRequest, Request, SamplingParams
from mmengine.runtime.rows import RowColumns
from mmengine.runtime.sampling.lazy_masks import apply_lazy_masks
from mmengine.runtime.sampling.runs import NOTHING, Runs
from mmengine.runtime.sampling.sample_rows import SampleRows
from mmengine.runtime.sampling.sampler import Sampler
from mmengine.structured_output.engines.llguidance.backend import LLGuidance
from mmengine.structured_output.request.spec import grammar_of
from mmengine.structured_output.rows.rows import Masks, RowMatchers

WORDS = [b"a", b"b", b"c", b"ab", b"bc", b"abc", b"x"]
EOS, VOCAB = len(WORDS), len(WORDS) + 1
FORMS = ["(ab|ba|c){1,3}", "a{2}b*", "abcx", "x|abc?"]


def encode(text):
    rest, found = text.encode(), []
    while rest:
        best = max((word for word in WORDS if rest.startswith(word)), key=len)
        found.append(WORDS.index(best))
        rest = rest[len(best) :]
    return found


@pytest.fixture(scope="module")
def backend():
    return LLGuidance(lambda: [*WORDS, b"<end>"], encode, frozenset({EOS}), (EOS,), VOCAB)


class Bench:
    """A sampler and grammar matchers, with a row for each grammar. Every second row samples at temperature 1
    with a presence penalty.
    """

    def __init__(self, backend, forms):
        compiled = {
            str(n): backend.compile(grammar_of(grammar={"regex": form})) for n, form in enumerate(forms)
        }
        self.columns = RowColumns(
            len(forms), VOCAB, (EOS,), lambda ids, _: (np.zeros((3, len(ids)), np.int32), 0)
        )
        self.sampler = Sampler(self.columns, len(forms), VOCAB, torch.device("cpu"))
        self.matchers = RowMatchers(backend, compiled.get, VOCAB)
        self.known = np.full(len(forms), 1)
        for row in range(len(forms)):
            how = {"temperature": 1.0, "seed": row, "presence_penalty": 0.5} if row % 2 else {}
            prompt = np.array([0], np.int32)
            request = Request(
                str(row), prompt, SamplingParams(**how), grammar=GrammarRequest("regex", "held elsewhere")
            )
            self.columns.admit(Admission(row, request, prompt))
            self.sampler.admit(Admission(row, request, prompt))
            self.matchers.admit(row, request, prompt)

    def one_by_one(self, logits, row, drafts):
        """Sample the row's tokens one at a time with masks, up to the first rejected draft. Return the
        tokens, and whether the grammar is complete.
        """
        said, complete = [], False
        for depth, line in enumerate(logits):
            batch = SampleRows.of(self.columns, np.array([row]), self.known[[row]] + depth)
            masks = Masks(np.arange(1), self.matchers.masks([row])[0])
            token = int(self.sampler.sample(line[None].clone(), batch, masks).token_ids[0])
            said.append(token)
            if token in (EOS, ERROR_TOKEN):
                break
            complete = bool(self.matchers.advance([row], [[token]])[0])
            if complete or depth == len(drafts) or token != drafts[depth]:
                break
        return said, complete


def runs_of(drafts):
    sizes = np.array([len(each) + 1 for each in drafts])
    first = np.cumsum(sizes) - sizes
    follows = np.concatenate([[*each, NOTHING] for each in drafts]).astype(np.int32)
    return Runs(np.arange(sizes.sum()), first, np.repeat(np.arange(len(sizes)), sizes), follows)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_lazy_masks_give_the_same_tokens_as_masks(backend, data):
    forms = data.draw(st.lists(st.sampled_from(FORMS), min_size=1, max_size=4))
    drafts = [data.draw(st.lists(st.integers(0, EOS - 1), max_size=4)) for _ in forms]
    runs = runs_of(drafts)
    flat, plain = Bench(backend, forms), Bench(backend, forms)
    logits = torch.from_numpy(
        np.random.default_rng(data.draw(st.integers(0, 2**20)))
        .normal(0, 3, (len(runs.places), VOCAB))
        .astype(np.float32)
    )
    if data.draw(st.booleans()):
        logits[data.draw(st.integers(0, len(logits) - 1))] = float("nan")
    depth = np.arange(len(runs.places)) - runs.first[runs.row_of]
    batch = SampleRows.of(flat.columns, runs.row_of, flat.known[runs.row_of] + depth, runs)
    chosen = flat.sampler.choose(logits, batch)
    lazy_masked = apply_lazy_masks(flat.sampler, flat.matchers, chosen, batch, runs, range(len(forms)))
    assert not lazy_masked.errors
    token_ids = flat.sampler.conclude(chosen, batch).token_ids.numpy()
    counts = runs.counts(token_ids)
    for row, ahead in enumerate(drafts):
        start = int(runs.first[row])
        want, complete = plain.one_by_one(logits[start : start + len(ahead) + 1], row, ahead)
        found = token_ids[start : start + lazy_masked.complete.get(row, int(counts[row]))].tolist()
        if ERROR_TOKEN in found:
            found = found[: found.index(ERROR_TOKEN) + 1]
        assert found == want
        assert (row in lazy_masked.complete) == complete
        assert flat.matchers.said(row) == [token for token in want if token not in (EOS, ERROR_TOKEN)]
