"""A Jinja sandbox whose operations cannot make values without bound, for chat templates of strangers.

Jinja's sandbox protects Python's objects, and bounds only `range`. Here an operation whose result could be
larger than MAX_CHARS raises TemplateError before it is computed. The number of operations is not bounded.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sized
from functools import wraps
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_CHARS = 2**24  # Characters of a text, or entries of a list.
MAX_WIDTH = 10_000  # Width of a field, and any other number that a method or filter takes.
MAX_BITS = 4096  # Bits of an integer.
_WIDTH = re.compile(r"\d{5}")  # A width of 10,000 or more, in a format.
_CONCAT = "mmengine_concat"


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox. Its templates fail with TemplateError at the first operation that is too large."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)
        del self.globals["lipsum"]
        self.filters = {name: _bounded_filter(name, call) for name, call in self.filters.items()}
        self.filters[_CONCAT] = _concat

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Concatenations().visit(super()._parse(source, name, filename))

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        match operator:
            case "+":
                if isinstance(left, str | list | tuple) and isinstance(right, Sized):
                    _check_size(len(left) + len(right))
            case "*":
                _check_product(left, right)
            case "**":
                if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MAX_BITS:
                    _refuse()
            case "%" if isinstance(left, str | bytes):
                _check_format(left, right if isinstance(right, tuple) else (right,))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: object) -> Callable[..., str] | None:
        made = super().wrap_str_format(value)
        if made is None:
            return None
        wrapped, owner = made, str(getattr(value, "__self__", ""))

        @wraps(made)
        def checked(*args: object, **kwargs: object) -> str:
            values = [*args, *kwargs.values()]
            values += [each for value in args if isinstance(value, Mapping) for each in value.values()]
            _check_format(owner, values)
            return wrapped(*args, **kwargs)

        return checked

    def call(__self, __context: Context, __obj: object, *args: object, **kwargs: object) -> object:  # noqa: N805
        _check_call(__obj, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)


class _Concatenations(NodeTransformer):
    """Replaces `a ~ b` by a filter, because Jinja lets no environment intercept it."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), _CONCAT, [], [], None, None, lineno=node.lineno)


def _concat(values: list[object]) -> str:
    texts = [str(value) for value in values]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _bounded_filter(name: str, call: Callable[..., object]) -> Callable[..., object]:
    """Return the filter with checks of its arguments. Jinja passes some filters its environment first."""

    @wraps(call)  # Keeps the attribute that says whether the filter takes the environment.
    def checked(*arguments: object, **options: object) -> object:
        given = arguments[1:] if hasattr(call, "jinja_pass_arg") else arguments
        value, rest = given[0], given[1:]
        _check_numbers((*rest, *options.values()))
        if name == "format":
            _check_format(str(value), (*rest, *options.values()))
        elif name == "replace":
            _check_replacement(str(value), *map(str, rest[:2]))
        elif name == "join":
            separator = rest[0] if rest else options.get("d", "")
            arguments = (*arguments[: -len(given)], _joinable(separator, value), *rest)
        return call(*arguments, **options)

    return checked


def _check_call(method: object, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """Refuse a call to a method of a built-in value whose result could be too large."""
    owner = getattr(method, "__self__", None)
    if not isinstance(owner, str | bytes | int | float | list | tuple | dict):
        return
    _check_numbers((*args, *kwargs.values()))
    if not isinstance(owner, str):
        return
    match getattr(method, "__name__", ""):
        case "replace" if len(args) > 1:
            _check_replacement(owner, *map(str, args[:2]))
        case "join" if args:
            _joinable(owner, args[0])


def _check_numbers(values: Iterable[object]) -> None:
    if any(isinstance(value, int) and abs(value) > MAX_WIDTH for value in values):
        _refuse()


def _check_product(left: object, right: object) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MAX_BITS:
            _refuse()
        return
    for value, times in ((left, right), (right, left)):
        if isinstance(value, str | bytes | list | tuple) and isinstance(times, int):
            _check_size(len(value) * times)


def _check_format(text: str | bytes, values: Iterable[object]) -> None:
    shown = text if isinstance(text, str) else text.decode("latin-1")
    values = list(values)
    if _WIDTH.search(shown):
        _refuse()
    _check_numbers(values if "*" in shown or "{" in shown else ())
    fields = shown.count("%") + shown.count("{") + 1
    longest = max((len(value) for value in values if isinstance(value, Sized)), default=0)
    _check_size(len(shown) + fields * max(longest, MAX_WIDTH if fields < 1000 else 0))


def _check_replacement(text: str, old: str, new: str) -> None:
    _check_size(len(text) + text.count(old) * len(new))


def _joinable(separator: object, values: Any) -> object:
    """Return the values, read once if they are an iterator. Raises TemplateError if they are too long."""
    found: Collection[object] = values if isinstance(values, Collection) else list(values)
    texts = sum(len(value) for value in found if isinstance(value, str))
    _check_size(len(found) * len(str(separator)) + texts)
    return found


def _check_size(size: int) -> None:
    if size > MAX_CHARS:
        _refuse()


def _refuse() -> NoReturn:
    raise jinja2.TemplateError(
        f"it makes a text or number that is too large (over {MAX_CHARS:,} characters, a width over "
        f"{MAX_WIDTH:,}, or {MAX_BITS:,} bits)"
    )
