"""Test the Lark grammars of custom tools: parsing, and enforcement within a JSON string."""

import json
import random
from typing import Any

import pytest
from llguidance import LLMatcher

from mmengine.request import GrammarRequest
from mmengine.structured_output.lark.json_text import json_string_grammar
from mmengine.structured_output.lark.parser import UnsupportedLark
from mmengine.structured_output.request.tool_calls import RequestedTool, ToolCalls, tool_calls
from tests.structured.accepting import TOKENIZER, accepts, allowed, byte_backend

BACKEND = byte_backend()
PATCH = """
start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
?hunk: add | update  // a comment
add: "*** Add File: " filename LF ("+" /(.*)/ LF)+ -> added
update: "*** Update File: " filename LF [move] change?
move: "*** Move to: " filename LF
change: (context | line)+ eof?
context: ("@@" | "@@ " /(.+)/) LF
line: ("+" | "-" | " ") /(.*)/ LF
eof: "*** End of File" LF
filename: /(.+)/
%import common.LF
"""
EXPRESSION = """
start: sum
sum: product (("+" | "-") product)*
product: NUMBER | "(" sum ")" | ESCAPED_STRING
%import common (NUMBER, ESCAPED_STRING)
"""
GOOD_PATCH = (
    '*** Begin Patch\n*** Add File: a "b".txt\n+x \\ y\t\n+\n'
    "*** Update File: é\n@@ f()\n-a\n c\n*** End Patch"
)
# A grammar, matching texts, and texts that do not match.
CASES: dict[str, tuple[str, list[str], list[str]]] = {
    "patch": (
        PATCH,
        [GOOD_PATCH, GOOD_PATCH + "\n", GOOD_PATCH.replace("@@ f()", "@@")],
        [GOOD_PATCH + "x", GOOD_PATCH.replace("+x", "x"), GOOD_PATCH.replace("***", "**"), ""],
    ),
    "recursive": (EXPRESSION, ["1", "(1+(2-3.5))", '"a\\"b"+1'], ["(1", "1+", '"a', "()"]),
    "quotes and backslashes": ('start: /["\\\\]+/ "\\"" "\\\\"', ['\\"\\', '"\\"\\'], ['"', "\\\\"]),
    "control characters": (r'start: "\x01" /[\x00-\x1f]/', ["\x01\x1f", "\x01\n"], ["\x01", "\x01 "]),
    "a line has no end": (
        r"start: /.+/ NL" "\nNL: /\\r?\\n/",
        ["a\n", '"\r\n', "\\n\n"],
        ["a", "a\n\n", "\n"],
    ),
    "any text": (r"start: /.*/s", ["", "a\n\nb", "\\"], []),
    "counts": ('start: "a"~2..3 "b"{2} "c"{1,}', ["aabbc", "aaabbccc"], ["abbc", "aabbbc", "aabb"]),
    "ranges": ('start: ("a".."c" | "0" .. "9")+', ["a0c9"], ["d", ""]),
    "folded": ('start: "Yes"i', ["yes", "YES", "yEs"], ["ye", "y"]),
    "classes": (r"start: /\d+\s\w/", ["12 a", "1\u00a0_"], ["a a", "1a", "1 -"]),
    "newlines": (
        "start: NEWLINE WORD\n%import common.NEWLINE -> NEWLINE\n%import common.WORD",
        ["\n\r\na"],
        ["a"],
    ),
    "alternatives over lines": ('start: one\n  | "b"\none: "a"', ["a", "b"], ["ab"]),
}


def spelled(text: str) -> str:
    """Return the JSON string with the shortest escapes, as JSON.stringify writes it."""
    return json.dumps(text, ensure_ascii=False)


def matcher_of(lark: str) -> Any:
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(json_string_grammar(lark)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


@pytest.mark.parametrize("name", CASES)
def test_the_spelling_of_each_text_is_accepted(name: str) -> None:
    lark, good, bad = CASES[name]
    matcher = matcher_of(lark)
    for text in good:
        assert accepts(matcher, spelled(text)), text
    for text in bad:
        assert not accepts(matcher, spelled(text)), text


def test_random_answers_are_json_strings_that_the_grammar_derives() -> None:
    """llguidance checks each decoded text with the original grammar."""
    source = random.Random(8)
    for name in ("patch", "recursive", "ranges", "counts", "a line has no end"):
        own = LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(CASES[name][0]), log_level=0)
        count = 0
        for _ in range(12):
            matcher, out = matcher_of(CASES[name][0]), bytearray()
            while len(out) < 150 and not matcher.is_stopped():
                options = [byte for byte in allowed(matcher) if byte < 256]
                ends = [byte for byte in options if byte in b'"\\)n']
                out.append(source.choice(ends if ends and source.random() < 0.5 else options))
                assert matcher.consume_token(out[-1])
            if matcher.is_accepting():
                count += accepts(own, json.loads(out.decode()))
                assert accepts(own, json.loads(out.decode())), out
        assert count or name == "patch"


@pytest.mark.parametrize(
    ("lark", "why"),
    [
        ('a: "b"', "no rule called start"),
        ("start: b", "there is no rule 'b'"),
        ('start: "a" b\nb: "c"\nb: "d"', "defined twice"),
        ('start: "a"\n%ignore /x/', "line 2: '%ignore"),
        ("start: <think>", "is not supported"),
        ('start[lazy]: "a"', "expected a rule|not supported"),
        ('start: "a" & /b/', "is not supported"),
        ('start: ~"a"', "is not supported"),
        ('start: ("a"', "not closed"),
        ("start: /a(/", "a group is not closed"),
        ("start: /a/x", "flags 'x'"),
        (r"start: /[^\w]/", "negated"),
        (r"start: /\D/", "negated"),
        ("start: /a(?=b)/", "is not known"),
        ('start: "\\q"', "unknown escape"),
        ('start: "a"~9..1', "must count up"),
        ("%import common.NOTHING\nstart: NOTHING", "common.NOTHING is not supported"),
        ("%import python.NAME\nstart: NAME", "is not supported"),
        ("start: " + "(" * 100 + '"a"' + ")" * 100, "nested more than"),
        ("start: " + '"a" ' * 20_000, "limit is 65,536"),
        ("start: \x00", "is not supported"),
        ("start: x\nx: x", "a rule that is only itself"),
        ("start: " + " | ".join(f'"w{n}x{n * 7}"' for n in range(2_500)), "pieces"),
    ],
)
def test_what_is_not_supported_is_named(lark: str, why: str) -> None:
    with pytest.raises(UnsupportedLark, match=why):
        json_string_grammar(lark)


@pytest.mark.parametrize("form", ["json", "xml"])
def test_a_call_has_an_input_that_the_grammar_derives(form: Any) -> None:
    parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    tool = RequestedTool("patch", json.dumps(parameters).encode(), ("tools", 0), False, PATCH)
    made = tool_calls([tool], ToolCalls(form, (), "required"))
    matcher = BACKEND.compile(GrammarRequest(made.kind, made.source, max_digits=40)).matcher()
    head, tail = '<tool_call>\n{"name": "patch", "arguments": {"input": ', "}}\n</tool_call>"
    if form == "xml":
        head = "<tool_call>\n<function=patch>\n<parameter=input>\n"
        tail = "\n</parameter>\n</function>\n</tool_call>"
    assert accepts(matcher, head + spelled(GOOD_PATCH) + tail, end=256)
    assert not accepts(matcher, head + spelled("anything") + tail, end=256)
