"""Tests parsing tool calls from an answer's text. The result does not depend on the chunks in which tokens
arrive, and no text is lost.
"""

import json
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmengine.events.call_ids import call_id
from mmengine.request import GrammarRequest, SamplingParams
from mmengine.serve.chat.completion import AccumulatedChoice
from mmengine.serve.text.choice_deltas import ChoiceDeltas
from mmengine.serve.text.reasoning import NO_REASONING, ReasoningTokens
from mmengine.serve.text.tool_call_parser import CallDelta, ToolCallParser
from mmengine.structured_output.request.tool_calls import RequestedTool, ToolCalls, calls_of, tool_calls
from tests.serve.serve_fakes import ByteTokenizer

TOKENIZER = ByteTokenizer()
SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "value": {}, 'o\'dd "name"': {"type": ["string", "null"]}},
    "additionalProperties": False,
}
TOOLS = [
    RequestedTool("say", json.dumps(SCHEMA).encode(), "tools[0].function.parameters", True),
    RequestedTool("now", b'{"type":"object","additionalProperties":false}', "tools[1]", True),
    RequestedTool("any", b'{"type":"object","additionalProperties":{"type":"string"}}', "tools[2]", True),
]
FORMS = {
    form: calls_of(tool_calls(TOOLS, ToolCalls(form, (), reasoning=("<think>", "</think>"))))
    for form in ("json", "xml")
}
quick = settings(max_examples=120, deadline=None)
texts = st.text(
    st.one_of(st.sampled_from('\\"{}[]<>/\n'), st.characters(exclude_categories=["Cs"])), max_size=12
) | st.sampled_from(
    ["</tool_call>", "<tool_call>", '\\"}\n</tool_call>', "</parameter", "</parameter>", "日本"]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
arguments = st.fixed_dictionaries(
    {}, optional={"text": texts, "value": values, 'o\'dd "name"': st.none() | texts}
)
calls = st.tuples(st.just("say"), arguments) | st.tuples(st.sampled_from(["now", "any"]), st.just({}))
said = st.sampled_from(["", "I look it up.", " \n", "a < b <tool", "x\n\n"])


def written(form, name, given):
    """Return a call in a template's syntax, or None if XML cannot express the call."""
    if form == "json":
        body = json.dumps({"name": name, "arguments": given}, ensure_ascii=False)
        return f"<tool_call>\n{body}\n</tool_call>"
    lines = []
    for key, value in given.items():
        text = value if key == "text" else json.dumps(value, ensure_ascii=False)
        if "\n</parameter>" in text + "\n</parameter>"[:-1]:
            return None
        lines.append(f"<parameter={key}>\n{text}\n</parameter>\n")
    return f"<tool_call>\n<function={name}>\n{''.join(lines)}</function>\n</tool_call>"


def told(form, data, cuts=(), *, reasoning=NO_REASONING, stop=(), **options):
    """Push the tokens `data` in chunks, which end at `cuts` (modulo the length). Returns the accumulated
    choice, the deltas, and the ChoiceDeltas object.
    """
    asked = FORMS[form] if isinstance(form, str) else form
    grammar = GrammarRequest("tool_calls", msgspec.json.encode(asked).decode())
    deltas = ChoiceDeltas(TOKENIZER, SamplingParams(stop=stop), reasoning, grammar, **options)
    whole, found = AccumulatedChoice(0), []
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for start, end in zip(places, places[1:], strict=False):
        found += deltas.push(list(data[start:end]), None)
    look = deltas.argument_check()
    found.append(deltas.finish(() if look is None else look()))
    for delta in found:
        whole.add(delta)
    return whole, found, deltas


@quick
@given(st.sampled_from(["json", "xml"]), said, st.lists(calls, max_size=3), st.lists(st.integers(0, 999)))
def test_an_answer_is_its_calls_however_it_comes(form, text, made, cuts):
    # The parsed calls and deltas are equal for any division of the answer into chunks.
    parts = [written(form, *call) for call in made]
    if None in parts:
        return
    data = (text + "\n".join(parts)).encode()
    whole, found, deltas = told(form, data, cuts)
    assert found == told(form, data)[1] == told(form, data, range(len(data)))[1]
    message = whole.message("r")
    assert [call.function.name for call in message.tool_calls or ()] == [name for name, _ in made]
    assert [json.loads(call.function.arguments) for call in message.tool_calls or ()] == [
        given for _, given in made
    ]
    assert (message.content or "") == (text.rstrip() if made else text)
    assert deltas.end_reason("stop") == ("tool_calls" if made else "stop")
    for delta in found:
        assert not (delta.call and delta.content)
        assert delta.call is None or bool(delta.call.name) != bool(delta.call.arguments)


@quick
@given(st.sampled_from(["json", "xml"]), calls, st.integers(0, 999))
def test_a_cut_answer_s_error_quotes_its_beginning(form, call, cut):
    """A call in a cut answer has the whole call's id. Its arguments are a prefix of the whole arguments."""
    text = written(form, *call)
    if text is None:
        return
    data = ("hm " + text).encode()
    whole, cut_off = told(form, data)[0], told(form, data[: cut % len(data)])[0]
    ended, begun = whole.message("r"), cut_off.message("r")
    if begun.tool_calls:
        assert begun.tool_calls[0].id == ended.tool_calls[0].id
        found, full = (each.tool_calls[0].function.arguments for each in (begun, ended))
        assert full.startswith(found)
    assert not (begun.tool_calls and begun.content != "hm")


def test_json_goes_out_byte_for_byte():
    given = '{"text" : "\\u00e9\\n</tool_call>\\ud83d\\ude00" ,"value":[1.50, 1E2, {"a" :null}]}'
    text = f'<tool_call>\n{{"name": "say", "arguments": {given}}}\n</tool_call>'
    for cuts in ((), range(300)):
        assert told("json", text.encode(), cuts)[0].message("r").tool_calls[0].function.arguments == given


def test_xml_becomes_the_json_that_it_means():
    text = (
        '<tool_call>\n<function=say>\n<parameter=text>\n1\n</para</tool_call>"\\\n\n</parameter>\n'
        '<parameter=value>\n{"a": [1, "b"]}\n</parameter>\n<parameter=value>\n2\n</parameter>\n'
        "</function>\n</tool_call>\n<tool_call>\n<function=any>\n<parameter=k>\n7\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
    )
    message = told("xml", text.encode())[0].message("r")
    assert [call.function.arguments for call in message.tool_calls] == [
        '{"text": "1\\n</para</tool_call>\\"\\\\\\n", "value": {"a": [1, "b"]}}',
        '{"k": "7"}',
        "{}",
    ]


def test_ids_are_of_the_request_the_answer_and_the_call():
    found = [call_id("r", 0, 0), call_id("r", 0, 1), call_id("r", 1, 0), call_id("s", 0, 0)]
    assert len(set(found)) == 4 and found == [
        call_id(*of) for of in [("r", 0, 0), ("r", 0, 1), ("r", 1, 0), ("s", 0, 0)]
    ]
    assert all(len(each) == 29 and each.startswith("call_") for each in found)


def test_reasoning_is_apart_and_holds_no_calls():
    # The start marker of a call within the reasoning is text.
    call = written("json", "now", {})
    reasoning = ReasoningTokens(False, tuple(b"<think>"), tuple(b"</think>"))
    data = f"<think>shall I say <tool_call>?</think>\n\n{call}".encode()
    message = told("json", data, reasoning=reasoning)[0].message("r")
    assert message.reasoning_content == "shall I say <tool_call>?"
    assert message.content is None and [each.function.name for each in message.tool_calls] == ["now"]
    whole, _, deltas = told("json", data, reasoning=reasoning, show_reasoning=False)
    assert whole.message("r").reasoning_content is None and deltas.num_reasoning_tokens > 20


def test_stop_strings_end_the_text_and_no_call():
    call = written("json", "say", {"text": "stop here"})
    whole, _, deltas = told("json", f"I go. {call}".encode(), stop=("here",))
    assert whole.message("r").tool_calls and whole.message("r").content == "I go."
    assert deltas.end_reason("stop") == "tool_calls"
    whole, _, deltas = told("json", b"I go here", range(30), stop=("here",))
    assert whole.message("r").content == "I go " and deltas.stopped
    assert deltas.end_reason("stop") == "stop" and deltas.stop_reason("string") == "here"
    whole = told("json", f"wait, he{call}".encode(), stop=("here",))[0].message("r")
    assert whole.content == "wait, he" and whole.tool_calls


def test_an_answer_with_a_form_makes_no_calls():
    """With a response format, the start marker of a call after other text is text. An answer that begins with
    the marker, apart from white space, is a call.
    """
    form = msgspec.structs.replace(FORMS["json"], answer=msgspec.Raw(b'{"type":"string"}'))
    for text in ('"<tool_call>\\n{}"', ' \n"a"'):
        whole, _, deltas = told(form, text.encode(), range(40))
        assert whole.message("r").content == text and deltas.end_reason("stop") == "stop"
    assert told(form, b"\n\n" + written("json", "now", {}).encode())[0].message("r").tool_calls


@pytest.mark.parametrize(("choice", "reason"), [("named", "stop"), ("required", "tool_calls")])
def test_a_named_choice_ends_as_openais(choice, reason):
    # With tool_choice a named function, OpenAI's finish reason after the call is "stop".
    form = msgspec.structs.replace(FORMS["json"], choice=choice)
    deltas = told(form, written("json", "now", {}).encode())[2]
    assert deltas.end_reason("stop") == reason and deltas.end_reason("length") == "length"


def test_errors_in_unenforced_arguments_are_reported():
    schema = (
        b'{"type":"object","properties":{"a":{"type":"array","uniqueItems":true,"items":{"type":"number"}}}}'
    )
    form = calls_of(tool_calls([RequestedTool("f", schema, "p", False)], ToolCalls("json", ())))
    assert form.unenforced == ("f",)
    texts = [
        f'<tool_call>\n{{"name": "f", "arguments": {{"a": {a}}}}}\n</tool_call>' for a in ("[1, 1]", "[1, 2]")
    ]
    found = told(form, "\n".join(texts).encode())[1]
    assert [(each.call, each.message) for each in found[-1].argument_errors] == [
        (0, "uniqueItems is violated at #/a")
    ]


def test_the_work_grows_with_the_text():
    """The parser never holds back more than the text before a call's arguments, so each push reads little
    text.
    """
    body = json.dumps({"text": "".join(random.Random(1).choices('ab{}"\\<', k=10_000))})
    text = f'<tool_call>\n{{"name": "say", "arguments": {body}}}\n</tool_call>'
    parser, pieces, most_held = ToolCallParser(FORMS["json"]), [], 0
    for char in text:
        pieces += parser.push(char)
        most_held = max(most_held, len(parser._held) + len(parser._space))
    assert "".join(each.arguments for each in pieces if isinstance(each, CallDelta)) == body
    assert most_held <= len('\n{"name": "say", "arguments": ')
