"""Reads and checks the fields of an untrusted JSON object. An error names the field that is wrong."""

from pathlib import Path
from typing import Any, NoReturn

from mmengine.errors import ModelError


class Fields:
    """A JSON object in a file. Each getter checks one field, and raises ModelError with the field's name if
    the value is wrong. A field that is null counts as missing.
    """

    def __init__(self, values: dict[str, Any], path: Path, prefix: str) -> None:
        self.values, self.path, self.prefix = values, path, prefix

    def fail(self, what: str) -> NoReturn:
        raise ModelError(f"{self.path}: {what}")

    def child(self, name: str, *, optional: bool = False) -> "Fields":
        value = self.values.get(name)
        if value is None and optional:
            value = {}
        if not isinstance(value, dict):
            self.fail(f"{self.prefix}{name} is missing or not an object")
        return Fields(value, self.path, f"{self.prefix}{name}.")

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        value = self.values.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            shown = "missing" if value is None else repr(value)[:60]
            self.fail(f"{self.prefix}{name} is {shown}; it must be an integer from {low} to {high}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.values.get(name)
        if value is None:
            value = default
        usable = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not usable or not 0 < value < 1e30:  # NaN fails this comparison too.
            self.fail(f"{self.prefix}{name} is {repr(value)[:60]}; it must be a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            value = default
        if not isinstance(value, bool):
            self.fail(f"{self.prefix}{name} is {repr(value)[:60]}; it must be true or false")
        return value

    def integers(
        self, name: str, default: list[int] | None, low: int, high: int, length: int
    ) -> tuple[int, ...]:
        """Return the list in a field: at most `length` integers, each from `low` to `high`."""
        value = self.values.get(name)
        if value is None:
            value = default
        if not isinstance(value, list) or len(value) > length or not all(type(x) is int for x in value):
            self.fail(f"{self.prefix}{name} must be a list of at most {length} integers")
        if not all(low <= x <= high for x in value):
            self.fail(f"{self.prefix}{name} is {repr(value)[:60]}; its entries must be from {low} to {high}")
        return tuple(value)
