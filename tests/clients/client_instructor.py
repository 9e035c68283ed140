"""Checks the Python package instructor in each mode for OpenAI's API."""

import instructor
import openai
from checks import (
    BASE,
    IMAGE,
    MODEL,
    QUESTION,
    SMALL,
    TAUGHT,
    Anything,
    Shape,
    check,
    full_queue,
    needs_tools,
    run,
)
from instructor.core import InstructorRetryException

Mode = instructor.Mode
ASKS = [{"role": "user", "content": QUESTION}]


def client(mode, url=BASE, **options):
    return instructor.from_openai(openai.OpenAI(base_url=url, api_key="none", **options), mode=mode)


def asked(mode, model=Shape, **fields):
    return client(mode).chat.completions.create(
        **{"model": MODEL, "messages": ASKS, "response_model": model, "max_retries": 1, **fields}
    )


@check("chat")
def chat():
    said = client(Mode.JSON).chat.completions.create(model=MODEL, messages=ASKS, response_model=None)
    assert said.choices[0].message.content


@check("structured output: JSON_SCHEMA")
def by_schema():
    assert isinstance(asked(Mode.JSON_SCHEMA), Shape)


@check("structured output: JSON")
def by_json():
    content = [TAUGHT, instructor.Image.from_base64(IMAGE)]
    found = asked(Mode.JSON, Anything, messages=[{"role": "user", "content": content}])
    assert isinstance(found, Anything)


@check("structured output: MD_JSON")
def by_markdown():  # The model was not trained to write a Markdown code block, so a grammar forces it.
    form = {"structured_outputs": {"json": Shape.model_json_schema()}}
    assert isinstance(asked(Mode.MD_JSON, extra_body=form), Shape)


@check("structured output: JSON_O1")
def by_o1():
    assert isinstance(asked(Mode.JSON_O1), Shape)


for _mode in (Mode.TOOLS, Mode.TOOLS_STRICT):

    @check(f"structured output: {_mode.name}")
    def by_tools(mode=_mode):
        needs_tools()
        assert isinstance(asked(mode), Shape)


@check("structured output: FUNCTIONS")
def by_functions():  # OpenAI's deprecated functions, which instructor converts to tools.
    needs_tools()
    assert isinstance(asked(Mode.FUNCTIONS), Shape)


@check("structured output: PARALLEL_TOOLS")
def by_parallel_tools():
    needs_tools()
    from collections.abc import Iterable

    try:
        found = list(asked(Mode.PARALLEL_TOOLS, Iterable[Shape]))
    except (InstructorRetryException, TypeError) as error:
        # In this mode a model may answer with text in place of a tool call. The included model does so, and
        # instructor fails to parse the text.
        assert "Error code" not in str(error), error
    else:
        assert all(isinstance(each, Shape) for each in found)


@check("streams: partial")
def partial():
    pieces = list(
        client(Mode.JSON_SCHEMA).chat.completions.create_partial(
            model=MODEL, messages=ASKS, response_model=Shape
        )
    )
    assert len(pieces) > 1 and pieces[-1].colour


@check("streams: iterable of tools")
def iterable():
    needs_tools()
    pieces = client(Mode.TOOLS).chat.completions.create_iterable(
        model=MODEL, messages=ASKS, response_model=Shape, max_tokens=300
    )
    assert all(isinstance(each, Shape) for each in pieces)


@check("images")
def image():
    content = ["What is this?", instructor.Image.from_base64(IMAGE)]
    assert isinstance(asked(Mode.JSON_SCHEMA, messages=[{"role": "user", "content": content}]), Shape)


@check("errors")
def errors():
    try:
        asked(Mode.JSON_SCHEMA, temperature=-1)
    except InstructorRetryException as error:
        assert "temperature must be a number" in str(error)
    else:
        raise AssertionError("the request was accepted")


@check("retries")
def retries():
    with full_queue():
        found = client(Mode.JSON_SCHEMA, SMALL).chat.completions.create(
            model=MODEL, messages=ASKS, response_model=Shape, max_retries=1
        )
    assert isinstance(found, Shape)


run()
