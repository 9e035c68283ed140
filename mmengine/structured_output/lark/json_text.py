r"""Converts a Lark grammar for texts to a grammar for JSON strings whose values match the Lark grammar.

The model writes a custom tool's input as a JSON string. The grammar is converted, so that this string's value
matches the Lark grammar. The converted grammar allows a single spelling per character, for example only `\n`
for a newline. Its lexemes are chosen anew, because several spellings begin with a backslash.
"""

import json
from functools import lru_cache

from mmengine.errors import InvalidRequest
from mmengine.structured_output.gbnf.convert import convert_rules
from mmengine.structured_output.lark.parser import UnsupportedLark, parse_lark
from mmengine.structured_output.regex.sets import Ranges, Set, set_of
from mmengine.structured_output.regex.tree import Alt, Chars, Node, Ref, Repeat, Seq

# Code point -> second character of its two-character escape.
_SHORT = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}
_ESCAPED = (*range(32), 34, 92)
_QUOTE: Node = Chars(((34, 34),))


def json_string_grammar(text: str) -> str:
    """Return a Lark grammar for JSON strings whose values match the grammar `text`.

    Raises UnsupportedLark if the grammar is invalid, not supported or too large.
    """
    source, trouble = _converted(text)
    if trouble:
        raise UnsupportedLark(trouble)
    return source


@lru_cache(maxsize=32)
def _converted(text: str) -> tuple[str, str]:
    """Return (converted grammar, error). Either the grammar or the error is "". Errors are cached too,
    because a failed conversion may take seconds.
    """
    try:
        rules = {f"r {name}": _spelled(node) for name, node in parse_lark(text).items()}
        rules["root"] = Seq((_QUOTE, Ref("r start", 1), _QUOTE))
        kind, source = convert_rules(rules)
    except (UnsupportedLark, InvalidRequest) as error:
        return "", str(error)
    return source if kind == "lark" else f"start: /{source}/", ""


def _spelled(node: Node) -> Node:
    """Return a node that matches the JSON spellings of the texts that `node` matches."""
    match node:
        case Chars(ranges=ranges):
            return _spelled_set(ranges)
        case Seq(items=items):
            return Seq(tuple(map(_spelled, items)))
        case Alt(options=options):
            return Alt(tuple(map(_spelled, options)))
        case Repeat(item=item, low=low, high=high):
            return Repeat(_spelled(item), low, high)
        case Ref(name=name, line=line):
            return Ref(f"r {name}", line)


def _spelled_set(ranges: Set) -> Node:
    if not ranges:
        raise UnsupportedLark("a character set is empty")
    special = [point for point in _ESCAPED if any(low <= point <= high for low, high in ranges)]
    plain = _without(ranges, special)
    options: list[Node] = [Chars(plain)] if plain else []
    short = [(ord(_SHORT[point]), ord(_SHORT[point])) for point in special if point in _SHORT]
    if short:
        options.append(Seq((_one("\\"), Chars(set_of(short)))))
    for digit in "01":  # \u0000 to \u001f
        codes = [json.dumps(chr(point))[1:-1] for point in special if point not in _SHORT]
        last = [(ord(code[-1]), ord(code[-1])) for code in codes if code[-2] == digit]
        if last:
            options.append(Seq((*map(_one, f"\\u00{digit}"), Chars(set_of(last)))))
    return options[0] if len(options) == 1 else Alt(tuple(options))


def _without(ranges: Set, points: list[int]) -> Set:
    out: Ranges = []
    for low, high in ranges:
        for point in points:
            if low <= point <= high:
                if low < point:
                    out.append((low, point - 1))
                low = point + 1
        if low <= high:
            out.append((low, high))
    return set_of(out)


def _one(char: str) -> Node:
    return Chars(((ord(char), ord(char)),))
