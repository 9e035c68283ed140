"""Tests the default drafters: the grammar and the checkpoint's draft head. A run of drafts may begin with the
grammar's tokens and end with the head's.
"""

import shutil

import numpy as np
import pytest
from structlog.testing import capture_logs

from mmengine.build import build
from mmengine.config import EngineConfig
from mmengine.native import library
from mmengine.runtime.drafting import drafters
from mmengine.runtime.drafting.next_drafts import Drafting
from mmengine.serve.engine.engine import Engine
from mmengine.serve.prompt.options import Options, make_sampling
from mmengine.serve.prompt.prompt import Prompt
from mmengine.structured_output.request.spec import grammar_of
from mmengine_shapes import checkpoint_path, draft_head_path

ENUM = {"enum": ["a red circle above all", "a blue square above all"]}
PROPERTIES = {"first": ENUM, "second_of_them": ENUM, "third_of_them": ENUM}
SCHEMA = {
    "type": "object",
    "properties": PROPERTIES,
    "required": list(PROPERTIES),
    "additionalProperties": False,
}
FORM = grammar_of({"type": "json_schema", "json_schema": {"schema": SCHEMA}})


def found(**settings):
    built = build(config=EngineConfig(**settings))
    drafting = built.executor._runner._drafting
    names = [] if drafting is None else drafting.names
    built.close()
    return names, built.config.lookahead_tokens


class Point:
    def __init__(self, folder):
        self._folder = folder

    def load(self):
        return lambda: self._folder


def test_the_checkpoints_head_drafts_after_the_grammar(monkeypatch):
    if library.load() is None:
        pytest.skip(library.describe())
    names, lookahead = found()
    assert names == ["grammar", "eagle3"] and lookahead > 0
    assert found(num_draft_tokens=3) == (names, 3)
    assert found(token_budget=16, max_num_seqs=4, num_draft_tokens=15) == (names, 15)
    assert found(spec="grammar") == (["grammar"], 0)
    assert found(max_in_flight=2) == (names, lookahead)
    assert found(compat="vllm") == found(spec="none") == ([], 0)
    monkeypatch.setattr(library, "load", lambda: None)
    assert found() == (["grammar"], 0), "without kernels a chain takes longer than it saves"


def test_another_checkpoint_has_no_head(tmp_path):
    shutil.copytree(checkpoint_path(), tmp_path / "copy")
    built = build(tmp_path / "copy", config=EngineConfig())
    assert built.executor._runner._drafting.names == ["grammar"] and not built.config.lookahead_tokens
    built.close()


def test_a_head_that_is_damaged_is_left_out(tmp_path, monkeypatch):
    folder = shutil.copytree(draft_head_path(), tmp_path / "head")
    (folder / "config.json").write_text("{}")
    monkeypatch.setattr(drafters, "entry_points", lambda group: [Point(folder)])
    with capture_logs() as lines:
        assert found() == (["grammar"], 0)
    assert any("draft head is not used" in line["event"] for line in lines)


def test_a_run_has_forced_tokens_and_then_the_heads_drafts(monkeypatch):
    """The batch has rows with and without grammars. A run of drafts is counted for the drafter that proposed
    the run's last draft.
    """
    if library.load() is None:
        pytest.skip(library.describe())
    runs, ask = [], Drafting._propose

    def watched(self, number, rows, most, given=None):
        proposed = ask(self, number, rows, most, given)
        if proposed is not None:
            before = np.zeros(len(rows), int) if given is None else given.counts
            bound = [self._follows[0, row] for row in rows]
            runs.extend(zip([number] * len(rows), bound, before.tolist(), proposed.counts.tolist()))
        return proposed

    monkeypatch.setattr(Drafting, "_propose", watched)
    texts = {}
    for spec in ("none", "auto"):
        config = EngineConfig(spec=spec, draft_policy="all", num_draft_tokens=15 if spec == "auto" else 0)
        with Engine(config=config) as engine:
            sampling = make_sampling({"max_tokens": 60, "temperature": 0.7, "seed": 1})
            for number in range(6):
                prepared = Prompt.of("Describe a circle, at length.").prepare(engine.processor)
                engine.submit_prepared(
                    prepared, Options(sampling, f"{number}", grammar=FORM if number % 2 else None)
                )
            answers = {}
            while not engine.is_idle:
                for output in engine.step():
                    if output.completion is not None:
                        answers[output.request_id] = output.completion.token_ids
            texts[spec], stats = answers, engine.stats()
    assert texts["auto"] == texts["none"]
    mixed = [(before, own) for number, _, before, own in runs if number == 1 and before]
    assert len(mixed) > 3 and max(before + own for before, own in mixed) > 7 >= max(own for _, own in mixed)
    assert max(before for before, _ in mixed) > 7, "the head continues after more than 7 forced tokens"
    assert all(is_bound for number, is_bound, *_ in runs if number == 0)
    assert any(number == 1 and not is_bound for number, is_bound, *_ in runs)
    assert set(stats.drafts) == {0, 1} or set(stats.drafts) == {1}
