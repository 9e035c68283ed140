"""Converts a GBNF grammar to a regex, or to a Lark grammar if its rules are recursive or large."""

from functools import lru_cache

from mmengine.errors import ErrorCode, InvalidRequest
from mmengine.structured_output.gbnf.follow_sets import unsafe_pieces
from mmengine.structured_output.gbnf.lexeme_splitter import Group, LexemeSplitter, Part, Piece, Rules
from mmengine.structured_output.gbnf.lexemes import LexemeComparison
from mmengine.structured_output.gbnf.parser import parse_grammar
from mmengine.structured_output.regex.tree import Node, Ref, regex_of

MAX_ROUNDS = 100  # Maximum number of rounds in which lexemes are split.


@lru_cache(maxsize=64)
def convert(text: str) -> tuple[str, str]:
    """Convert a grammar to ("regex" or "lark", source). The source allows exactly the grammar's texts.

    Raises InvalidRequest with the faulty line's number.
    """
    return convert_rules(parse_grammar(text))


def convert_rules(nodes: dict[str, Node]) -> tuple[str, str]:
    """Convert rules as `convert` does. Texts begin at the rule `root`. Every reference must have a rule."""
    try:
        return _converted(Rules(nodes))
    except RecursionError:
        raise InvalidRequest(
            "the grammar has a rule that is only itself, or rules nested too deeply; give each rule an end",
            code=ErrorCode.INVALID_GRAMMAR,
        ) from None


def _converted(rules: Rules) -> tuple[str, str]:
    root = Ref("root", 1)
    if rules.is_plain(root):
        return "regex", regex_of(rules.plain(root))
    unsafe, comparison = set[str](), LexemeComparison()
    for _ in range(MAX_ROUNDS):
        cutter = LexemeSplitter(rules, unsafe)
        more = unsafe_pieces(cutter, comparison)
        if not more:
            return "lark", _lark(cutter, comparison)
        unsafe |= more
    raise InvalidRequest(
        "the grammar cannot be split into lexemes within the limits; write it as a Lark grammar",
        code=ErrorCode.INVALID_GRAMMAR,
    )


def _lark(cutter: LexemeSplitter, comparison: LexemeComparison) -> str:
    rules = {name: f"r{number}" for number, name in enumerate(cutter.rules)}
    pieces = {regex: f"T{number}" for number, regex in enumerate(cutter.pieces)}

    def written(part: Part) -> str:
        match part:
            case Piece(regex="" | "(?:)"):
                return '""'
            case Piece(regex=regex, node=node):
                lexeme = comparison.lexeme(regex, node)
                return pieces[regex] + ("?" if lexeme is not None and lexeme.nullable else "")
            case Ref(name=name):
                return rules[name]
            case Group(parts=parts, between=between, low=low, high=high):
                inner = f" {between} ".join(map(written, parts)) or '""'
                times = {(1, 1): "", (0, 1): "?", (0, None): "*", (1, None): "+"}.get((low, high))
                if times is None:
                    times = f"{{{low},{'' if high is None else high}}}"
                return f"({inner}){times}"

    lines = [f"start: {rules['root']}"]
    lines += [f"{rules[name]}: {written(part)}" for name, part in cutter.rules.items()]
    lines += [f"{name}: /{regex}/" for regex, name in pieces.items() if regex]
    return "\n".join(lines)
