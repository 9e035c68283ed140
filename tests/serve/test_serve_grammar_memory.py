"""Tests that response formats are checked outside the event loop, and that grammar sources use limited
memory.
"""

import asyncio
import json
import sys

import pytest

from mmengine.errors import InvalidRequest, QueueFull
from mmengine.request import GrammarRequest
from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.serve.batch.run_batch import run_batch
from mmengine.serve.engine.engine import Engine
from mmengine.serve.prompt.options import Options, make_sampling
from mmengine.serve.prompt.prompt import Prompt
from mmengine.serve.requests.request_resources import GrammarMemory
from mmengine.structured_output.request.spec import grammar_of
from tests.serve.serve_fakes import builder


def form(schema):
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def large(count):
    """Return a schema with `count` bounded integers; its check takes long."""
    number = {"type": "integer", "minimum": -1000, "maximum": 123456}
    names = [f"p{k}" for k in range(count)]
    closed = {"required": names, "additionalProperties": False}
    return {"type": "object", "properties": dict.fromkeys(names, number), **closed}


def choice(k):
    return {"choice": [f"{k:01000}"]}


SIZE = sys.getsizeof(grammar_of(grammar=choice(0)).source)


def test_equal_texts_are_one_object_and_count_once():
    memory = GrammarMemory(2 * SIZE)
    forms = [grammar_of(grammar=choice(k)) for k in (0, 0, 1, 2)]
    again = GrammarRequest("choice", json.dumps(choice(0)["choice"]), (7,), "close")
    first = memory.hold("a", forms[0])
    assert again.source is not first.source
    assert memory.shared(again) == memory.hold("b", again) == again, "only the source is another object"
    assert memory.shared(again).source is memory.hold("b too", again).source is first.source
    memory.release("b too")
    memory.hold("c", forms[2])
    assert memory.num_bytes == 2 * SIZE
    with pytest.raises(
        QueueFull,
        match=r"grammars of 3 requests take .* bytes, and this request's grammar needs .* more: try",
    ):
        memory.hold("d", forms[3])
    memory.hold("past", forms[3], was_accepted=True)
    for holder in ("a", "a", "never was", "past", "c"):
        memory.release(holder)
    assert memory.num_bytes == SIZE
    memory.release("b")
    assert memory.num_bytes == 0 and not memory._known and not memory._held


def test_a_text_without_room_is_refused_and_the_others_go_on():
    with Engine(builder=builder()) as engine:
        engine.grammar_memory.max_bytes = 2 * SIZE
        for k in (0, 1, 0):
            engine.submit(f"prompt {k}", grammar=choice(k), max_tokens=20)
        with pytest.raises(QueueFull, match="the grammars of 3 requests take"):
            engine.submit("prompt 2", grammar=choice(2), n=2, temperature=1.0)
        answers = []
        while engine.has_work:
            answers += [output.completion.text for output in engine.step() if output.completion]
        assert sorted(answers) == ["PROMPT 0", "PROMPT 0", "PROMPT 1"]
        assert engine.grammar_memory.num_bytes == 0
        engine.generate(["prompt 2"], grammar=choice(2), max_tokens=20)


def test_a_batch_waits_for_room():
    with Engine(builder=builder()) as engine:
        engine.grammar_memory.max_bytes = 3 * SIZE
        options = [
            Options(make_sampling({"max_tokens": 20}), grammar=grammar_of(grammar=choice(k)))
            for k in range(20)
        ]
        answers = dict(
            run_batch(engine, [(Prompt.of(f"prompt {k}"), each) for k, each in enumerate(options)])
        )
        assert {k: answer.text for k, answer in answers.items()} == {k: f"PROMPT {k}" for k in range(20)}
        assert engine.grammar_memory.num_bytes == 0


def test_the_event_loop_goes_on_while_a_large_schema_is_checked():
    async def main():
        async with AsyncEngine(builder=builder()) as engine:
            answer = asyncio.create_task(
                engine.generate("with a form", response_format=form(large(5000)), max_tokens=20)
            )
            assert (await engine.generate("without", max_tokens=20)).text == "WITHOUT"
            assert not answer.done()
            assert (await answer).text == "WITH A FORM"
            assert engine._engine.grammar_memory.num_bytes == 0

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_error_in_a_form_reaches_only_its_caller():
    wrong = [
        ({"response_format": form({"type": "objec"})}, InvalidRequest, "objec"),
        ({"response_format": {"type": "xml"}}, InvalidRequest, "response_format.type"),
        ({"response_format": form({}), "grammar": choice(0)}, InvalidRequest, "give only one of them"),
        ({"grammar": choice(0), "ignore_eos": True}, InvalidRequest, "ignore_eos cannot go with"),
        ({"grammar": choice(3)}, QueueFull, "the grammars of"),
    ]

    async def main():
        async with AsyncEngine(builder=builder()) as engine:
            memory = engine._engine.grammar_memory
            memory.max_bytes = SIZE
            memory.hold("another", grammar_of(grammar=choice(0)))
            for asked, kind, says in wrong:
                stream = engine.stream("prompt", **asked)
                with pytest.raises(kind, match=says):
                    await stream.accepted()
                with pytest.raises(kind, match=says):
                    await anext(stream)
            answers = await asyncio.gather(
                *(engine.generate("prompt", grammar=choice(0), max_tokens=20) for _ in range(9))
            )
            assert {answer.text for answer in answers} == {"PROMPT"}
            memory.release("another")
            assert memory.num_bytes == 0

    asyncio.run(asyncio.wait_for(main(), 30))
