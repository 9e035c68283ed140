"""Answers with adapters are those of PEFT on transformers, however they are batched, cut, preempted or
drafted."""

import pytest

from mmengine.config import EngineConfig
from mmengine.native import library
from mmengine.replay import verify
from mmengine.serve.engine import Engine
from tests.lora.making import CHATS, NUM_NEW, make_all

SETTINGS = {
    "all at once": {},
    "two places": {"max_loras": 2},
    "in chunks": {"block_size": 4, "token_budget": 16, "max_num_seqs": 8},
    "preempted": {"block_size": 4, "max_model_len": 80, "num_blocks": 52, "enable_prefix_caching": False},
    "drafted": {"spec": "suffix", "draft_policy": "all", "max_num_seqs": 8},
    "little room": {"max_loras": 3, "lora_bytes": 300_000},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_all(tmp_path_factory.mktemp("lora"))


def asked(wanted):
    """Every chat with every adapter, so that neighbours have different ones."""
    return [(name, place) for place in range(len(CHATS)) for name in wanted]


def run(engine, wanted, rounds=1):
    requests, ends = {}, {}
    for _ in range(rounds):
        for name, place in asked(wanted):
            more = {"adapter": name} if name else {}
            request_id = engine.submit(
                CHATS[place], max_tokens=NUM_NEW, ignore_eos=True, temperature=0.0, stream=False, **more
            )
            requests[request_id] = name, place
        while engine.has_work:
            ends |= {out.request_id: out.completion for out in engine.step() if out.completion}
    return {key: (requests[key], done.choices[0].token_ids) for key, done in ends.items()}


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_those_of_peft(made, tmp_path, name):
    folder, adapters, wanted = made
    config = EngineConfig(**{"spec": "none", "max_loras": 8, **SETTINGS[name]})
    with Engine(folder, config=config, dtype="float32", loras=adapters, log=tmp_path / "log") as engine:
        answers = run(engine, wanted, 2 if name == "drafted" else 1)
        stats = engine.stats()
    assert len(answers) == len(asked(wanted)) * (2 if name == "drafted" else 1)
    for (adapter, place), tokens in answers.values():
        assert list(tokens) == wanted[adapter][place], (adapter, place)
    assert (stats.num_preemptions > 0) is (name == "preempted")
    assert (sum(counts.accepted for counts in stats.drafts.values()) > 0) is (name == "drafted")
    report = verify(tmp_path / "log")
    assert report.ok and report.rederived and not report.unfinished


def test_adapters_change_answers(made):
    _, _, wanted = made
    texts = {name: answers[0] for name, answers in wanted.items()}
    assert all(texts[name] != texts[""] for name in texts if name not in ("", "tower"))
    assert wanted["tower"][0] == wanted[""][0] and wanted["tower"][1] != wanted[""][1]


def test_torch_alone_gives_the_same(made, hidden_compiler, tmp_path):
    folder, adapters, wanted = made
    with hidden_compiler(tmp_path):
        assert library.load() is None
        with Engine(folder, config=EngineConfig(spec="none"), dtype="float32", loras=adapters) as engine:
            answers = run(engine, wanted)
    assert all(list(tokens) == wanted[name][place] for (name, place), tokens in answers.values())
