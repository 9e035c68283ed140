"""The syntax tree nodes of regular expressions and grammars, and a function that writes a node as a regex."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mmengine.structured_output.regex.sets import Set


@dataclass(frozen=True, slots=True)
class Chars:
    """A single character from a set. An empty set matches nothing."""

    ranges: Set


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to a rule. `line` is the reference's line number."""

    name: str
    line: int


@dataclass(frozen=True, slots=True)
class Seq:
    items: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Alt:
    options: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Repeat:
    """An item that occurs `low` to `high` times. `high` None means no maximum."""

    item: "Node"
    low: int
    high: int | None


Node = Chars | Ref | Seq | Alt | Repeat


def references(nodes: Iterable[Node]) -> Iterator[Ref]:
    """Yield all references inside the nodes."""
    pending = list(nodes)
    while pending:
        match pending.pop():
            case Ref() as reference:
                yield reference
            case Seq(items=inner) | Alt(options=inner):
                pending += inner
            case Repeat(item=item):
                pending.append(item)


def regex_of(node: Node) -> str:
    """Return a regex in the grammar engine's syntax. The regex matches the texts that the node matches.

    The node must have no references.
    """
    match node:
        case Chars(ranges=ranges):
            if ranges and ranges[0][0] == ranges[-1][1]:
                return _character(ranges[0][0])
            inner = "".join(
                _character(low) if low == high else f"{_character(low)}-{_character(high)}"
                for low, high in ranges
            )
            return f"[{inner}]"
        case Seq(items=items):
            return "".join(map(regex_of, items))
        case Alt(options=options):
            return f"(?:{'|'.join(map(regex_of, options))})"
        case Repeat(item=item, low=low, high=high):
            inner = regex_of(item)
            inner = inner if isinstance(item, Chars | Alt) else f"(?:{inner})"
            return f"{inner}{{{low},{'' if high is None else high}}}"
        case Ref(name=name):
            raise ValueError(f"{name} was not inlined")


def _character(code: int) -> str:
    character = chr(code)
    return character if character.isascii() and character.isalnum() else f"\\x{{{code:X}}}"
