"""Tests which adapter a name refers to, and from which folder the adapter is read."""

import asyncio
import shutil
import time
from contextlib import contextmanager

import pytest

from mmengine.core.resume import Resume
from mmengine.replay import verify
from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.serve.engine.engine import Engine
from tests.log_copies import copied
from tests.lora.adapter_fakes import adapted_builder, made


@pytest.fixture
def engine():
    with Engine(builder=adapted_builder()) as one:
        yield one


def load(engine, name, folder):
    engine.adapters.load(engine.adapters.read(name, folder))


def read_again(engine, name):
    """Read the adapter with this name again, as the executor would, and return its digest."""
    return engine.built.executor.known[engine.adapters.named(name).digest]().digest


@pytest.mark.parametrize("gone", ["older", "newer"])
def test_content_with_two_names_is_read_from_the_remaining_names_folder(engine, tmp_path, gone):
    folders = {name: made(tmp_path, name, "same") for name in ("older", "newer")}
    for name, folder in folders.items():
        load(engine, name, folder)
    stays = ({*folders} - {gone}).pop()
    engine.adapters.unload(gone)
    shutil.rmtree(folders[gone])
    assert read_again(engine, stays) == b"same".ljust(32)
    engine.adapters.unload(stays)
    assert not engine.built.executor.known


def test_new_content_under_a_name_keeps_the_old_content_for_its_other_name(engine, tmp_path):
    load(engine, "other", made(tmp_path, "other", "same"))
    load(engine, "mine", made(tmp_path, "mine", "same"))
    load(engine, "mine", made(tmp_path, "new"))
    shutil.rmtree(tmp_path / "mine")
    assert read_again(engine, "other") == b"same".ljust(32)
    assert read_again(engine, "mine") == b"new".ljust(32)


def test_reloading_the_same_content_changes_its_folder(engine, tmp_path):
    mine, other = (made(tmp_path, name, "same") for name in ("mine", "other"))
    load(engine, "mine", mine)
    load(engine, "other", other)
    shutil.rmtree(other)
    load(engine, "mine", mine)
    assert read_again(engine, "other") == b"same".ljust(32)


@contextmanager
def gone_on(folder, after, loras=None, place="old"):
    """Kill an engine during an answer with the adapter `mine`, and yield the resumed engine.

    `after`: called with the engine during the answer. `loras`: the adapters given to the resumed engine.
    `place`: the name that the adapter's folder has after the restart.
    """
    old = made(folder, "old")
    with Engine(builder=adapted_builder(), log=folder / "live", loras={"mine": old}) as one:
        one.submit("a longer word", request_id="asked", adapter="mine")
        one.step()
        after(one)
        one.step()
        copied(folder / "live", folder / "log")  # This is the log that kill -9 leaves.
        while one.has_work:
            one.step()
    old.rename(folder / place)
    with Engine(builder=adapted_builder(), log=folder / "log", resume=Resume(), loras=loras) as one:
        yield one


def answer_of(engine):
    """Return the resumed request's answer, and check that only named adapters remain."""
    engine.requests.resume("asked")
    (done,) = [out.completion for _ in range(30) for out in engine.step() if out.completion]
    assert not engine.built.core.state.adapters.nameless
    assert engine.built.executor.known.keys() == {known.adapter.digest for known in engine.adapters}
    return done.choices[0]


@pytest.mark.parametrize("how", ["replaced", "unloaded", "replaced and unloaded"])
def test_a_request_continues_after_a_restart_without_its_adapters_name(tmp_path, how):
    new = made(tmp_path, "new")

    def after(engine):
        if "replaced" in how:
            load(engine, "mine", new)
            engine.step()
        if "unloaded" in how:
            engine.adapters.unload("mine")

    with gone_on(tmp_path, after) as engine:
        assert [known.folder for known in engine.adapters] == ([new] if how == "replaced" else [])
        assert answer_of(engine).text == "mine: A LONGER WORD"
    assert verify(tmp_path / "log").ok


@pytest.mark.parametrize("after", [lambda engine: None, lambda engine: engine.adapters.unload("mine")])
def test_adapters_loaded_at_startup_serve_requests_whose_folder_moved(tmp_path, after):
    loras = {"other": tmp_path / "moved"}
    with gone_on(tmp_path, after, loras, place="moved") as engine:
        assert [known.adapter.name for known in engine.adapters] == ["other"]
        assert answer_of(engine).text == "mine: A LONGER WORD"
    assert verify(tmp_path / "log").ok


def test_a_request_whose_adapter_is_gone_names_its_folder(tmp_path):
    with gone_on(tmp_path, lambda engine: engine.adapters.unload("mine"), place="moved") as engine:
        answer = answer_of(engine)
    assert answer.finish_reason == "error" and str(tmp_path / "old") in answer.detail


def test_concurrent_loads_are_read_in_sequence(tmp_path):
    """Adapters are read in sequence, even if a load is cancelled because its client disconnects."""
    reading = []

    async def asked():
        async with AsyncEngine(builder=adapted_builder(), loras={}) as engine:
            read = engine._engine.built.plugin.read_adapter

            def slow(model, folder, *limits):
                reading.append(folder)
                time.sleep(0.02)
                assert reading == [folder]
                return read(model, reading.pop(), *limits)

            engine._engine.built.plugin.read_adapter = slow
            loads = [
                asyncio.create_task(engine.load_adapter(f"{n}", made(tmp_path, f"{n}"))) for n in range(4)
            ]
            await asyncio.sleep(0.01)
            loads[0].cancel()
            await asyncio.gather(*loads[1:])
            assert {known.adapter.name for known in engine.adapters} == {"1", "2", "3"}

    asyncio.run(asked())
