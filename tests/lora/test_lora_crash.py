"""Tests that requests with adapters continue after a crash. The log contains the paths of the adapters'
folders, and an adapter is used only if its files are unchanged.
"""

import shutil

import pytest

from mmengine.config import EngineConfig
from mmengine.core.resume import Resume
from mmengine.errors import InvalidRequest
from mmengine.replay import request_lines, verify
from mmengine.replay.convert.redact import redact
from mmengine.serve.engine.engine import Engine
from tests.log_copies import copied
from tests.lora.lora_models import CHATS, KINDS, NUM_NEW, answers_of, make_adapter, make_model

NAMES = ("attention", "tower")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return the folders of a model and two adapters, and transformers' tokens with each adapter."""
    folder = tmp_path_factory.mktemp("crash")
    (folder / "model").mkdir()
    model, wanted = make_model(folder / "model"), {}
    for seed, name in enumerate(NAMES):
        adapted = make_adapter(model, folder / name, seed, **KINDS[name])
        wanted[name] = answers_of(adapted, folder / "model")
        model = adapted.unload()
    return folder / "model", {name: folder / name for name in NAMES}, wanted


def engine_of(made, log, loras, **options):
    config = EngineConfig(spec="none", snapshot_bytes=4096)
    return Engine(made[0], config=config, dtype="float32", log=log, loras=loras, **options)


def begun(made, log, loras, steps=4):
    """Return the log of a process that was killed during its answers."""
    engine = engine_of(made, log.with_name("live"), {})
    for name, folder in loras.items():
        engine.adapters.load(engine.adapters.read(name, folder))
    for place in range(len(CHATS)):
        for name in loras:
            asked = {"max_tokens": NUM_NEW, "ignore_eos": True, "temperature": 0.0, "adapter": name}
            engine.submit(CHATS[place], request_id=f"{name} {place}", **asked)
    for _ in range(steps):
        engine.step()
    copied(log.with_name("live"), log)  # This is the log that kill -9 leaves.
    for name in loras:
        engine.adapters.unload(name)
    while engine.has_work:
        engine.step()  # requests continue with their adapter after it was unloaded
    engine.close()
    return log


def finished(engine):
    answers = {}
    for name in list(engine.requests.resumed):
        done = engine.requests.resume(name, 1, stream=False)
        answers |= {name: done} if done is not None else {}
    while engine.has_work:
        answers |= {out.request_id: out.completion for out in engine.step() if out.completion}
    return answers


@pytest.mark.parametrize("again", [None, {}, NAMES], ids=["by the log", "some may come", "named again"])
def test_a_resumed_request_keeps_its_adapter(made, tmp_path, again):
    _, adapters, wanted = made
    log = begun(made, tmp_path / "log", adapters)
    loras = adapters if again == NAMES else again
    with engine_of(made, log, loras, resume=Resume()) as engine:
        answers = finished(engine)
        assert {known.adapter.name for known in engine.adapters} == set(NAMES)
    assert len(answers) == len(CHATS) * len(NAMES)
    for name, done in answers.items():
        adapter, place = name.split()
        assert list(done.choices[0].token_ids) == wanted[adapter][int(place)], name
    report = verify(log)
    assert report.ok and report.rederived and not report.unfinished
    redacted = tmp_path / "redacted"
    redact(log, redacted, b"a key of sixteen")
    assert verify(redacted).ok and len(request_lines(redacted)) == len(answers)
    data = b"".join(path.read_bytes() for path in redacted.iterdir())
    assert not any(name.encode() in data for name in (*NAMES, str(adapters["tower"])))


@pytest.mark.parametrize("how", ["gone", "changed"])
def test_a_changed_adapter_ends_its_requests(made, tmp_path, how):
    _, adapters, wanted = made
    shutil.copytree(adapters["attention"], tmp_path / "mine")
    log = begun(made, tmp_path / "log", {"attention": tmp_path / "mine", "tower": adapters["tower"]})
    shutil.rmtree(tmp_path / "mine")
    if how == "changed":
        shutil.copytree(adapters["tower"], tmp_path / "mine")
    with engine_of(made, log, None, resume=Resume()) as engine:
        answers = finished(engine)
    for name, done in answers.items():
        adapter, place = name.split()
        if adapter == "tower":
            assert list(done.choices[0].token_ids) == wanted[adapter][int(place)]
        else:
            assert done.choices[0].finish_reason == "error" and "adapter" in done.choices[0].detail
    assert verify(log).ok


def test_files_that_change_during_a_run_end_only_their_request(made, tmp_path):
    _, adapters, wanted = made
    shutil.copytree(adapters["attention"], tmp_path / "mine")
    with engine_of(made, None, {"mine": tmp_path / "mine", "tower": adapters["tower"]}) as engine:
        shutil.rmtree(tmp_path / "mine")
        asked = {"max_tokens": NUM_NEW, "ignore_eos": True, "temperature": 0.0}
        names = [engine.submit(CHATS[0], adapter=name, **asked) for name in ("mine", "tower")]
        answers = finished(engine)
    assert answers[names[0]].choices[0].finish_reason == "error"
    assert list(answers[names[1]].choices[0].token_ids) == wanted["tower"][0]


def test_a_name_that_is_not_loaded_is_refused(made):
    with engine_of(made, None, {}) as engine, pytest.raises(InvalidRequest, match="nobody"):
        engine.submit(CHATS[0], adapter="nobody")
