"""Tests that answers with adapters have the same tokens as with PEFT on transformers, also with batching,
chunks, preemptions and drafts.
"""

import pytest

from mmengine.config import EngineConfig
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from mmengine.native import library
from mmengine.replay import verify
from mmengine.runtime.adapters import AdapterStore
from mmengine.serve.engine.engine import Engine
from tests.lora.lora_models import CHATS, NUM_NEW, make_all

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
    """Pair every chat with every adapter, so that neighbours have different adapters."""
    return [(name, place) for place in range(len(CHATS)) for name in wanted]


def ended(engine):
    outputs = []
    while engine.has_work:
        outputs += [out for out in engine.step() if out.completion]
    return outputs


def run(engine, wanted, rounds=1):
    requests, ends = {}, {}
    for _ in range(rounds):
        for name, place in asked(wanted):
            more = {"adapter": name} if name else {}
            request_id = engine.submit(
                CHATS[place], max_tokens=NUM_NEW, ignore_eos=True, temperature=0.0, stream=False, **more
            )
            requests[request_id] = name, place
        ends |= {out.request_id: out.completion for out in ended(engine)}
    return {key: (requests[key], done.choices[0].token_ids) for key, done in ends.items()}


def seldom(name):
    """Mark the slow setting as a soak test."""
    return pytest.param(name, marks=pytest.mark.soak if name == "all at once" else ())


@pytest.mark.parametrize("name", [*map(seldom, SETTINGS)])
def test_tokens_equal_peft(made, tmp_path, name):
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


@pytest.mark.soak
@pytest.mark.skipif(library.load() is None, reason="needs the compiled kernels")
def test_an_image_encoded_in_parts_reads_its_adapter_once(made, tmp_path, monkeypatch):
    """The adapter is read for the image's first part, and again when the row is admitted. In between, the
    device drops the adapter, because only a row's admission adds an adapter to the pool.
    """
    folder, adapters, wanted = made
    load, read = AdapterStore._load, []
    monkeypatch.setattr(
        AdapterStore, "_load", lambda store, digest: read.append(digest) or load(store, digest)
    )
    room = {"block_size": 4, "lora_bytes": 100_000}  # Memory for one adapter.
    config = EngineConfig(spec="none", encoder_piece=60, encoder_even_patches=8, **room)
    loras = {name: adapters[name] for name in ("tower", "attention")}
    with Engine(folder, config=config, dtype="float32", loras=loras, log=tmp_path / "log") as engine:
        for place, adapter in ((3, "tower"), (0, "attention"), (1, "tower")):
            read.clear()
            asked = {"max_tokens": NUM_NEW, "ignore_eos": True, "temperature": 0.0, "adapter": adapter}
            engine.submit(CHATS[place], **asked)
            (done,) = ended(engine)
            assert list(done.completion.choices[0].token_ids) == wanted[adapter][place]
    parts = [record for record in LogReader(tmp_path / "log") if isinstance(record.event, ev.Encoded)]
    assert len(parts) > 6 and len(read) == 2


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
