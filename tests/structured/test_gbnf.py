"""Tests grammars in llama.cpp's and xgrammar's syntax. A valid grammar allows exactly its texts. An invalid
grammar gets an error with the faulty line's number.
"""

import itertools
import json
import random
from contextlib import suppress

import pytest
from llguidance import LLMatcher

from mmengine.errors import InvalidRequest
from mmengine.structured_output.gbnf.convert import convert
from mmengine.structured_output.gbnf.parser import parse_grammar
from mmengine.structured_output.regex.tree import Alt, Chars, Node, Ref, Repeat, Seq
from mmengine.structured_output.request.spec import Lark, Regex, grammar_of, read_grammar
from tests.structured.accepting import TOKENIZER, accepts
from tests.work import count_calls

MOST_CALLS = 3_000_000  # Maximum number of function calls for a hostile grammar.


class Grammar:
    def __init__(self, text: str):
        kind, source = convert(text)
        made = (
            LLMatcher.grammar_from_regex(source) if kind == "regex" else LLMatcher.grammar_from_lark(source)
        )
        self.matcher = LLMatcher(TOKENIZER, made, log_level=0)
        assert not self.matcher.is_error(), self.matcher.get_error()

    def accepts(self, text: str) -> bool:
        return accepts(self.matcher, text)


# Written for this test, in the style of llama.cpp's example grammars.
ARITHMETIC = r"""
# sums, one a line
root ::= (sum "=" space atom "\n")+
sum  ::= atom ([-+*/] space atom)*
atom ::= name | number | "(" space sum ")" space
name ::= [a-z] [a-z0-9_]* space
number ::= [0-9]+ space
space ::= [ \t\n]*
"""
LIST = r"""
root ::= item+
# a dash, and a line of text
item ::= "- " [^\r\n\x0b\x0c\x85\u2028\u2029]+ "\n"
"""
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value
           ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt/] | "u" [0-9a-fA-F]{4}) )* "\"" ws  # escapes
number ::= "-"? ("0" | [1-9] [0-9]{0,15}) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,3})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
CHESS = r"""
root  ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")+
move  ::= (pawn | piece | castle) [+#]?
pawn  ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
piece ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
castle ::= "O-O" "-O"?
"""
KNOWN = [
    (
        ARITHMETIC,
        ["a=1\n", "(a1 + 2)*3 = x\n\nb=c \n", "1=1\n \n"],
        ["a=\n", "a=1", "=1\n", "A=1\n", "((1)=1\n"],
    ),
    (LIST, ["- é\n", "- a\n- b c\n"], ["-a\n", "- \n", "- a", "- a\u2028\n", "- a\x0b\n"]),
    (
        JSON,
        ['{"a": [1, -2.5e+3, {"b": null}], "ü\\n\\u00e9": "x"} ', "{}", '{"a":\n\t true}'],
        ['{"a"}', "[1]", '{"a": 01}', '{"a": "\\x"}', '{"a": "\n"}', '{"a": 1,}', '{"a":tru}'],
    ),
    (
        CHESS,
        ["1. e4 e5\n2. Nf3 Nc6\n", "1. exd5 O-O-O+\n12. Rae1 a8=Q#\n"],
        ["1. e4 e5\n", "2. e4 e5\n3. a a\n"],
    ),
    ('root ::= "a" root "b" | ""', ["", "ab", "aaabbb"], ["a", "ba", "aab"]),
    ('root ::= "ab" root | "a" "c"', ["ac", "abac"], ["ab", "abc"]),
    ('root ::= word ("x" root)?\nword ::= [a-z]+', ["x", "axb", "xx", "xxx"], ["", "A"]),
    ('root ::= ("(" root ")" | .){2,3}', ["ab", "(xy)\n", "((aa)b)é", "((("], ["a", "abcd"]),
    (
        "root ::= [^a-c\\]\\n] | [-x] | [\\u00e9\\U0001F600] | [a\\-z]",
        ["d", "é", "😀", "-", "z", "\t"],
        ["b", "]", "\n"],
    ),
    ('root ::= "\\x41\\"\\\\" other\nother ::=\n  "a"\n  | "b"\n', ['A"\\a', 'A"\\b'], ["A"]),
    ('a-b ::= "x"\na_b ::= "y"\nroot ::= a-b a_b root | ""', ["xyxy", ""], ["xx"]),
    (
        'root ::= (a | b)*\na ::= "if" | "(" root ")"\nb ::= [a-z]+ ";"',
        ["if", "if;", "ifx;(if)", "i;"],
        ["i", "()i"],
    ),
]


@pytest.mark.parametrize(("text", "good", "bad"), KNOWN)
def test_known_grammars(text: str, good: list[str], bad: list[str]) -> None:
    grammar = Grammar(text)
    assert [each for each in good if not grammar.accepts(each)] == []
    assert [each for each in bad if grammar.accepts(each)] == []


def test_json_is_json() -> None:
    grammar, source = Grammar(JSON), random.Random(3)
    for _ in range(30):
        value = {"k": [source.choice([1, -2.5, 'é\\"\n', None, True, {}, [[]]]) for _ in range(4)], "é": {}}
        assert grammar.accepts(json.dumps(value)) and grammar.accepts(
            json.dumps(value, separators=(",", ":"))
        )


def texts_of(rules: dict[str, Node], text: str) -> bool:
    """Return whether the rules allow `text`. Computes each rule's possible ends at every position."""
    ends: dict[tuple[str, int], set[int]] = {
        (name, at): set() for name in rules for at in range(len(text) + 1)
    }

    def of(node: Node, at: int) -> set[int]:
        match node:
            case Chars(ranges=ranges):
                fits = at < len(text) and any(low <= ord(text[at]) <= high for low, high in ranges)
                return {at + 1} if fits else set()
            case Ref(name=name):
                return ends[name, at]
            case Seq(items=items):
                found = {at}
                for item in items:
                    found = set().union(*(of(item, each) for each in found))
                return found
            case Alt(options=options):
                return set().union(*(of(option, at) for option in options))
            case Repeat(item=item, low=low, high=high):
                found, most = {at} if low == 0 else set(), {at}
                for count in range(1, (low + len(text) + 1 if high is None else high) + 1):
                    most = set().union(*(of(item, each) for each in most))
                    found |= most if count >= low else set()
                return found

    while True:
        found = {key: of(rules[key[0]], key[1]) for key in ends}
        if found == ends:
            return len(text) in ends["root", 0]
        ends = found


def random_grammar(source: random.Random) -> str:
    names = ["root", "a", "b"]

    def item(depth: int) -> str:
        kind = source.random()
        if kind < 0.35:
            return source.choice(['"x"', '"y"', '"xy"', '"xx"', '"yx"'])
        if kind < 0.5:
            return source.choice(["[xy]", "[^x]", "[x-z]", "[y]"])
        if kind < 0.75 or depth > 1:
            return source.choice(names)
        return f"({alternatives(depth + 1)})"

    def sequence(depth: int) -> str:
        times = ["", "", "", "", "*", "+", "?", "{2}", "{1,2}", "{2,}"]
        return " ".join(item(depth) + source.choice(times) for _ in range(source.randrange(1, 4)))

    def alternatives(depth: int) -> str:
        return " | ".join(sequence(depth) for _ in range(source.randrange(1, 3)))

    return "\n".join(
        f"{name} ::= {alternatives(0)} | {source.choice(['x', 'y', 'z'])!r}".replace("'", '"')
        for name in names
    )


def check_random(seeds: range) -> int:
    words = ["".join(each) for size in range(5) for each in itertools.product("xyz", repeat=size)]
    recursive = 0
    for seed in seeds:
        text = random_grammar(random.Random(seed))
        grammar, rules = Grammar(text), parse_grammar(text)
        recursive += convert(text)[0] == "lark"
        for word in random.Random(seed).sample(words, 40):
            assert grammar.accepts(word) == texts_of(rules, word), (seed, text, word)
    return recursive


def test_random_grammars_allow_exactly_their_texts() -> None:
    assert check_random(range(30)) > 10


@pytest.mark.soak
@pytest.mark.parametrize("seeds", [range(60, 1000), range(1000, 2000)], ids=str)
def test_more_random_grammars(seeds: range) -> None:
    assert check_random(seeds) > len(seeds) * 2 // 5


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no rule called root"),
        ('start ::= "a"', "no rule called root"),
        ('root ::= "a"\n\nroot ::= "b"', "line 3: the rule 'root' is defined twice"),
        ("root ::= a\n", "line 1: there is no rule called 'a'"),
        ('root ::= "a', "line 1: '\"a' cannot be read"),
        ('root ::= ("a"\n', "line 1: a group that begins here is not closed"),
        ('root ::= "a")', "line 1: expected a rule (name ::= …)"),
        ('# c\nroot ::= "\\q"', "line 2: the escape '\\\\q' is unknown"),
        ("root ::= [z-a]", "line 1: a range of [z-a] ends before it begins"),
        ("root ::= []", "[] allows no character"),
        ('root ::= "a"{3,2}', "{3,2} has a minimum above its maximum"),
        ('root ::= "a"{99999}', "repeats more than 10,000 times"),
        ("root ::= *", "line 1: '*' is not allowed here"),
        ('root ::= "\\ud800"', "is not a character"),
        ("root ::= " + "(" * 100 + '"a"' + ")" * 100, "nested more than 64 deep"),
        ("".join(f'r{n} ::= "a"\n' for n in range(2001)), "line 2001: there are more than 2,000 rules"),
        ('root ::= <think> "a"', "cannot be read"),
        ('root ::= "a" = "b"', "cannot be read"),
        ("root ::= root", "a rule that is only itself"),
        ('root ::= x "a"\nx ::= x', "a rule that is only itself"),
    ],
)
def test_errors_name_the_line(text: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        grammar_of(grammar={"gbnf": text})
    assert says in str(refusal.value)


@pytest.mark.parametrize(
    "text",
    [
        "root ::= a0\n" + "".join(f"a{n} ::= a{n + 1} a{n + 1}\n" for n in range(60)) + 'a60 ::= "x"',
        "root ::= a0\n" + "".join(f"a{n} ::= a{n + 1} | root\n" for n in range(1900)) + 'a1900 ::= "x"',
        "root ::= root | " + " | ".join(f'"{n}" root' for n in range(3000)),
        "root ::= root | " + " | ".join(f"[a-z]{{{n}}} root" for n in range(1, 300)),
        'root ::= "' + "a" * 10_000 + '" root?',
        "root ::= " + "(" * 60 + "[a-z]" + ")*" * 60,
        "root ::= " + "[a-z]* " * 9_000,
        "root ::= root" + "|r" * 20_000 + '\nr ::= "' + "a" * 9_000 + '"',
        "root ::= root" + "|r" * 20_000 + "\nr ::= [a-z]" + ' ""' * 5_000,
        "root ::= root" + "|(r)" * 12_000 + "\nr ::= [a-z]" + ' ""' * 5_000,
    ],
    ids=["doubling", "chain", "many", "alike", "long", "stars", "wide", "copies", "empty", "groups"],
)
def test_hostile_grammars_cost_a_bounded_number_of_calls(text: str) -> None:
    def read() -> None:
        with suppress(InvalidRequest):
            grammar_of(grammar={"gbnf": text})

    assert count_calls(read) < MOST_CALLS


def test_both_names_and_the_text_in_the_log() -> None:
    # `gbnf` and `ebnf` give the same GrammarRequest. `read_grammar` can read this request from a log.
    assert read_grammar(grammar_of(grammar={"gbnf": 'root ::= "a"+'})) == Regex("(?:a){1,}")
    text = grammar_of(grammar={"ebnf": 'root ::= "a" root?'})
    assert text == grammar_of(grammar={"gbnf": 'root ::= "a" root?'}) and isinstance(read_grammar(text), Lark)
