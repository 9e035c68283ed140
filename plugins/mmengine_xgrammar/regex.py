"""Writes regular expressions as EBNF, for plain text or for text inside a JSON string. If regex/parser.py
does not support a construct, the error names the construct.
"""

from dataclasses import replace

from mmengine.structured_output.regex.parser import UnsupportedRegex, parse_regex
from mmengine.structured_output.regex.sets import Ranges, Set, complement
from mmengine.structured_output.regex.tree import Alt, Chars, Node, Repeat, Seq
from mmengine_xgrammar.rules import EMPTY, MAX_COUNTED, Rules, char_set, literal

MAX_NESTING = 64  # Maximum nesting depth of groups.
SHORT = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}  # Code point -> JSON's escape.
CONTROLS: Ranges = [(0, 31)]
PLAIN = complement([*CONTROLS, (34, 34), (92, 92)])  # Characters that JSON strings contain unescaped.
ANY: Set = tuple(complement([]))


class RegexRefused(ValueError):
    """Raised for a construct that xgrammar cannot enforce."""


def parse_whole_regex(text: str) -> Node:
    """Parse a regex. Raises RegexRefused.

    Accepts `^(?:…)$`, which normalized schemas contain. The anchors have no effect, because a regex always
    matches the whole text.
    """
    if text.startswith("^(?:") and text.endswith(")$"):
        text = text[1:-1]
    try:
        node = parse_regex(text, nesting=MAX_NESTING, engine="xgrammar")
    except UnsupportedRegex as error:
        raise RegexRefused(str(error)) from None
    _check_repetitions(node)
    return node


def _check_repetitions(node: Node) -> None:
    match node:
        case Repeat(item=item, high=high):
            if high is None and is_endless(item):
                raise RegexRefused("a repetition of a repetition matches in too many ways; use one of them")
            _check_repetitions(item)
        case Seq(items=inner) | Alt(options=inner):
            for each in inner:
                _check_repetitions(each)


def is_endless(node: Node) -> bool:
    """Return whether an unbounded repetition in the node can match the node's whole text, while the node's
    other parts match the empty text.
    """
    match node:
        case Repeat(part, _, high):
            return high is None or is_endless(part)
        case Seq(parts):
            return any(
                is_endless(part) and all(width(each)[0] == 0 for each in parts if each is not part)
                for part in parts
            )
        case Alt(parts):
            return any(map(is_endless, parts))
    return False


def width(node: Node) -> tuple[int, int | None]:
    """Return the minimum and the maximum number of characters that the node matches. None means no
    maximum.
    """
    match node:
        case Chars():
            return 1, 1
        case Seq(parts):
            widths = [width(part) for part in parts]
            highs = [high for _, high in widths]
            return sum(low for low, _ in widths), None if None in highs else sum(highs)  # type: ignore[arg-type]
        case Alt(parts):
            widths = [width(part) for part in parts]
            highs = [high for _, high in widths]
            return min(low for low, _ in widths), None if None in highs else max(highs)  # type: ignore[type-var]
        case Repeat(part, low, high):
            fewest, most = width(part)
            return low * fewest, 0 if most == 0 else None if None in (high, most) else high * most  # type: ignore[operator]
    raise RegexRefused("a rule cannot stand in a regular expression")


def with_width(node: Node, low: int, high: int | None) -> Node | None:
    """Return a node that matches only texts of `low` to `high` characters. Changes only the counts of a
    single repetition. Returns None if no such change suffices.
    """
    fewest, most = width(node)
    if fewest >= low and (high is None or most is not None and most <= high):
        return node
    if isinstance(node, Alt):
        found = [with_width(part, low, high) for part in node.options]
        kept = tuple(part for part in found if part is not None)
        return Alt(kept) if len(kept) == len(found) else None
    parts = node.items if isinstance(node, Seq) else (node,)
    loose = [at for at, part in enumerate(parts) if width(part)[0] != width(part)[1]]
    if len(loose) != 1:
        return None
    repeated = parts[loose[0]]
    if not isinstance(repeated, Repeat) or width(repeated.item) != (1, 1):
        return None
    others = fewest - repeated.low
    least = max(repeated.low, low - others)
    ends = [end for end in (repeated.high, None if high is None else high - others) if end is not None]
    if ends and min(ends) < least:
        return None
    narrowed = replace(repeated, low=least, high=min(ends) if ends else None)
    return Seq((*parts[: loose[0]], narrowed, *parts[loose[0] + 1 :]))


def write_regex(node: Node, rules: Rules, *, in_json: bool, end: str = EMPTY) -> str:
    """Return an expression for `node` followed by `end`. With `in_json`, the expression matches the text as
    written inside a JSON string. Raises RegexRefused if a repetition's counts are too large.
    """
    match node:
        case Chars(ranges):
            ways = _set_ways(ranges, in_json)
            if len(ways) == 1:
                return f"{ways[0]} {end}"
            end = rules.tail(end)
            return rules.add(" | ".join(f"{way} {end}" for way in ways))
        case Seq(parts):
            for part in reversed(parts):
                end = write_regex(part, rules, in_json=in_json, end=end)
            return end
        case Alt(parts):
            end = rules.tail(end)
            return rules.add(" | ".join(write_regex(part, rules, in_json=in_json, end=end) for part in parts))
        case Repeat(part, low, high):
            return _write_repeated(part, low, high, rules, in_json, end)
    raise RegexRefused("a rule cannot stand in a regular expression")


def _write_repeated(part: Node, low: int, high: int | None, rules: Rules, in_json: bool, end: str) -> str:
    if max(low, high or 0) > MAX_COUNTED:
        raise RegexRefused(f"more than {MAX_COUNTED} repetitions cannot be counted with xgrammar")
    if width(part)[0] == 0 and high != 1:
        raise RegexRefused("a repetition of a part that may be empty matches in too many ways")
    match part:
        case Chars(ranges):
            ways = _set_ways(ranges, in_json)
        case _:
            ways = [write_regex(part, rules, in_json=in_json)]
    return rules.counted(ways, low, high, rules.tail(end))


def _set_ways(ranges: Set, in_json: bool) -> list[str]:
    """Return the alternatives that together match a character set."""
    if not ranges:
        raise RegexRefused("an empty character set matches nothing")
    if not in_json:
        return [char_set(list(ranges))]
    outside = complement(list(ranges))
    plain = complement([*outside, *complement(PLAIN)])
    ways = [char_set(plain)] if plain else []
    escaped = [p for p in (*range(32), 34, 92) if any(low <= p <= high for low, high in ranges)]
    if short := [SHORT[point] for point in escaped if point in SHORT]:
        ways.append(f'"\\\\" {char_set([(ord(char), ord(char)) for char in short])}')
    if len(escaped) == 34:
        return [*ways, '"\\\\u00" [01] [0-9a-fA-F]']
    return [*ways, *(literal(f"\\u{point:04x}") for point in escaped if point not in SHORT)]
