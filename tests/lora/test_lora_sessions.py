"""Tests sessions with an adapter: a session's answers equal those of a single request with the adapter."""

import numpy as np
import pytest

from mmengine.config import EngineConfig
from mmengine.core.resume import Resume
from mmengine.errors import InvalidRequest
from mmengine.replay import verify
from mmengine.serve.engine.engine import Engine
from tests.log_copies import copied
from tests.lora.lora_models import KINDS, make_adapter, make_model
from tests.pictures import noise

NAMES = ("attention", "tower")
SHOWN = ["Look: ", {"type": "image", "image": noise(0, (64, 96))}]
QUESTION = "What is in it?"
ASKED = {"max_tokens": 8, "ignore_eos": True, "temperature": 0.0}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a model's folder, and two adapters' folders."""
    folder = tmp_path_factory.mktemp("sessions")
    (folder / "model").mkdir()
    model = make_model(folder / "model")
    for seed, name in enumerate(NAMES):
        model = make_adapter(model, folder / name, seed, **KINDS[name]).unload()
    return folder / "model", {name: folder / name for name in NAMES}


def engine_of(made, log, loras, **options):
    config = EngineConfig(spec="none", max_loras=2)
    return Engine(made[0], config=config, dtype="float32", log=log, loras=loras, **options)


def tokens(completion):
    return completion.choices[0].token_ids


def test_a_session_answers_like_one_request_with_its_adapter(made, tmp_path):
    content = [{"type": "text", "text": SHOWN[0]}, SHOWN[1], {"type": "text", "text": QUESTION}]
    answers = set()
    with engine_of(made, tmp_path / "log", made[1]) as engine:
        for name in ("", *NAMES):
            with engine.session(adapter=name) as session:
                session.append(SHOWN)
                answer = session.ask(QUESTION, **ASKED)
            engine._core.reset_prefix_cache()
            (cold,) = engine.generate([[{"role": "user", "content": content}]], adapter=name, **ASKED)
            assert np.array_equal(answer.prompt_token_ids, cold.prompt_token_ids)
            assert tokens(answer) == tokens(cold) and answer.num_cached_tokens and not cold.num_cached_tokens
            answers.add(tuple(tokens(answer)))
    assert len(answers) == 1 + len(NAMES)
    report = verify(tmp_path / "log")
    assert report.ok and report.rederived


def test_a_session_keeps_its_adapter_after_a_kill(made, tmp_path):
    """A resumed session's adapter and image come from the log."""
    with engine_of(made, tmp_path / "live", made[1]) as engine:
        session = engine.session("s", adapter="tower")
        session.append(SHOWN)
        copied(tmp_path / "live", tmp_path / "killed")
        wanted = session.ask(QUESTION, **ASKED)
    with engine_of(made, tmp_path / "killed", {}, resume=Resume()) as engine:
        answer = engine.session("s").ask(QUESTION, **ASKED)
    assert tokens(answer) == tokens(wanted)


def test_a_session_has_one_adapter_which_must_be_there(made):
    with engine_of(made, None, made[1]) as engine:
        with pytest.raises(InvalidRequest, match="no adapter 'third'"):
            engine.session(adapter="third")
        for own, other in (("tower", "attention"), ("", "tower")):
            with (
                engine.session(adapter=own) as session,
                pytest.raises(InvalidRequest, match="with which it was opened"),
            ):
                session.ask(QUESTION, adapter=other, **ASKED)
        with engine.session(adapter="tower") as session:
            session.append(SHOWN)
            known = engine.adapters.by_name["tower"]
            engine.adapters.unload("tower")
            with pytest.raises(InvalidRequest, match="no adapter 'tower'"):
                session.ask(QUESTION, **ASKED)
            engine.adapters.load(known)
            answer = session.ask(QUESTION, adapter="tower", **ASKED)
            assert answer.num_cached_tokens, "the adapter was loaded again with the same content"
