"""Breakpoints and watchpoints, which determine where `continue` and `reverse-continue` stop."""

from collections.abc import Callable
from types import CodeType

from mmengine.errors import InvalidRequest
from mmengine.replay.debug.facts import OF_THE_RECORD, Facts, ObjectFacts
from mmengine.replay.debug.filters import Filter, find_object


class Condition:
    """A filter or a Python expression. `reads_record`: whether it reads the next record."""

    def __init__(self, text: str, holds: Callable[[Facts], object], *, reads_record: bool):
        self.text, self._holds, self.reads_record = text, holds, reads_record

    @classmethod
    def of_filter(cls, found: Filter) -> "Condition":
        return cls(found.text, found.holds, reads_record=found.reads_record)

    @classmethod
    def of_code(cls, text: str) -> "Condition":
        """Return a condition for a Python expression that the user typed. Raises InvalidRequest for a syntax
        error.
        """
        code = compiled(text)
        reads = bool(OF_THE_RECORD & set(code.co_names))
        return cls(text, lambda facts: evaluated(code, facts), reads_record=reads)

    def holds(self, facts: Facts) -> bool:
        return bool(self._holds(facts))


def compiled(text: str) -> CodeType:
    """Compile a Python expression. Raises InvalidRequest for a syntax error."""
    try:
        return compile(text, "<expression>", "eval")
    except (SyntaxError, ValueError) as error:
        raise InvalidRequest(f"{text!r} is neither a filter nor a Python expression: {error}") from None


def evaluated(code: CodeType, facts: Facts) -> object:
    """Evaluate an expression. Raises InvalidRequest if the evaluation fails."""
    try:
        value: object = eval(code, {}, facts)  # noqa: S307 - the user's own text, see docs/reference/debugger.md
        return value
    except Exception as error:
        text = f"the expression failed: {type(error).__name__}: {error}"
        if isinstance(error, AttributeError) and error.obj is None:
            text += "; an object that the state lacks is None: req('a') and req('a').tokens > 9"
        raise InvalidRequest(text) from None


class Stop:
    """A breakpoint. If the condition reads the next record, a search stops before each record for which the
    condition holds. Otherwise a search stops where the condition becomes true.
    """

    kind = "breakpoint"

    def __init__(self, number: int, condition: Condition):
        self.number, self.text, self._condition = number, condition.text, condition
        self.is_enabled, self.num_hits = True, 0
        self._before: bool | None = None

    def begin(self, facts: Facts) -> None:
        """Remember the condition's value at the first position in a search."""
        self._before = self._condition.holds(facts)

    def first(self, facts: Facts) -> str:
        """Return the reason why a search stops at the log's first position, or ""."""
        self._before = False
        return self.hits(facts)

    def hits(self, facts: Facts) -> str:
        """Return the reason why the search stops at this position, or "". Call for each position in order,
        after `begin`.
        """
        value, before = self._condition.holds(facts), self._before
        self._before = value
        return self.text if value and (self._condition.reads_record or not before) else ""


class Watch(Stop):
    """A watchpoint. A search stops after each record that changes the watched value."""

    kind = "watchpoint"

    def __init__(self, number: int, text: str, value: Callable[[Facts], object]):
        self.number, self.text, self._value = number, text, value
        self.is_enabled, self.num_hits = True, 0
        self._old: object = None

    def begin(self, facts: Facts) -> None:
        self._old = self._value(facts)

    def first(self, facts: Facts) -> str:
        self.begin(facts)
        return ""

    def hits(self, facts: Facts) -> str:
        old, new = self._old, self._value(facts)
        self._old = new
        return f"{self.text}: {changed(old, new)}" if _differs(old, new) else ""


def _differs(old: object, new: object) -> bool:
    return bool(type(old) is not type(new) or old != new)


def changed(old: object, new: object) -> str:
    """Return the changes between two values as text. For ObjectFacts, the text names the changed fields."""
    if not isinstance(old, ObjectFacts) or not isinstance(new, ObjectFacts):
        return f"{shown(old)} -> {shown(new)}"
    pairs = zip(new._fields, old, new, strict=True)
    return ", ".join(f"{name} {before} -> {after}" for name, before, after in pairs if before != after)


def shown(value: object) -> str:
    """Return a value as text. For ObjectFacts, the text names the fields."""
    if value is None:
        return "nothing"
    if isinstance(value, ObjectFacts):
        return ", ".join(f"{name} {each}" for name, each in zip(value._fields, value, strict=True))
    return str(value)


def value_of(kind: str, name: str) -> Callable[[Facts], object]:
    """Return a function that reads the request, block, row or encoder cache entry with this name."""
    return lambda facts: find_object(facts, kind, name)
