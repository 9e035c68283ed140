"""Checks the server with pydantic-ai and its model class for OpenAI's chat completions."""

import asyncio
import base64

from checks import (
    BASE,
    IMAGE,
    MODEL,
    QUESTION,
    SMALL,
    TAUGHT,
    Anything,
    Corners,
    Shape,
    check,
    full_queue,
    needs_tools,
    run,
)
from pydantic_ai import Agent, BinaryContent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits


def model(url=BASE):
    return OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=url, api_key="none"))


def asked(agent, prompt=QUESTION, **options):
    return asyncio.run(agent.run(prompt, **options))


@check("chat")
def chat():
    found = asked(Agent(model(), instructions="Be brief."))
    assert found.output and found.usage.output_tokens
    again = asked(Agent(model()), message_history=found.all_messages())
    assert again.output


@check("streams")
def stream():
    async def said():
        async with Agent(model()).run_stream(QUESTION) as result:
            return [piece async for piece in result.stream_text(delta=True, debounce_by=None)]

    assert "".join(asyncio.run(said()))


@check("images")
def image():
    data = base64.b64decode(IMAGE.partition(",")[2])
    assert asked(Agent(model()), ["What is this?", BinaryContent(data, media_type="image/png")]).output


@check("structured output: NativeOutput")
def native():
    assert isinstance(asked(Agent(model(), output_type=NativeOutput(Shape))).output, Shape)


@check("structured output: PromptedOutput")
def prompted():
    agent = Agent(model(), output_type=PromptedOutput(Anything))
    data = base64.b64decode(IMAGE.partition(",")[2])
    found = asked(agent, [TAUGHT, BinaryContent(data, media_type="image/png")])
    assert isinstance(found.output, Anything)


@check("structured output: ToolOutput")
def by_tool():
    needs_tools()
    assert isinstance(asked(Agent(model(), output_type=ToolOutput(Shape))).output, Shape)


@check("structured output: streamed")
def streamed():
    async def last():
        async with Agent(model(), output_type=NativeOutput(Shape)).run_stream(QUESTION) as result:
            return [piece async for piece in result.stream_output(debounce_by=None)][-1]

    assert isinstance(asyncio.run(last()), Shape)


@check("tools in a loop")
def tools():
    """Each answer calls the output tool, or `paint`. `paint` is offered until its first call."""
    needs_tools()
    painted = []
    agent = Agent(model(), output_type=ToolOutput(Shape))

    async def unless_painted(context, definition):
        return None if painted else definition

    @agent.tool_plain(prepare=unless_painted)
    def paint(corners: Corners) -> str:
        painted.append(corners)
        return "painted"

    found = asked(agent, usage_limits=UsageLimits(request_limit=4))
    assert isinstance(found.output, Shape) and found.usage.requests == 1 + bool(painted)


@check("errors")
def errors():
    try:
        asked(Agent(model()), model_settings={"temperature": -1})
    except ModelHTTPError as error:
        assert error.status_code == 400 and error.body["param"] == "temperature"
    else:
        raise AssertionError("the request was accepted")


@check("retries")
def retries():
    with full_queue():
        assert asked(Agent(model(SMALL)), model_settings={"max_tokens": 2}).output


run()
