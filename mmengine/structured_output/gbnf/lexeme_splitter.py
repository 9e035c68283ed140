"""Splits a grammar's rules into lexemes, as large as is safe. The lexemes become the grammar engine's
terminals.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mmengine.errors import ErrorCode, InvalidRequest
from mmengine.structured_output.gbnf.lexemes import MAX_POSITIONS
from mmengine.structured_output.regex.tree import Alt, Chars, Node, Ref, Repeat, Seq, regex_of

MAX_REGEX_NODES = 20_000  # Maximum number of nodes in a rule with all rules inlined.
MAX_EXPANDED = 1_000_000  # Maximum number of visited nodes for a grammar.
MAX_LEXEMES = 2_000


@dataclass(frozen=True, slots=True)
class Piece:
    """A lexeme. `node` has no references to rules. `regex` identifies the lexeme."""

    regex: str
    node: Node


@dataclass(frozen=True, slots=True)
class Group:
    """A sequence of `parts`, or alternatives if `between` is "|", repeated `low` to `high` times."""

    parts: "list[Part]"
    between: str = ""
    low: int = 1
    high: int | None = 1


Part = Piece | Ref | Group


class Rules:
    """A grammar's rules, and functions that inline rules.

    The functions raise InvalidRequest if inlining visits too many nodes.
    """

    def __init__(self, rules: dict[str, Node]):
        self.nodes = rules
        self._left = MAX_EXPANDED
        self._pieces: dict[str, Piece | None] = {}  # Rule -> the rule as a single lexeme, or None.

    @cached_property
    def _sizes(self) -> "dict[str, _Size]":
        """Each non-recursive rule's size with all rules inlined.

        Excludes rules with more than MAX_REGEX_NODES.
        """
        sizes: dict[str, _Size] = {}
        refs = {name: list(_refs(node)) for name, node in self.nodes.items()}
        own = {name: _count(node) for name, node in self.nodes.items()}
        users: dict[str, list[str]] = {name: [] for name in refs}
        waiting = {name: len(set(found)) for name, found in refs.items()}
        for name, found in refs.items():
            for each in set(found):
                users[each].append(name)
        ready = [name for name, count in waiting.items() if not count]
        while ready:
            name = ready.pop()
            size = _sum_sizes([own[name], *(sizes[each] for each in refs[name])])
            if size.nodes > MAX_REGEX_NODES:
                continue
            sizes[name] = size
            for user in users[name]:
                waiting[user] -= 1
                if not waiting[user]:
                    ready.append(user)
        return sizes

    def is_plain(self, node: Node) -> bool:
        """Return whether the node is plain: not recursive, with at most MAX_REGEX_NODES after inlining."""
        return self._size(node) is not None

    def _size(self, node: Node) -> "_Size | None":
        """Return the node's size with all rules inlined, or None if the node is not plain."""
        sizes, refs = self._sizes, list(_refs(node))
        own = _count(node)
        self._spend(own.nodes)
        if not all(name in sizes for name in refs):
            return None
        rules = _sum_sizes([sizes[name] for name in refs])
        return _sum_sizes([own, rules]) if rules.nodes <= MAX_REGEX_NODES else None

    def _spend(self, nodes: int) -> None:
        self._left -= nodes
        if self._left < 0:
            raise InvalidRequest(
                "the grammar's rules are inlined too often; let fewer rules refer to one another, or "
                "write it as a Lark grammar",
                code=ErrorCode.INVALID_GRAMMAR,
            )

    def piece(self, node: Node) -> Piece | None:
        """Return `node` as a single lexeme, or None if the node is not plain or is too large for a lexeme."""
        if isinstance(node, Ref):
            if node.name not in self._pieces:
                self._pieces[node.name] = self.piece(self.nodes[node.name])
            return self._pieces[node.name]
        size = self._size(node)
        if size is None or size.characters > MAX_POSITIONS:
            return None
        self._spend(size.nodes)
        plain = self.plain(node)
        return Piece(regex_of(plain), plain)

    def plain(self, node: Node) -> Node:
        """Return `node` with all rules inlined."""
        match node:
            case Ref(name=name):
                return self.plain(self.nodes[name])
            case Seq(items=items):
                return Seq(tuple(map(self.plain, items)))
            case Alt(options=options):
                return Alt(tuple(map(self.plain, options)))
            case Repeat(item=item, low=low, high=high):
                return Repeat(self.plain(item), low, high)
        return node


def _refs(node: Node) -> Iterator[str]:
    match node:
        case Ref(name=name):
            yield name
        case Seq(items=inner) | Alt(options=inner):
            for each in inner:
                yield from _refs(each)
        case Repeat(item=item):
            yield from _refs(item)


class _Size(NamedTuple):
    nodes: int
    characters: int


def _sum_sizes(sizes: list[_Size]) -> _Size:
    return _Size(sum(size.nodes for size in sizes), sum(size.characters for size in sizes))


def _count(node: Node) -> _Size:
    match node:
        case Seq(items=inner) | Alt(options=inner):
            return _sum_sizes([_Size(1, 0), *map(_count, inner)])
        case Repeat(item=item):
            return _sum_sizes([_Size(1, 0), _count(item)])
    return _Size(1, int(isinstance(node, Chars)))


class LexemeSplitter:
    """Splits all rules that `root` uses into lexemes. Lexemes in `unsafe` are split further, except single
    characters.
    """

    def __init__(self, rules: Rules, unsafe: set[str]):
        self._rules, self._unsafe = rules, unsafe
        self.rules: dict[str, Part] = {}
        self.pieces: dict[str, Piece] = {}
        pending = ["root"]
        while pending:
            name = pending.pop()
            if name not in self.rules:
                self._found: list[str] = []
                self.rules[name] = self._cut(rules.nodes[name])
                pending += self._found

    def _cut(self, node: Node) -> Part:
        whole = self._piece(node)
        if whole is not None:
            return whole
        match node:
            case Ref(name=name):
                self._found.append(name)
                return node
            case Seq(items=items):
                return Group(list(self._cut_items(items)))
            case Alt(options=options):
                return Group([self._cut(option) for option in options], "|")
            case Repeat(item=item, low=low, high=high):
                return Group([self._cut(item)], "", low, high)
        raise AssertionError("a character is a lexeme")

    def _cut_items(self, items: tuple[Node, ...]) -> Iterator[Part]:
        """Split a sequence. Neighbouring plain items form a lexeme, unless this lexeme is in `unsafe`."""
        run: list[Node] = []
        ended: tuple[Node | None, ...] = (*items, None)
        for item in ended:
            if item is not None and self._rules.is_plain(item):
                run.append(item)
                continue
            together = self._piece(Seq(tuple(run))) if len(run) > 1 and len(run) < len(items) else None
            yield from [together] if together is not None else map(self._cut, run)
            run = []
            if item is not None:
                yield self._cut(item)

    def _piece(self, node: Node) -> Piece | None:
        piece = self._rules.piece(node)
        if piece is None or piece.regex in self._unsafe and not isinstance(piece.node, Chars):
            return None
        if len(self.pieces) >= MAX_LEXEMES:
            raise InvalidRequest(
                f"the grammar has more than {MAX_LEXEMES:,} pieces", code=ErrorCode.INVALID_GRAMMAR
            )
        return self.pieces.setdefault(piece.regex, piece)
