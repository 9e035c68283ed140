"""Converts the state's fields to their form in a snapshot and back. A field's annotation names the form."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeVar, get_type_hints

import msgspec
import numpy as np

from mmengine.core.state.columns import frozen

Saved = TypeVar("Saved", bound=msgspec.Struct)
Live = TypeVar("Live")


class Form(NamedTuple):
    """Two conversions: `take` converts a value for a snapshot, and `fill` converts it back."""

    take: Callable[[Any], Any]
    fill: Callable[[Any], Any]


def ints(values: np.ndarray) -> bytes:
    return values.astype(np.int32).tobytes()


def array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.int32)


def as_rows(data: bytes) -> np.ndarray:
    return frozen(array(data).astype(np.intp))


INTS = Form(ints, array)
ROWS = Form(ints, as_rows)
INTS_OR_NONE = Form(
    lambda values: None if values is None else ints(values),
    lambda data: None if data is None else array(data),
)
MANY_INTS = Form(lambda parts: tuple(map(ints, parts)), lambda parts: list(map(array, parts)))
TRIPLES = Form(
    lambda parts: tuple(map(ints, parts)), lambda parts: [array(part).reshape(-1, 3) for part in parts]
)
LIST = Form(tuple, list)
SET = Form(lambda values: tuple(sorted(values)), set)
SAME = Form(lambda value: value, lambda value: value)


@cache
def forms_of(saved: type[msgspec.Struct]) -> dict[str, Form]:
    """Return field name -> the Form in the field's annotation; SAME if the annotation has none."""
    hints = get_type_hints(saved, include_extras=True)
    return {name: getattr(hint, "__metadata__", (SAME,))[0] for name, hint in hints.items()}


def take_fields(kind: type[Saved], live: object, **given: Any) -> Saved:
    """Return an instance of `kind` with the converted fields of `live`. `given`: values for the fields that
    are not taken from `live`.
    """
    forms = forms_of(kind)
    own = {name: form.take(getattr(live, name)) for name, form in forms.items() if name not in given}
    return kind(**own, **given)


def fill_fields(
    kind: type[Live], saved: msgspec.Struct, *, without: tuple[str, ...] = (), **given: Any
) -> Live:
    """Return an instance of `kind` that is restored from `saved`. `given`: values for the fields that are not
    taken from `saved`. `without`: fields of `saved` to ignore, because `kind` does not have them.
    """
    skipped = {*without, *given}
    forms = forms_of(type(saved))
    own = {name: form.fill(getattr(saved, name)) for name, form in forms.items() if name not in skipped}
    return kind(**own, **given)
