"""Tests drafts with two steps in flight: the answers stay the same, and steps without drafts overlap."""

import random
from pathlib import Path

import numpy as np
import pytest

from mmengine.config import EngineConfig
from mmengine.replay.verify import verify
from mmengine.runtime import result_reader as reading
from mmengine.runtime.sampling import grammar_rows as forms
from mmengine.serve.engine.engine import Engine
from mmengine_shapes import draft_head_path
from tests.log_copies import copied
from tests.spec_decode.draft_control import Clock, LaunchedAhead
from tests.spec_decode.equality import Asked, answers, assert_same, drawn_alike, mixed
from tests.spec_decode.test_draft_crash import gone_on
from tests.spec_decode.test_draft_equality import RECOMPUTE, SWAP, WIDE

HEAD = f"eagle3={draft_head_path()}"
TWO = {"max_in_flight": 2, "draft_policy": "goodput"}


def steer(executor):
    """Make `executor` launch steps ahead, as on a GPU. Every 25 steps, drafts change from cheap to expensive
    or back.
    """
    LaunchedAhead(executor)
    Clock(executor)


@pytest.fixture(scope="module")
def wanted():
    """Return requests, and their answers without drafts. Only the first 20 requests may have grammars."""
    every = list(mixed(48, seed=31, most_tokens=60).by_id.items())
    plain = [(name, each) for name, each in every[20:] if each[1].grammar is None]
    asked = Asked(dict([*every[:20], *plain]))
    return asked, answers(asked, spec="none", **WIDE)


@pytest.mark.parametrize(
    "spec, pool", [("auto", SWAP), (HEAD, RECOMPUTE), ("grammar", RECOMPUTE)], ids=["auto", "head", "grammar"]
)
def test_answers_are_the_same(spec, pool, wanted, tmp_path):
    asked, want = wanted
    found = answers(asked, None, tmp_path, random.Random(2), steer, spec=spec, **TWO, **pool)
    assert_same(found, want)
    assert found.drafting.failures == [0] * len(found.drafting.failures) and verify(tmp_path).ok
    how = found.stats.overlap
    print(spec, how, {number: str(counts) for number, counts in found.stats.drafts.items()})
    assert min(how["ahead"], how["drafts"], how["forms"]) > 5 and found.stats.drafts


@pytest.mark.parametrize(("by_masks", "pool"), [(True, RECOMPUTE), (False, SWAP)], ids=["masks", "following"])
def test_grammars_do_not_prevent_overlap(by_masks, pool, wanted, tmp_path, monkeypatch):
    """Grammars are enforced with masks, as on a GPU (`by_masks`), or with lazy masks, as on a CPU."""
    asked, want = wanted
    if by_masks:
        for module in (forms, reading):
            monkeypatch.setattr(module, "uses_lazy_mask", lambda options: np.zeros(len(options), bool))
    settings = {"spec": "none", "max_in_flight": 2, **pool}
    found = answers(asked, None, tmp_path, random.Random(3), LaunchedAhead, **settings)
    assert_same(found, want)
    how = found.stats.overlap
    assert how["forms"] > 5 and how["ahead"] > 2 * how["forms"] and verify(tmp_path).ok
    print(how)


def test_a_resumed_engine_gives_the_same_answers(wanted, tmp_path):
    """The test resumes from copies of the log, including copies with two steps or with drafts in flight."""
    asked, want = wanted
    end = want.stats.num_output_tokens * 3 // 4
    config = EngineConfig(spec=HEAD, **TWO, **RECOMPUTE)
    copies: dict[str, Path] = {}
    with drawn_alike(), Engine(config=config, dtype="float32", log=tmp_path / "log") as engine:
        steer(engine.built.executor)
        for prepared, options in asked.by_id.values():
            engine.submit_prepared(prepared, options)
        while not engine.is_idle:
            engine.step(received=False)
            state, is_late = engine.built.core.state, engine.stats().num_output_tokens > end
            name = f"{len(state.flights)}, {'drafts' if state.scheduled_drafts.any() else 'none'}"
            if (is_late or not copies) and name not in copies:
                copies[name] = copied(tmp_path / "log", tmp_path / f"copy{len(copies)}")
    assert {"1, drafts", "2, none"} <= copies.keys()
    for copy in copies.values():
        assert_same(gone_on(asked, copy, config), want)
        assert verify(copy).ok
