"""Refuses filter and method calls in a chat template that would take too long or return too much."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import wraps

from mmengine.processing.chat.template_work import MAX_WIDTH, Work, check_size, refuse

MAX_SLOW_CHARS = 2**16  # Maximum length of a text for a filter that may take quadratic time.
# Maximum length of the arguments after the value, for tojson and for filters that may take quadratic time.
# Also the maximum length for strftime_now's format.
MAX_SEPARATOR_CHARS = 256
MAX_COMPARED = 2**28  # Maximum number of character comparisons if a call searches from the right or strips.
_SLOW = frozenset(("pprint", "striptags", "urlize", "wordwrap", "xmlattr"))
# Filters that do not read the whole value.
_AT_ONCE = frozenset(("length", "count", "first", "last", "default", "d"))
# Filters that do not convert a list to a text.
_CHOOSING = ("max", "min", "random", "reject", "rejectattr", "select", "selectattr", "unique")
_OF_ENTRIES = frozenset((*_CHOOSING, "attr", "batch", "dictsort", "groupby", "items", "list", "map"))
_OF_ENTRIES |= {"reverse", "slice", "sort", "sum"}
_FROM_RIGHT = frozenset(("rfind", "rindex", "rpartition", "rsplit", "strip", "lstrip", "rstrip"))
_ENCODINGS = frozenset(("utf-8", "utf8", "ascii", "latin-1"))  # Other encodings may take quadratic time.
_WIDTH = re.compile(r"\d{5}")  # A width of 10,000 or more, in a format.


def bounded_filter(
    name: str, call: Callable[..., object], work_of: Callable[[], Work]
) -> Callable[..., object]:
    """Return a filter that checks its arguments and its result. Jinja passes its environment or a context to
    some filters, as an additional first argument.
    """

    @wraps(call)  # Keeps the attribute `jinja_pass_arg`.
    def checked(*arguments: object, **options: object) -> object:
        given = arguments[1:] if hasattr(call, "jinja_pass_arg") else arguments
        value, rest = given[0], (*given[1:], *options.values())
        work = work_of()
        work.step()
        if name in _AT_ONCE:
            return call(*arguments, **options)
        check_numbers(rest)
        if name in _OF_ENTRIES:
            work.step(len(value) if isinstance(value, Collection) else 0)
            if name == "sum" and any(isinstance(each, Collection) for each in _starts(given, options)):
                refuse()  # Each addition would copy all earlier lists.
        elif name == "join":
            separator = given[1] if len(given) > 1 else options.get("d", "")
            arguments = (*arguments[: -len(given)], joinable(work, separator, value), *given[1:])
        else:
            sizes = [work.measure(each) for each in (value, *rest)]
            _check_text(name, work, str(value) if isinstance(value, str) else "", sizes, rest)
        made = call(*arguments, **options)
        work.take(made)
        return made

    return checked


def _starts(given: tuple[object, ...], options: Mapping[str, object]) -> Sequence[object]:
    return (*given[2:3], *([options["start"]] if "start" in options else []))


def _check_text(name: str, work: Work, text: str, sizes: list[int], rest: Sequence[object]) -> None:
    """Check a call of a filter that reads a text. `sizes`: the sizes of the text and of the arguments
    `rest`.
    """
    if name in _SLOW and (sizes[0] > MAX_SLOW_CHARS or sum(sizes[1:]) > MAX_SEPARATOR_CHARS):
        refuse()
    match name:
        case "format":
            check_format(work, text, rest)
        case "replace":
            check_replacement(text, *map(str, rest[:2]))
        case "trim":
            check_search(sizes[0], sum(sizes[1:]))
        case "indent":
            widths = [each if isinstance(each, int) else len(str(each)) for each in rest[:1]] or [4]
            check_size(len(text) + (text.count("\n") + 1) * widths[0])
        case "tojson" if sum(sizes[1:]) > MAX_SEPARATOR_CHARS:
            refuse()


def check_call(work: Work, method: object, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """Refuse a method call on a built-in value if the result could be too large or the call could take too
    long.
    """
    owner = getattr(method, "__self__", None)
    if not isinstance(owner, str | bytes | int | float | list | tuple | dict):
        return
    given, name = (*args, *kwargs.values()), getattr(method, "__name__", "")
    check_numbers(given)
    if not isinstance(owner, str | bytes):
        return
    if name in _FROM_RIGHT:
        check_search(len(owner), sum(len(each) for each in given if isinstance(each, str | bytes)))
    match name:
        case "replace" if len(args) > 1:
            check_replacement(owner, args[0], args[1])
        case "join" if args:
            joinable(work, owner, args[0])
        case "expandtabs":
            width = next((each for each in given if isinstance(each, int)), 8)
            check_size(len(owner) + _shown(owner).count("\t") * width)
        case "translate" if isinstance(table := given[0] if given else None, Mapping):
            longest = max((len(each) for each in table.values() if isinstance(each, str)), default=1)
            check_size(len(owner) * max(1, longest))
        case "encode" | "decode":
            if any(str(each).lower() not in _ENCODINGS for each in given[:1]):
                refuse()
        case "striptags" | "unescape" if len(owner) > MAX_SLOW_CHARS:
            refuse()


def check_numbers(values: Iterable[object]) -> None:
    if any(isinstance(value, int) and abs(value) > MAX_WIDTH for value in values):
        refuse()


def check_format(work: Work, text: str | bytes, values: Iterable[object]) -> None:
    """Refuse a format whose result could be too large. Each field is assumed to be as long as the longest
    value.
    """
    shown = _shown(text)
    values = list(values)
    if _WIDTH.search(shown):
        refuse()
    check_numbers(values if "*" in shown or "{" in shown else ())
    fields = shown.count("%") + shown.count("{") + 1
    longest = max((work.measure(value) for value in values), default=0)
    check_size(len(shown) + fields * max(longest, MAX_WIDTH if fields < 1000 else 0))


def check_replacement(text: str | bytes, old: object, new: object) -> None:
    if isinstance(old, str | bytes) and isinstance(new, str | bytes):
        check_size(len(text) + _shown(text).count(_shown(old)) * len(new))


def _shown(text: str | bytes) -> str:
    return text if isinstance(text, str) else text.decode("latin-1")


def check_search(length: int, wanted: int) -> None:
    """Refuse a search with too many character comparisons."""
    if length * wanted > MAX_COMPARED:
        refuse()


def joinable(work: Work, separator: object, values: object) -> object:
    """Return the values, or a list if they are an iterator. Refuses values whose joined text is too long."""
    found = values if isinstance(values, Collection) or not isinstance(values, Iterable) else list(values)
    count = len(found) if isinstance(found, Collection) else 0
    check_size(work.measure(found) + count * work.measure(separator))
    return found
