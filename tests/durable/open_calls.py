"""Fifty calls of all kinds that are open when a server is killed."""

import base64
import json
from typing import NamedTuple

from tests.pictures import scene

# long enough that a structured answer is still incomplete when the server is killed
LONG = {"type": "string", "minLength": 400, "maxLength": 500}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "area",
            "description": "Of a shape.",
            "parameters": {
                "type": "object",
                "properties": {"note": LONG},
                "required": ["note"],
            },
        },
    }
]
SHAPE = {
    "type": "json_schema",
    "json_schema": {
        "name": "note",
        "schema": {
            "type": "object",
            "properties": {"note": LONG},
            "required": ["note"],
            "additionalProperties": False,
        },
    },
}
CHAT, COMPLETIONS, RESPONSES, BATCHES = "chat", "completions", "responses", "batches"
MAX_TOKENS = {True: 260, False: 200}  # for the echo engine, and for the included checkpoint
# calls that end early, while other calls are open
SHORT = {4, 10, 13, 21, 24, 27, 29, 30, 43}
SHORT_TOKENS = 12
NUM_LINES, LINES = 8, 100  # the batch has 8 lines, which are numbered from 100


class Call(NamedTuple):
    """A call to the route `api`.

    `key` is the header by which the server recognises a repeated call: "X-Request-Id", "Idempotency-Key" or
    "" for none. With `uploads`, the call's image is an uploaded file.
    """

    name: str
    api: str
    body: dict
    stream: bool = False
    background: bool = False
    key: str = ""
    uploads: bool = False


class _Calls:
    """Builds the calls. With `echo`, the engine repeats the prompt, so each prompt contains the wanted
    answer.
    """

    def __init__(self, echo):
        self._echo, self.calls = echo, []

    def add(self, count, api, what, *, is_long=True, **how):
        """Add `count` calls. `what`: maps a call's number to body fields."""
        for place in range(count):
            number = len(self.calls)
            body = {**(self._length(number) if is_long else {}), **what(number)}
            key = ("X-Request-Id", "", "Idempotency-Key")[place % 3]
            stream, background = how.get("stream", False), how.get("background", False)
            name = f"{number}-{how.get('kind', api)}{'-stream' * stream}{'-background' * background}"
            self.calls.append(Call(name, api, body, stream, background, key, how.get("uploads", False)))

    def _length(self, number):
        """Return the body fields that prevent an early end, and make the answer greedy or seeded. The echo
        engine needs no such fields.
        """
        if self._echo:
            return {}
        chance = {"temperature": 0.9, "seed": number} if number % 2 else {"temperature": 0}
        return {"ignore_eos": True, **chance}

    def text(self, number):
        if not self._echo:
            return f"What is shape {number}?"
        count = 1 if number in SHORT or number >= LINES else 5
        return f"Text {number} é日: " + "the triangle is left of the star; "[number % 7 :] * count

    def num_tokens(self, number):
        return SHORT_TOKENS if number in SHORT and not self._echo else MAX_TOKENS[self._echo]

    def said(self, number, text):
        """Return `text` for the echo engine, or the call's own prompt for the checkpoint."""
        return text if self._echo else self.text(number)

    def message(self, number, text=None, image=None):
        text = self.text(number) if text is None else self.said(number, text)
        content = text if image is None else [{"type": "text", "text": text}, image]
        return [{"role": "user", "content": content}]

    def chat(self, number, text=None, **fields):
        return {"messages": self.message(number, text), "max_tokens": self.num_tokens(number), **fields}


def calls(echo):
    """Return the fifty calls."""
    made = _Calls(echo)
    note = "a star is right of the square, and " * 4
    called = f'<tool_call>\n{{"name": "area", "arguments": {{"note": "{note}"}}}}\n</tool_call>'
    thought = f"<think>{note}</think>{note[:40]}"
    formed = json.dumps({"note": note})
    url = "data:image/png;base64," + base64.b64encode(scene()).decode()
    image = {"type": "image_url", "image_url": {"url": url}}
    uploaded = {"type": "image_url", "image_url": {"url": "UPLOADED"}}
    # The echo engine chooses to call a tool; the included checkpoint is forced to.
    tools = {"tools": TOOLS} if echo else {"tools": TOOLS, "tool_choice": "required"}
    chat, add, message = made.chat, made.add, made.message
    add(7, CHAT, chat, stream=True)
    add(5, CHAT, chat)
    add(3, COMPLETIONS, lambda n: {"prompt": made.text(n), "n": 2, "max_tokens": made.num_tokens(n)})
    prompts = lambda n: {"prompt": [made.text(n), made.text(n + 50)], "max_tokens": made.num_tokens(n)}  # noqa: E731
    add(1, COMPLETIONS, prompts, kind="two-prompts")
    add(1, COMPLETIONS, prompts, kind="two-prompts", stream=True)

    def response(number, **fields):
        return {"input": made.text(number), "max_output_tokens": made.num_tokens(number), **fields}

    add(6, RESPONSES, response, stream=True)
    add(
        1,
        RESPONSES,
        lambda n: response(n, input=made.said(n, formed), text=_text_format()),
        stream=True,
        is_long=False,
    )
    add(4, RESPONSES, response, background=True)
    add(1, RESPONSES, response, background=True, stream=True)
    add(1, RESPONSES, response)
    add(1, BATCHES, lambda n: {"lines": [chat(LINES + place) for place in range(NUM_LINES)]}, is_long=False)
    add(2, CHAT, lambda n: chat(n, called, tools=TOOLS, tool_choice="required"), kind="tools", is_long=False)
    add(2, CHAT, lambda n: chat(n, called, **tools), kind="tools", stream=True, is_long=False)
    add(2, CHAT, lambda n: chat(n, formed, response_format=SHAPE), kind="form", is_long=False)
    add(1, CHAT, lambda n: chat(n, formed, response_format=SHAPE), kind="form", stream=True, is_long=False)
    add(2, CHAT, lambda n: chat(n, n=3), kind="several")
    add(1, CHAT, lambda n: chat(n, n=3), kind="several", stream=True)
    add(1, CHAT, lambda n: chat(n) | {"messages": message(n, image=image)}, kind="image")
    add(1, CHAT, lambda n: chat(n) | {"messages": message(n, image=image)}, kind="image", stream=True)
    files = lambda n: chat(n) | {"messages": message(n, image=uploaded)}  # noqa: E731
    add(1, CHAT, files, kind="file", uploads=True)
    add(1, CHAT, files, kind="file", uploads=True, stream=True)
    reasons = lambda n: chat(n, thought, **tools)  # noqa: E731
    add(2, CHAT, reasons, kind="reasoning", is_long=False)
    add(1, CHAT, reasons, kind="reasoning", stream=True, is_long=False)
    add(1, CHAT, lambda n: chat(n, logprobs=True, top_logprobs=1), kind="logprobs")
    add(1, CHAT, lambda n: chat(n, logprobs=True, top_logprobs=1), kind="logprobs", stream=True)
    assert len(made.calls) == 50, len(made.calls)
    return made.calls


def _text_format():
    return {"format": {"type": "json_schema", "strict": True, **SHAPE["json_schema"]}}
