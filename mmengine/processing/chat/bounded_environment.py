"""A Jinja sandbox for untrusted chat templates, with bounds on memory and time.

Jinja's own sandbox protects Python objects, but bounds only `range`. This sandbox raises TemplateError before
an operation whose result could be too large. Too many steps, too many characters and too much time also raise
TemplateError (template_work.py). Templates render in the calling process.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps

from jinja2 import nodes, pass_context
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from mmengine.processing.chat.bounded_calls import bounded_filter, check_call, check_format
from mmengine.processing.chat.template_work import MAX_BITS, MAX_CHARS, Work, check_size, refuse

__all__ = ["MAX_CHARS", "BoundedEnvironment"]
_CONCAT, _ROUND, _ITEMS = "mmengine_concat", "mmengine_round", "mmengine_items"
_VALUE, _PART = "mmengine_value", "mmengine_part"
_ENTRIES_IN_STEP = 64  # Copying this many list entries counts as a step.
_BODIES = (nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)  # Nodes whose bodies can run repeatedly.


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox. A template fails with TemplateError at the first operation beyond a limit. Threads may
    render at the same time.
    """

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "**", "%"])

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, finalize=_finalize, **options)
        self._local = threading.local()
        del self.globals["lipsum"]
        self.filters = {name: self._bounded(name, call) for name, call in self.filters.items()}
        self.filters |= {
            _CONCAT: self._concat,
            _ROUND: _count_round,
            _ITEMS: self._items,
            _PART: self._part,
            _VALUE: self._value,
        }

    def add_filter(self, name: str, call: Callable[..., object]) -> None:
        """Add a filter, or replace a filter of Jinja."""
        self.filters[name] = self._bounded(name, call)

    def _bounded(self, name: str, call: Callable[..., object]) -> Callable[..., object]:
        return bounded_filter(name, call, lambda: self.work)

    @property
    def work(self) -> Work:
        """The work of the rendering that runs on this thread."""
        work: Work | None = getattr(self._local, "work", None)
        if work is None:
            work = self._local.work = Work()
        return work

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the work of one rendering, or of compiling a template."""
        self._local.work = Work()
        try:
            yield
        finally:
            self._local.work = None

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Counted().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        work = self.work
        work.step()
        if type(left) is str and type(right) is str and operator == "+":  # The most frequent operation.
            check_size(len(left) + len(right))
            work.make(len(left) + len(right))
            return left + right
        if isinstance(left, int) and isinstance(right, int):
            _check_integers(operator, left, right)
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(times, int):
                    check_size(work.measure(value) * times)
        elif operator == "%" and isinstance(left, str | bytes):
            values = right.values() if isinstance(right, Mapping) else right
            check_format(
                work,
                left,
                values if isinstance(values, Iterable) and not isinstance(values, str) else [right],
            )
        elif operator == "+":
            check_size(work.measure(left) + work.measure(right))
        made = super().call_binop(context, operator, left, right)
        work.take(made)
        return made

    def wrap_str_format(self, value: object) -> Callable[..., str] | None:
        made = super().wrap_str_format(value)
        if made is None:
            return None
        wrapped, owner = made, str(getattr(value, "__self__", ""))

        @wraps(made)
        def checked(*args: object, **kwargs: object) -> str:
            values = [*args, *kwargs.values()]
            values += [each for value in args if isinstance(value, Mapping) for each in value.values()]
            check_format(self.work, owner, values)
            return wrapped(*args, **kwargs)

        return checked

    def call(__self, __context: Context, __obj: object, *args: object, **kwargs: object) -> object:  # noqa: N805
        work = __self.work
        work.step()
        if isinstance(__obj, LoopContext):  # Calling a recursive loop iterates over the argument.
            work.step(sum(len(each) for each in args if isinstance(each, Sequence | Mapping)))
        check_call(work, __obj, args, kwargs)
        made = super().call(__context, __obj, *args, **kwargs)
        work.take(made)
        return made

    # Filters that _Counted inserts into templates

    def _concat(self, values: list[object]) -> str:
        check_size(sum(self.work.measure(value) for value in values))
        made = "".join(map(str, values))
        self.work.make(len(made))
        return made

    def _items(self, values: Iterable[object]) -> Iterator[object]:
        """Yield the values, and count one step per value."""
        work = self.work
        for value in values:
            work.step()
            yield value

    def _part(self, value: object) -> object:
        """Count the result of a slice, which is never larger than the sliced value."""
        if isinstance(value, str | bytes):
            self.work.make(len(value))
        self.work.step(1 + (len(value) // _ENTRIES_IN_STEP if isinstance(value, list | tuple) else 0))
        return value

    def _value(self, value: object) -> object:
        self.work.take(value)
        return value


@pass_context  # Without this decorator, Jinja would call the function for constants while it compiles.
def _finalize(context: Context, value: object) -> object:
    """Count the characters of an output expression."""
    work = _work_of(context)
    work.make(len(value) if type(value) is str else work.measure(value))
    return value


@pass_context
def _count_round(context: Context, num_chars: int) -> bool:
    """Count a run of a loop's or macro's body, which writes `num_chars` characters of plain text."""
    work = _work_of(context)
    work.step()
    work.make(num_chars)
    return True


def _work_of(context: Context) -> Work:
    environment = context.environment
    assert isinstance(environment, BoundedEnvironment)
    return environment.work


def _check_integers(operator: str, left: int, right: int) -> None:
    bits = left.bit_length(), right.bit_length()
    if max(bits) > 4 * MAX_BITS:  # Numbers in a template's source have at most this many bits.
        refuse()
    if (operator == "*" and sum(bits) > MAX_BITS) or (operator == "**" and bits[0] * right > MAX_BITS):
        refuse()


class _Counted(NodeTransformer):
    """Wraps operations that Jinja cannot intercept. The wrapping filters count the work."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _CONCAT)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, _PART) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        return self._measured(node, node.items)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        return self._measured(node, node.items if node.ctx == "load" else [])

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        return self._measured(node, [each for pair in node.items for each in (pair.key, pair.value)])

    def _measured(self, node: nodes.Expr, values: Sequence[nodes.Expr]) -> nodes.Node:
        is_constant = all(isinstance(value, nodes.Const) for value in values)
        self.generic_visit(node)
        return node if is_constant else _filtered(node, _VALUE)

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        # The counter in the body does not run for items that the loop's test rejects. Therefore all items are
        # counted before the test.
        if node.test is not None:
            node.iter = _filtered(node.iter, _ITEMS)
        return self._repeated(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        return self._repeated(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        return self._repeated(node)

    def visit_Block(self, node: nodes.Block) -> nodes.Node:  # noqa: N802
        return self._repeated(node)

    def _repeated(self, node: nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block) -> nodes.Node:
        self.generic_visit(node)
        count = _filtered(nodes.Const(_num_chars(node.body), lineno=node.lineno), _ROUND)
        node.body.insert(0, nodes.ExprStmt(count, lineno=node.lineno))
        return node


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _num_chars(body: Iterable[nodes.Node]) -> int:
    """Return the maximum number of plain-text characters that a body writes, without nested bodies."""
    count = 0
    for node in body:
        if isinstance(node, nodes.TemplateData):
            count += len(node.data)
        elif not isinstance(node, _BODIES):
            count += _num_chars(node.iter_child_nodes())
    return count
