"""Tests that running requests keep their adapters after an adapter's name is unloaded or reused."""

import msgspec
import pytest

from mmengine.core.snapshot import snapshot
from mmengine.core.snapshot.saving import body_of
from mmengine.core.state.digest import state_digest
from mmengine.events import vocabulary as ev
from mmengine.request import Adapter
from tests.core.small_engine import Bench, request
from tests.core.test_core_snapshot import packed


def loaded(tag, name="mine"):
    return ev.AdapterLoaded(Adapter(bytes([tag]) * 32, 10, False, name), f"folder {tag} {name}")


def begun(*events):
    """Return an engine after a step with `events` and two requests for adapter 1. The answers have 2 and 6
    tokens.
    """
    engine = Bench(max_loras=4, lora_bytes=100)
    engine.core.inbox.put(loaded(1))
    for name, tokens in (("short", 2), ("long", 6)):
        engine.submit(request(name, 5, max_tokens=tokens, adapter=loaded(1).adapter))
    say(engine, *events)
    return engine


def say(engine, *events):
    for event in events:
        engine.core.inbox.put(event)
    engine.step()


def kept(engine):
    return list(engine.state.adapters.nameless.values())


@pytest.mark.parametrize("event", [loaded(2), ev.AdapterUnloaded("mine")], ids=["replaced", "unloaded"])
def test_a_nameless_adapter_is_kept_until_its_last_request_ends(event):
    engine = begun()
    assert kept(engine) == []
    say(engine, event)
    while "long" not in engine.ends:
        assert kept(engine) == [loaded(1)]
        engine.step()
    assert engine.ends.keys() == {"short", "long"} and kept(engine) == []


def test_unused_adapters_are_forgotten():
    engine = Bench(max_loras=4, lora_bytes=100)
    say(engine, loaded(1), loaded(2), ev.AdapterUnloaded("mine"), ev.AdapterUnloaded("nobody"))
    assert kept(engine) == []


def test_a_content_with_another_name_is_read_by_that():
    """An adapter is nameless only while no name refers to its digest. Adapter 1 also has the name "other",
    until adapter 2 gets this name.
    """
    engine = begun(loaded(1, "other"), ev.AdapterUnloaded("mine"))
    assert kept(engine) == []
    say(engine, loaded(2, "other"))
    assert kept(engine) == [loaded(1, "other")]
    say(engine, loaded(1, "again"))
    assert kept(engine) == [], "it has a name"


def test_a_snapshot_has_it_and_one_of_before_is_read():
    """A snapshot has the nameless adapters. A snapshot from an earlier build has none, but is restored."""
    engine = begun(loaded(2))
    state, started = engine.state, engine.log.records[0].event
    data = snapshot.take(state, started, 0)
    restored, _ = snapshot.restore(data)
    assert restored.adapters.nameless == state.adapters.nameless
    assert snapshot.take(restored, started, 0) == data
    body = msgspec.to_builtins(body_of(state, started, 0), builtin_types=(bytes,))
    # Earlier builds wrote only the first four fields, without the nameless adapters.
    assert len(body["adapters"]) == 5
    restored, _ = snapshot.restore(packed(body | {"adapters": body["adapters"][:4]}))
    assert restored.adapters.nameless == {} and state_digest(restored) == state_digest(state)
