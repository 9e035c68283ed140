"""Tests drafts before, across and after the reasoning's end marker."""

from dataclasses import replace

import numpy as np
import pytest

import mmengine.build
from mmengine.config import EngineConfig
from mmengine.serve.engine.engine import Engine
from mmengine.spec_decode.base import Proposed
from mmengine.structured_output.grammar_start import find_end
from tests.serve.reasoning_jobs import FORMS, answers, check, jobs

pytest.importorskip("mmengine_shapes")


class Script:
    """Drafts a request's known tokens, with a wrong token in about half of the drafts.

    Counts the right and the wrong drafts that cross the end marker.
    """

    name = "script"

    def __init__(self, texts, marker, wrong):
        self._texts, self._marker, self._wrong = texts, marker, wrong
        self._rows, self._random = {}, np.random.default_rng(1)
        self.num_right = self.num_wrong = 0

    def admit(self, row, request, texts):
        self._rows[row] = self._texts[request.request_id]
        return True

    def leave(self, row, texts):
        pass

    def propose(self, rows, texts, most):
        places = (texts.lengths - texts.num_prompt)[rows]
        drafts = [self._of(*each) for each in zip(rows.tolist(), places.tolist(), most.tolist(), strict=True)]
        counts = np.array([len(each) for each in drafts], np.intp)
        return Proposed(np.array([token for each in drafts for token in each], np.int32), counts)

    def _of(self, row, place, room):
        text = self._rows[row]
        drafts = text[place : place + int(self._random.integers(room + 1))]
        is_wrong = len(drafts) > 0 and bool(self._random.integers(2))
        if is_wrong:
            at = int(self._random.integers(len(drafts)))
            drafts[at] = [each for each in self._wrong if each != drafts[at]][int(self._random.integers(3))]
        end = find_end(text, self._marker)
        if end is not None and place < end < place + len(drafts):
            self.num_wrong += is_wrong
            self.num_right += not is_wrong
        return drafts


@pytest.mark.parametrize(
    ("weights", "temperature", "end", "bias"),
    [("trained", 0.0, "</think>", 14.0), ("random", 1.5, "</think>", 3.5), ("random", 1.5, "So", 6.0)],
)
def test_drafts_over_the_end_of_the_reasoning_change_nothing(
    weights, temperature, end, bias, random_weights, monkeypatch
):
    """About half the drafts have a wrong token, such as EOS or an end marker token."""
    settings = {"reasoning_end": end, "token_budget": 200, "max_num_seqs": 8}
    model = random_weights if weights == "random" else None
    with Engine(model, dtype="float32", config=EngineConfig(spec="none", **settings)) as engine:
        marker = engine.processor.tokenizer.encode(end, allow_special=True)
        asked = [
            (form, replace(options, request_id=f"r{number}"))
            for number, (form, options) in enumerate(jobs(30, temperature, marker, bias))
        ]
        alone = answers(engine, asked)
        num_steps = engine.stats().steps
        check(engine, asked, alone, marker)
    texts = {f"r{number}": answer.token_ids for number, answer in alone.items()}
    script = Script(texts, marker, [*marker, 1512, 7, 50, 1535])
    monkeypatch.setattr(mmengine.build, "make_drafters", lambda *given: [script])
    sizes = {"num_draft_tokens": 8, "num_blocks": 30, "max_model_len": 256}
    config = EngineConfig(draft_policy="all", **sizes, **settings)
    with Engine(model, dtype="float32", config=config) as engine:
        drafted = answers(engine, asked)
        assert engine.stats().num_preemptions and engine.stats().steps < num_steps
    print(f"{temperature}, {end}: {script.num_right} right runs over the end, {script.num_wrong} wrong")
    assert script.num_right >= 3 and script.num_wrong >= 3
    for number in alone:
        assert drafted[number].choices == alone[number].choices


def test_the_grammar_drafts_from_where_the_reasoning_ends(random_weights, monkeypatch):
    drafters_of, seen = mmengine.build.make_drafters, []

    def spied(*given):
        made, matchers = drafters_of(*given), given[1]
        inner = made[0].propose

        def propose(rows, *asked):
            found = inner(rows, *asked)
            counts = [0] * len(rows) if found is None else found.counts.tolist()
            seen.extend((matchers.said(row) is not None, n) for row, n in zip(rows.tolist(), counts))
            return found

        made[0].propose = propose
        return made

    monkeypatch.setattr(mmengine.build, "make_drafters", spied)
    config = EngineConfig(spec="grammar", draft_policy="all")
    with Engine(random_weights, dtype="float32", config=config) as engine:
        check(engine, asked := list(jobs(12, 1.5, [1535], 3.5)), answers(engine, asked), [1535])
    before, behind = ([count for has_begun, count in seen if has_begun is kind] for kind in (False, True))
    assert len(before) > 50 and not any(before) and sum(behind) > 20


@pytest.mark.parametrize("others", [{"grammar_backend": "xgrammar"}, {"spec": "ngram"}, {"spec": "suffix"}])
def test_every_grammar_engine_and_drafter_finds_the_end(others, random_weights):
    if "grammar_backend" in others:
        pytest.importorskip("xgrammar")
    config = EngineConfig(draft_policy="all", **others)
    with Engine(random_weights, dtype="float32", config=config) as engine:
        asked = list(jobs(20, 1.5, [1535], 3.5, FORMS))
        stopped, lengths = check(engine, asked, answers(engine, asked), [1535])
    assert stopped >= 5 and len(lengths) >= 10


def test_a_draft_head_guesses_over_the_end_too():
    # Drafts of the EAGLE-3 head may cross the end marker. The answers equal the answers without drafts.
    asked, found = list(jobs(12, 1.0, [1535], 14.0)), []
    for options in ({"spec": "none"}, {"spec": "eagle3"}):
        with Engine(dtype="float32", config=EngineConfig(**options)) as engine:
            answered = answers(engine, asked)
            assert check(engine, asked, answered, [1535])[0] >= 3
        found.append([answered[number].choices for number in range(len(asked))])
    assert found[0] == found[1]
