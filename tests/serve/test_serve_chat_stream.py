"""Tests that the chunks from `stream_chat` add up to the result from `chat`."""

import asyncio

import pytest

from mmengine import AsyncEngine, Engine
from mmengine.errors import InvalidMedia, InvalidRequest, RequestFailed
from tests.serve.serve_fakes import EchoExecutor, builder
from tests.serve.test_serve_chat import TOOLS

CALL = '<tool_call>\n{"name": "area", "arguments": {"shape": "circle", "side": 2}}\n</tool_call>'
SAYS = [{"role": "user", "content": f"<think>hm</think>Well. {CALL}"}]
OPTIONS = {"tools": TOOLS, "max_tokens": 300, "n": 2, "request_id": "r"}


class Saying(EchoExecutor):
    """Answers with the prompt unchanged."""

    def answer_to(self, prompt):
        return prompt


@pytest.fixture
def engine():
    with Engine(builder=builder(executor_class=Saying)) as made:
        yield made


def added_up(chunks):
    """Return for each choice: role, content, reasoning, calls as (id, name, arguments), and the finish
    reason.
    """
    found = {}
    for chunk in chunks:
        (choice,) = chunk.choices
        role, texts, calls, ends = found.setdefault(choice.index, ([], ["", ""], [], []))
        delta = choice.delta
        role += [delta.role] if delta.role else []
        texts[0] += delta.content or ""
        texts[1] += delta.reasoning_content or ""
        ends += [choice.finish_reason] if choice.finish_reason else []
        for call in delta.tool_calls or ():
            if call.id:
                calls.append([call.id, call.function.name, ""])
            calls[call.index][2] += call.function.arguments
    return found


def test_chunks_add_up_to_the_whole_answer(engine):
    stream = engine.stream_chat(SAYS, **OPTIONS)
    chunks = list(stream)
    whole = stream.get_final_completion()
    assert whole == engine.chat(SAYS, **OPTIONS) and engine.is_idle
    assert {chunk.request_id for chunk in chunks} == {"r"}
    found = added_up(chunks)
    assert len(found) == 2
    for choice in whole.choices:
        role, texts, calls, ends = found[choice.index]
        assert role == ["assistant"] and ends == [choice.finish_reason] == ["tool_calls"]
        message = choice.message
        assert texts == [message.content, message.reasoning_content] == ["Well.", "hm"]
        assert calls == [[c.id, c.function.name, c.function.arguments] for c in message.tool_calls]

    async def beside():
        async with AsyncEngine(builder=builder(executor_class=Saying)) as other:
            stream = other.stream_chat(SAYS, **OPTIONS)
            told = [chunk async for chunk in stream]
            return told, await stream.get_final_completion()

    told, last = asyncio.run(beside())
    for index in range(2):
        of_one = [[each for each in some if each.choices[0].index == index] for some in (told, chunks)]
        assert of_one[0] == of_one[1]
    assert last.choices == whole.choices


def test_a_whole_answer_may_be_asked_for_before_its_end(engine):
    stream = engine.stream_chat(SAYS, **OPTIONS)
    next(stream)
    assert stream.get_final_completion().message.tool_calls


def test_closing_a_chat_stream_cancels_its_request(engine):
    with engine.stream_chat(SAYS, **OPTIONS) as stream:
        for _ in range(6):
            next(stream)
        with pytest.raises(InvalidRequest, match="are running"):
            engine.generate(["What?"])
    assert engine.is_idle and list(stream) == []
    with pytest.raises(RequestFailed, match="closed before"):
        stream.get_final_completion()

    async def leaves():
        async with AsyncEngine(builder=builder(executor_class=Saying)) as other:
            async with other.stream_chat(SAYS, **OPTIONS) as stream:
                for _ in range(6):
                    await anext(stream)
            assert [chunk async for chunk in stream] == []
            with pytest.raises(RequestFailed, match="closed before"):
                await stream.get_final_completion()
            unread = other.stream_chat(SAYS, **{**OPTIONS, "request_id": "u"})
            await unread.aclose()
            assert [chunk async for chunk in unread] == []
            dropped = other.stream_chat(SAYS, **{**OPTIONS, "request_id": "s"})
            await anext(dropped)
            del dropped
        return other.stats()

    assert asyncio.run(leaves()).num_running == 0


def test_invalid_requests_are_refused(engine):
    with pytest.raises(InvalidRequest, match="tool_choice"):
        engine.stream_chat(SAYS, tools=TOOLS, tool_choice="always")
    with pytest.raises(InvalidMedia, match="image 1 is no image"):
        next(engine.stream_chat([{"role": "user", "content": "bad"}]))
    assert engine.is_idle

    async def ask():
        async with AsyncEngine(builder=builder(executor_class=Saying)) as other:
            with pytest.raises(InvalidMedia, match="image 1 is no image"):
                await anext(other.stream_chat([{"role": "user", "content": "bad"}]))

    asyncio.run(ask())


def test_an_answer_that_is_given_up_raises(engine):
    stream = engine.stream_chat(SAYS, **OPTIONS)
    next(stream)
    engine.cancel("r")
    with pytest.raises(RequestFailed, match="cancelled"):
        stream.get_final_completion()
