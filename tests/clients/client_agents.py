"""Checks for openai-agents with its chat completions model."""

import asyncio

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    ToolCallItem,
    ToolCallOutputItem,
    function_tool,
    set_tracing_disabled,
)
from checks import (
    BASE,
    IMAGE,
    MODEL,
    QUESTION,
    SMALL,
    Colour,
    Corners,
    Shape,
    check,
    full_queue,
    needs_tools,
    run,
)

set_tracing_disabled(True)


@function_tool
def paint(colour: Colour, corners: Corners) -> str:
    """Paint a shape."""
    return f"painted with {corners} corners in {colour}"


def agent(url=BASE, **options):
    client = openai.AsyncOpenAI(base_url=url, api_key="none")
    return Agent(name="one", model=OpenAIChatCompletionsModel(model=MODEL, openai_client=client), **options)


def asked(one, prompt=QUESTION):
    return asyncio.run(Runner.run(one, prompt))


@check("chat")
def chat():
    found = asked(agent(instructions="Be brief."))
    assert found.final_output
    assert asked(agent(), [*found.to_input_list(), {"role": "user", "content": "And a star?"}]).final_output


async def _streamed(one):
    found = Runner.run_streamed(one, QUESTION)
    kinds = [event.data.type async for event in found.stream_events() if event.type == "raw_response_event"]
    return kinds, found


@check("streams")
def stream():
    kinds, found = asyncio.run(_streamed(agent(model_settings=ModelSettings(include_usage=True))))
    assert "response.output_text.delta" in kinds and kinds[-1] == "response.completed" and found.final_output


@check("images")
def image():
    parts = [{"type": "input_text", "text": "What is this?"}, {"type": "input_image", "image_url": IMAGE}]
    assert asked(agent(), [{"role": "user", "content": parts}]).final_output


@check("structured output")
def structured():
    assert isinstance(asked(agent(output_type=Shape)).final_output, Shape)


@check("tools in a loop")
def tools():
    needs_tools()
    found = asked(agent(tools=[paint], model_settings=ModelSettings(tool_choice="required")))
    kinds = {type(item) for item in found.new_items}
    assert {ToolCallItem, ToolCallOutputItem} <= kinds and found.final_output


@check("tools in a loop: streamed")
def streamed_tools():
    needs_tools()
    one = agent(tools=[paint], model_settings=ModelSettings(tool_choice="paint", parallel_tool_calls=False))
    kinds, found = asyncio.run(_streamed(one))
    assert "response.function_call_arguments.delta" in kinds and found.final_output


@check("errors")
def errors():
    try:
        asked(agent(model_settings=ModelSettings(temperature=-1)))
    except openai.BadRequestError as error:
        assert error.param == "temperature"
    else:
        raise AssertionError("the request was accepted")


@check("retries")
def retries():
    with full_queue():
        assert asked(agent(SMALL, model_settings=ModelSettings(max_tokens=2))).final_output


run()
