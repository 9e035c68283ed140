"""What a grammar is made of, and sets of characters as sorted ranges of code points."""

from dataclasses import dataclass

Ranges = tuple[tuple[int, int], ...]  # inclusive, sorted, apart
LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Ref:
    """What a rule allows. `line`: where it is named."""

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
    """`high` None: any number of times."""

    item: "Node"
    low: int
    high: int | None


Node = Chars | Ref | Seq | Alt | Repeat


def ranges_of(pairs: list[tuple[int, int]]) -> Ranges:
    """The characters of ranges that may overlap, without surrogates, which no text holds."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(pairs):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    out = []
    for low, high in merged:
        out += [(low, min(high, SURROGATES[0] - 1)), (max(low, SURROGATES[1] + 1), high)]
    return tuple((low, high) for low, high in dict.fromkeys(out) if low <= high)


def complement(ranges: Ranges) -> Ranges:
    edges = [-1, *(edge for low, high in ranges for edge in (low, high)), LAST + 1]
    return ranges_of([(low + 1, high - 1) for low, high in zip(edges[::2], edges[1::2]) if low + 1 < high])


def meet(one: Ranges, other: Ranges) -> bool:
    """Whether a character is in both."""
    at = 0
    for low, high in one:
        while at < len(other) and other[at][1] < low:
            at += 1
        if at < len(other) and other[at][0] <= high:
            return True
    return False


def regex_of(node: Node) -> str:
    """A node without references as a regex of the grammar engine."""
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
            raise ValueError(f"{name} was not put in")


def _character(code: int) -> str:
    character = chr(code)
    return character if character.isascii() and character.isalnum() else f"\\x{{{code:X}}}"
