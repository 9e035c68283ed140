"""Tests that large schemas are normalized in another process, and that no call holds the GIL for long."""

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher

from mmengine.errors import InvalidRequest, QueueFull
from mmengine.processing.workers.schemas import SchemaProcesses
from mmengine.request import GrammarRequest
from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.server.chat.bodies import Body
from mmengine.server.chat.parsed_request import read_answer_format
from mmengine.structured_output.engines.llguidance import json_schema_lark
from mmengine.structured_output.json_schema.normalization import Bounds, SchemaRefused, normalize_schema
from mmengine.structured_output.json_schema.reading import loading
from mmengine.structured_output.request import fields
from tests.server.running import served
from tests.structured.accepting import TOKENIZER, allowed, byte_backend

pytest.importorskip("mmengine_shapes")


def large(title: str, **others: Any) -> dict[str, Any]:
    """Return a schema with short answers and more than `fields.LARGE` bytes."""
    return {"enum": [f"{title} {number}" for number in range(3)], "description": "x" * fields.LARGE, **others}


def text_of(value: object) -> bytes:
    return json.dumps(value).encode()


@pytest.fixture(scope="module")
def processes() -> Iterator[SchemaProcesses]:
    made = SchemaProcesses(1, 2**28, 20)
    yield made
    made.close()


def test_a_process_raises_the_same_errors_as_the_gate(processes: SchemaProcesses) -> None:
    # The schema process gives the same result and the same errors as `normalize_schema` in this process.
    bounds, schemas = Bounds(whitespace=3, string=9), {"urn:a": {"type": "number", "format": "odd"}}
    schema = {"type": "object", "properties": {"a": {"$ref": "urn:a"}, "b": {"format": "email"}}}
    made = processes.gated(text_of(schema), bounds, text_of(schemas), False)
    assert made == normalize_schema(schema, bounds, schemas) and made.notes
    refused = {"type": "object", "properties": {"a/b": {"enum": []}}, "required": ["a/b"]}
    with pytest.raises(SchemaRefused) as there:
        processes.gated(text_of(refused), bounds, b"{}", False)
    with pytest.raises(SchemaRefused) as here:
        normalize_schema(refused)
    assert str(there.value) == str(here.value)
    assert (there.value.keyword, there.value.pointer) == (here.value.keyword, here.value.pointer)
    with pytest.raises(SchemaRefused, match="strict_keywords"):
        processes.gated(b'{"odd": 1}', bounds, b"{}", True)


def test_a_dead_decoder_process_fails_only_its_own_item() -> None:
    """A schema that needs more memory than its process may use is refused. The next schema is normalized."""
    small = SchemaProcesses(1, 2**24, 20)
    try:
        many = text_of(
            {"properties": {f"{n}": {"properties": {"a": {"pattern": f"{n}"}}} for n in range(6_000)}}
        )
        with pytest.raises(InvalidRequest, match="the schema .*media_process_bytes|the schema .*died"):
            small.gated(many, Bounds(), b"{}", False)
        assert small.gated(b'{"const": 1}', Bounds(), b"{}", False) == normalize_schema({"const": 1})
    finally:
        small.close()


def test_large_schemas_of_strangers_leave_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large schemas are normalized in a schema process, and small schemas in this process."""
    worked_out: list[int] = []
    known = fields.normalize_schema

    def here(schema: Any, *others: Any) -> Any:
        worked_out.append(len(schema))
        return known(schema, *others)

    monkeypatch.setattr(fields, "normalize_schema", here)

    def form(title: str) -> dict[str, Any]:
        return {"type": "json_schema", "json_schema": {"name": "a", "schema": large(title), "strict": True}}

    engine = AsyncEngine()

    async def ask() -> None:
        assert await engine.generate_json("What?", large("python"), max_tokens=40) in large("python")["enum"]
        assert await engine.generate_json("What?", {"const": "small"}, max_tokens=40) == "small"

    with served(engine, names=("m",)) as server:
        asyncio.run(ask())
        status, _, answer = server.chat("What?", response_format=form("http"), max_tokens=40)
        assert status == 200, answer
        assert json.loads(answer["choices"][0]["message"]["content"]) in large("http")["enum"]
        wrong = form("wrong")
        wrong["json_schema"]["schema"]["uniqueItems"] = 3
        status, _, answer = server.chat("What?", response_format=wrong, max_tokens=40)
        assert status == 400 and "uniqueItems at #/uniqueItems" in answer["error"]["message"]
    assert worked_out and max(worked_out) < fields.LARGE


def test_without_a_schema_process_large_schemas_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> Any:
        raise OSError("no more")

    monkeypatch.setattr("mmengine.processing.workers.decoders.DecoderProcess", fails)
    none = SchemaProcesses(1, 2**24, 20)
    with pytest.raises(QueueFull, match="no more"):
        none.gated(b"{}", Bounds(), b"{}", False)


def test_a_large_schema_in_a_body_is_not_decoded() -> None:
    for schema, kept in ((large("a"), bytes), ({"const": 1}, dict)):
        asked = {"type": "json_schema", "bounds": None, "json_schema": {"schema": schema, "name": None}}
        for body in ({"response_format": asked}, {"structured_outputs": {"json": schema, "regex": None}}):
            form = read_answer_format(msgspec.json.decode(msgspec.json.encode(body), type=Body), 2**20)
            assert form.response_format is not None and form.response_format.keys() == {"type", "json_schema"}
            held = form.response_format["json_schema"]
            assert isinstance(held, dict) and held.keys() == {"schema"} and type(held["schema"]) is kept
            assert loading.parse_schema(held["schema"]) == schema


def test_large_values_are_written_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The JSON encoder holds the GIL, so a large value is encoded in pieces."""
    pieces: list[int] = []
    known = loading._write

    def write(value: object) -> str:
        pieces.append(len(text := known(value)))
        return text

    monkeypatch.setattr(loading, "_write", write)
    one = {"type": "object", "properties": {"a": {"enum": [1, 2.5, None, "ü"]}, "b": {}}, "required": ["a"]}
    deep = {"$defs": {"x": {"a": [{"properties": {f"{n}": one for n in range(3_000)}}]}}}
    schema = {"deep": deep, "rest": [one, [one] * 500, [], {3: one}], "last": ({"x": one},)}
    assert loading.encode(schema) == json.dumps(schema, ensure_ascii=False)
    assert max(pieces) < 70_000 < len(loading.encode(schema)) // 4


def test_a_large_grammar_takes_its_first_step_before_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large grammar's first mask is computed before the matcher is copied. Otherwise, the first forced text
    blocks all other threads for tens of ms.
    """
    done: list[str] = []

    class Recorded:
        def __init__(self, *given: Any, **named: Any):
            self.matcher = LLMatcher(*given, **named)

        def __getattr__(self, name: str) -> Any:
            done.append(name)
            return getattr(self.matcher, name)

    backend = byte_backend()
    monkeypatch.setattr("mmengine.structured_output.engines.llguidance.backend.LLMatcher", Recorded)
    for schema, asked in (
        ({"enum": [f"step {n}" for n in range(6_000)]}, True),
        ({"enum": ["small"]}, False),
    ):
        done.clear()
        found = backend.compile(GrammarRequest("json_schema", normalize_schema(schema).text))
        found.matcher()
        assert ("compute_bitmask" in done) == asked and done[-1] == "deep_copy"


def test_large_json_schema_is_no_more_parsed_under_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large schema is written as Lark, because llguidance parses Lark without the GIL. JSON schema and Lark
    allow the same texts.
    """
    source = random.Random(3)
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "number"}}, "b": {"enum": ["x", "y"]}},
        "required": ["a"],
    }
    for bounds in (Bounds(), Bounds.off()):
        text = normalize_schema(schema, bounds).text
        plain = LLMatcher(TOKENIZER, json_schema_lark.schema_grammar(text), log_level=0)
        with monkeypatch.context() as patched:
            patched.setattr(json_schema_lark, "MAX_HELD", 10)
            grammar = json_schema_lark.schema_grammar(text)
        assert grammar.startswith("%llguidance")
        matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
        for _ in range(300):
            options = allowed(matcher)
            assert options == allowed(plain) and options
            byte = source.choice(sorted(option for option in options if option < 256))
            assert matcher.consume_token(byte) and plain.consume_token(byte)
            if plain.is_stopped():
                break
