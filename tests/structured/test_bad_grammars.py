"""Tests that invalid, hostile or oversized grammars are refused, if possible before the model runs.

A grammar that fails later ends only its own answer.
"""

import json
import random
import re
import subprocess
import sys

import numpy as np
import pytest

from mmengine.errors import InvalidRequest, RequestFailed
from mmengine.serve.batch.run_batch import run_batch
from mmengine.serve.engine.engine import Engine
from mmengine.serve.prompt.options import Options, make_sampling
from mmengine.serve.prompt.prompt import Prompt
from mmengine.structured_output.engines.engine_errors import describe_error
from mmengine.structured_output.json_schema.vocabulary.refusal import SchemaRefused
from mmengine.structured_output.request.spec import grammar_of
from tests.structured.accepting import byte_backend

pytest.importorskip("mmengine_shapes")

TOKENS = [bytes([byte]) for byte in range(256)] + [b"<|end|>"]
END = 256


@pytest.fixture(scope="module")
def backend():
    return byte_backend(None, b"<|end|>")


def form(schema):
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def allowed(backend, matcher):
    bits = np.zeros((1, -(-len(TOKENS) // 32)), np.uint32)
    backend.fill([matcher], bits)
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist())


def accepts(backend, asked, text):
    matcher = backend.compile(asked).matcher()
    for byte in text.encode():
        if byte not in allowed(backend, matcher) or not matcher.consume_tokens([byte]):
            return False
    return matcher.is_stopped() or END in allowed(backend, matcher)


UNUSABLE = [
    # grammar, expected message
    ({"regex": "(a"}, "unclosed group"),
    ({"regex": "a{2,1}"}, "invalid repetition count range"),
    ({"regex": "[b-a]"}, "invalid character class range"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"regex": r"(a)\1"}, "backreferences are not supported"),
    ({"regex": "(" * 9_000 + "a" + ")" * 9_000}, "nested deeper than the grammar engine supports; give"),
    ({"regex": "[a&&b]"}, "the grammar allows no text"),
    ({"regex": "a{1000000000}"}, "needs more states than the grammar engine supports; lower the counts"),
    ({"lark": ""}, "Empty grammar"),
    ({"lark": " \n // nothing\n"}, "no start rule found"),
    ({"lark": "begin: /a/"}, "start"),
    ({"lark": 'start: "a'}, "1("),
    ({"lark": 'start: "a" |||| )'}, "1("),
    ({"lark": 'start: one\none: "a" two'}, 'unknown name: "two"'),
    ({"lark": "start: @elsewhere"}, "unknown grammar @elsewhere"),
    ({"lark": "start: <|nothing|>"}, "unknown special token"),
    ({"lark": "start: <[99999]>"}, "Token range end too large"),
    ({"lark": 'start: %json {"not": {}}'}, "Unimplemented keys"),
    ({"lark": 'start: %json {"$ref": "https://example.org/a"}'}, "example.org"),
    (
        {"lark": "start: " + "(" * 9_000 + '"a"' + ")" * 9_000},
        "nested deeper than the grammar engine supports; give",
    ),
    ({"lark": "start: A\nA: /a+/ & /b+/"}, "the grammar allows no text"),
    ({"lark": 'start: "a" start'}, "rules that never end"),
    ({"lark": "start: " + " | ".join(['"b"'] * 20_500)}, "too many continuations"),
    ({"lark": 'start: r::0x0\nr::_: "a" r::incr(_)'}, "the grammar engine itself failed; write"),
    ({"lark": 'start: %json {"type": "integer", "multipleOf": 1000000007}'}, "needs more states"),
    ({"lark": "start: %json " + '{"a":' * 2_000 + "1" + "}" * 2_000}, "nested deeper than"),
]


@pytest.mark.parametrize(("grammar", "says"), UNUSABLE)
def test_unusable_grammars_are_refused_before_the_model_runs(backend, grammar, says):
    with pytest.raises(InvalidRequest) as refusal:
        backend.compile(grammar_of(grammar=grammar))
    text = str(refusal.value)
    assert text.startswith("the grammar cannot be used: ") and says in text
    assert "\n" not in text and "non-verbose" not in text and len(text) < 400


@pytest.mark.parametrize("pattern", [r"\p{L}{1000}", r"(\p{L}{1,50}){50}", r"[^\p{Lu}]{9000}x"])
def test_a_pattern_that_is_too_large_is_refused_with_its_place(pattern):
    """Without the refusal, the grammar engine would compile such a pattern and fail during the answer."""
    with pytest.raises(SchemaRefused, match="copy more than 10,000 times") as refusal:
        grammar_of(form({"type": "string", "pattern": pattern}))
    assert refusal.value.pointer == "#/pattern"


RAW = re.compile(
    r"panic|backtrace|RecursionError|Exception|unwrap|assertion|\.rs\b|\.py\b|0x[0-9a-f]{6}|\n|<non-"
    r"|\d+ \| start|regex parse error|\(in regex\)"  # The engine's own text around the quoted grammar.
)
REGEX_PARTS = [
    *("a", "b", ".", r"\p{L}", r"\w", r"\b", "[a-z]", "[^x]", "[]", "(?i)", "(?=a)", "(?P<n>", "(", ")", "|"),
    *(
        "*",
        "+",
        "?",
        "{2,}",
        "{0}",
        "{1000}",
        "{9,1}",
        "^",
        "$",
        "\\",
        r"\x{110000}",
        r"\1",
        "&",
        "~",
        "é",
        "\0",
        "/",
    ),
]
LARK_PARTS = [
    *(
        "start: ",
        "\na: ",
        "\nA: ",
        "a",
        "A",
        '"x"',
        "/y+/",
        "(",
        ")",
        "[",
        "]",
        "|",
        "?",
        "*",
        "+",
        "~3",
        "{2,9}",
    ),
    *(
        "&",
        "~",
        "%json {}",
        '%json {"type": [',
        "%regex {}",
        "%ignore A",
        "%import common.INT",
        "%llguidance {}",
    ),
    *(
        "<[3]>",
        "<[0-9999999999]>",
        "<x>",
        "@g",
        "::1",
        "::incr(_)",
        "[lazy]",
        "[max_tokens=3]",
        ":",
        "->",
        "\n",
        "// c",
    ),
]


@pytest.mark.parametrize(("kind", "parts"), [("regex", REGEX_PARTS), ("lark", LARK_PARTS)])
def test_engine_errors_are_rewritten(backend, kind, parts):
    source, refused = random.Random(16), 0
    for _ in range(400):
        text = "start: " * (kind == "lark") + "".join(source.choices(parts, k=source.randrange(1, 12)))
        try:
            backend.compile(grammar_of(grammar={kind: text}))
        except InvalidRequest as refusal:
            refused += 1
            assert not RAW.search(str(refusal)) and len(str(refusal)) < 400, (text, str(refusal))
    assert 50 < refused < 400


def test_known_engine_errors_are_translated():
    trace = (
        "panic: called `Option::unwrap()` on a `None` value\n<backtrace>\n   0: f\n  at x.rs:3\n</backtrace>"
    )
    assert describe_error(trace) == "the grammar engine itself failed; write the grammar differently"
    quoted = "at 3(4): circular reference\n   1 | start: A\n   2 | A: B\n          ^\n"
    assert describe_error(quoted) == "at 3(4): circular reference"
    long = 'at 1(8): invalid regex "' + "a" * 500 + '" (in regex): regex parse error:\n  a\nerror: so it is\n'
    assert describe_error(long) == f"invalid regex '{'a' * 76}...: so it is"


@pytest.mark.parametrize(
    "rule",
    [
        *("<|end|>", "<[256]>", "<[3,256]>", "<[ 250-256 ]>", "<[*]>", "<[^7]>", "<[^0-255]>"),
        'x\nx[stop=""]: /a+/',
    ],
)
def test_rules_must_not_contain_end_tokens(backend, rule):
    """An end token would end the answer before its text is complete."""
    with pytest.raises(InvalidRequest, match=r"^grammar.lark: .* may end an answer"):
        backend.compile(grammar_of(grammar={"lark": f'start: "a" {rule}'}))


@pytest.mark.parametrize("rule", ['"<|end|>"', '"<|end|>"i', '"\\"" "<|end|>"', "/<.end.>/ // <|end|>"])
def test_the_name_of_an_end_token_in_quotes_is_text(backend, rule):
    grammar = grammar_of(grammar={"lark": f"start: {rule}"})
    text = '"<|end|>' if rule.startswith('"\\') else "<|end|>"
    assert accepts(backend, grammar, text) and not accepts(backend, grammar, text[:-1])


@pytest.mark.parametrize("rule", ['"x" <|end|> "y"', '/"/ <|end|> /"/', '"//" <|end|>'])
def test_end_tokens_between_texts_are_refused(backend, rule):
    with pytest.raises(InvalidRequest, match=r"^grammar.lark: .* may end an answer"):
        backend.compile(grammar_of(grammar={"lark": f"start: {rule}"}))


@pytest.mark.parametrize(
    "rule", ["<[7]>", "<[3,250-255]>", "<[^256]>", "<[^250-256]>", "/<.end.>/", "x\nx[lazy]: /a+b/"]
)
def test_rules_may_contain_other_special_tokens(backend, rule):
    assert not accepts(backend, grammar_of(grammar={"lark": f'start: "a" {rule}'}), "a")


def test_rules_are_counted():
    rules = "".join(f"r{n}: r{n + 1}\n" for n in range(2_000))
    with pytest.raises(InvalidRequest, match=r"^grammar.lark has more than 2,000 rules$"):
        grammar_of(grammar={"lark": f'start: r0\n{rules}r2000: "z"'})
    options = "".join(f"r{n}[lazy]: /a/\nT{n}.2 : /b/\n" for n in range(1_001))
    with pytest.raises(InvalidRequest, match="more than 2,000 rules"):
        grammar_of(grammar={"lark": f"start: r0\n{options}"})


def test_intersections_are_counted():
    """Without the limit, many intersections would take gigabytes of memory."""
    parts = " & ".join(f"/.*a{n}.*/" for n in range(18))
    for lark in (f"start: A\nA: {parts}", parts.replace(" & ", "\nB & ").join(("start: A\nA: ", ""))):
        with pytest.raises(InvalidRequest, match=r"^grammar.lark has more than 16 intersections"):
            grammar_of(grammar={"lark": lark})
    patterns = [{"type": "string", "pattern": f"a{n}"} for n in range(18)]
    for schema, is_refused in (({"allOf": patterns}, True), ({"anyOf": patterns}, False)):
        lark = {"lark": f"start: %json {json.dumps(schema)} %json {{"}
        if is_refused:
            with pytest.raises(InvalidRequest, match="has a schema with allOf or .ref and more than 16"):
                grammar_of(grammar=lark)
        else:
            grammar_of(grammar=lark)
    grammar_of(grammar={"lark": 'start: A // a & b\nA: "&&\\"&" /[&]{9}&/ /a/ & /b/' + ' "&"' * 30})


DEEP = """
from mmengine.structured_output.rows.compiler import Compiler
from tests.structured.accepting import byte_backend
from tests.structured.test_bad_grammars import deep_forms
backend = byte_backend(None, b"<|end|>")
compiler = Compiler(backend.compile, deadline_s=3)
for asked in deep_forms():
    compilation = compiler.get(asked)
    while not compilation.is_done:
        compiler.wait(0.1)
    print(compilation.error[:60] or "compiled")
"""


def deep_forms():
    """Yield the most deeply nested grammars that are accepted."""
    left, right = "(" * 24, ")" * 24
    rules = "".join(f'r{n}: {left}"y" r{n + 1} | "x{n}"{right}\n' for n in range(1_900))
    yield grammar_of(grammar={"lark": f'start: r0\n{rules}r1900: "z"'})
    links = {f"d{n}": {"type": "array", "items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(6_000)}
    yield grammar_of(form({"$ref": "#/$defs/d0", "$defs": {**links, "d6000": {"type": "null"}}}))
    terminals = "".join(f'T{n}: {left}T{n + 1} | "x{n}"{right}\n' for n in range(600))
    yield grammar_of(grammar={"lark": f'start: T0\n{terminals}T600: "z"'})


def test_deep_rules_do_not_overflow_the_stack():
    """The compiler's threads have a large stack for the engine's recursion."""
    result = subprocess.run([sys.executable, "-c", DEEP], capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, (result.returncode, result.stderr[-300:])
    said = result.stdout.splitlines()
    assert len(said) == 3 and said[:2] == ["compiled"] * 2
    assert said[2] == "compiled" or said[2].startswith("the grammar ")


def test_ten_thousand_choices_and_properties(backend):
    choices = [f"{n} größer" for n in range(10_000)]
    asked = grammar_of(grammar={"choice": choices})
    assert all(accepts(backend, asked, choices[n]) for n in (0, 9, 4_999, 9_999))
    assert not accepts(backend, asked, "10000 größer") and not accepts(backend, asked, "1")
    asked = grammar_of(grammar={"choice": ["", "a", "aa", "a" * 300]})
    assert [accepts(backend, asked, "a" * n) for n in (0, 1, 2, 3, 300, 301)] == [True] * 3 + [
        False,
        True,
        False,
    ]
    enum = grammar_of(form({"enum": [*(f"wert {n} é\n" for n in range(5_000)), *range(5_000), None]}))
    for text in ('"wert 4999 é\\n"', "4999", "null"):
        assert accepts(backend, enum, text)
    assert not accepts(backend, enum, "5000") and not accepts(backend, enum, '"wert 5000 é\\n"')
    wide = form({"type": "object", "properties": {f"p{n}": {"type": "null"} for n in range(2_000)}})
    assert accepts(backend, grammar_of(wide), '{"p0":null, "p7" :null,"p1999":null}')
    assert not accepts(backend, grammar_of(wide), '{"p7":null,"p1999":1}')


def test_sets_with_nul_contain_their_characters(backend):
    # Each regular expression accepts all single characters except the quote.
    for regex in (r'[^"]|\x00', r'[^"\x00]|\x00', r'([^"]|\x00)'):
        for text in ("a", '"', "\x00", "é", "\\", "\x01"):
            assert accepts(backend, grammar_of(grammar={"regex": regex}), text) == (text != '"'), (
                regex,
                text,
            )


LATE = {
    "expressions": (
        {"lark": "start: /[b-z]{6}/ BIG\nBIG: /a{1000000000}/"},
        "more states than the grammar engine supports",
    ),
    "endless": ({"lark": 'start: /[b-z]{6}/ bad\nbad: "a" bad'}, "rules that never end"),
    "wide": (
        {"lark": "start: /[b-z]{6}/ wide\nwide: " + " | ".join(['"b"'] * 20_500)},
        "too many continuations",
    ),
}


@pytest.mark.parametrize("name", LATE)
def test_a_limit_reached_mid_answer_ends_only_that_answer(name):
    grammar, says = LATE[name]
    forms = [{"choice": ["goes on"]}, grammar, {"choice": ["and on"]}]
    with Engine() as engine:
        asked = [
            Options(
                make_sampling({"max_tokens": 150, "temperature": 1.5, "seed": 3}),
                grammar=grammar_of(grammar=each),
            )
            for each in forms
        ]
        found = dict(run_batch(engine, ((Prompt.of("Say."), options) for options in asked)))
        error = found[1].error() if not isinstance(found[1], Exception) else found[1]
        assert isinstance(error, RequestFailed) and len(found[1].token_ids) > 0, found[1]
        assert re.search(f"its grammar cannot continue: .*{says}", str(error))
        assert (found[0].text, found[2].text) == ("goes on", "and on")
        assert engine.generate_json("Say.", {"const": 1}) == 1


def test_an_engine_refusal_fails_only_its_request():
    with Engine() as engine:
        for number, (grammar, says) in enumerate(
            [*UNUSABLE[::4], ({"lark": 'start: "a" start'}, "rules that never end")]
        ):
            good = Options(make_sampling({}), grammar=grammar_of(grammar={"choice": [f"fine {number}"]}))
            bad = Options(make_sampling({}), grammar=grammar_of(grammar=grammar))
            found = dict(run_batch(engine, ((Prompt.of("Say."), options) for options in (bad, good))))
            assert says in str(found[0].error()) and not found[0].token_ids
            assert found[1].text == f"fine {number}"
