"""Tests that response formats, which may be large, are never parsed on the event loop's thread."""

import asyncio
import threading
from typing import Any

import pytest

from mmengine.errors import MMEngineError
from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.serve.text import response_format as structured
from mmengine.structured_output.request import fields
from tests.server.running import served

pytest.importorskip("mmengine_shapes")

WORK = (
    (fields, "normalize_schema"),
    (structured, "grammar_of"),
    (structured, "notes_of"),
    (structured, "schema_of"),
)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[threading.Thread]]:
    """Return the threads that ran each function in WORK, by the function's name."""
    found: dict[str, set[threading.Thread]] = {name: set() for _, name in WORK}

    def recorded(name: str, known: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            found[name].add(threading.current_thread())
            return known(*given, **named)

        return call

    for module, name in WORK:
        monkeypatch.setattr(module, name, recorded(name, getattr(module, name)))
    return found


def schema(name: str) -> dict[str, Any]:
    """Return a schema that no cache contains."""
    return {"type": "object", "properties": {f"thread {name}": {"const": 1}}, "additionalProperties": False}


def form(name: str) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema(name), "strict": True}}


def test_no_entry_of_the_async_engine_works_a_form_out_on_its_loop(threads: Any) -> None:
    close = {"on_truncation": "close"}

    async def ask() -> threading.Thread:
        async with AsyncEngine() as engine:
            await engine.generate("What?", response_format=form("generate") | close)
            async with engine.stream(
                "What?", response_format=form("stream") | close, max_tokens=40
            ) as stream:
                async for _ in stream:
                    pass
            await engine.generate_json("What?", schema("generate_json"), **close, max_tokens=40)
            assert [
                each
                async for each in engine.stream_json("What?", schema("stream_json"), **close, max_tokens=40)
            ]
            await engine.generate_json("What?", list[int], **close, max_tokens=40)
            await engine.generate("What?", grammar={"gbnf": 'root ::= "a"'})
            with pytest.raises(MMEngineError, match="schema refused"):
                refused = {"type": "json_schema", "json_schema": {"schema": {"enum": []}}}
                await engine.generate("What?", response_format=refused)
        return threading.current_thread()

    loop = asyncio.run(ask())
    assert all(each and loop not in each for each in threads.values()), threads


def test_the_server_works_no_form_out_on_its_loop(threads: Any) -> None:
    with served() as server:
        server.chat(response_format=form("chat"))
        server.events(response_format=form("chat stream"))
        server.call("/v1/completions", {"prompt": "a", "response_format": form("completion")})
        large = {"enum": [f"{'a' * 200} {number}" for number in range(5_000)]}
        server.chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": large}})
        loop = server._thread
    for name in ("normalize_schema", "grammar_of", "notes_of"):
        assert threads[name] and loop not in threads[name], name
