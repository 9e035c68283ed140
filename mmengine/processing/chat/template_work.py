"""Limits a chat template's work while it renders: steps, time, and the sizes of values and texts.

A list or object counts each time it appears inside a value, because printing the value visits each
occurrence. For example, thirty nested lists that each contain the next list twice are small in memory, but
their text takes a gigabyte. No value may be larger than MAX_CHARS, so a single operation takes bounded time.
"""

import time
from collections.abc import Collection, Mapping
from typing import NoReturn

import jinja2
from jinja2.utils import Namespace

MAX_CHARS = 2**24  # Maximum size of a value in characters; each entry of a list or an object counts 16.
MAX_MADE = 2**28  # Maximum number of characters in all texts that a rendering makes.
MAX_STEPS = 5_000_000  # Maximum number of loop iterations, calls, filters and operators.
MAX_SECONDS = 10.0  # Maximum processor time of a rendering in seconds.
MAX_WIDTH = 10_000  # Maximum absolute value of integer arguments, such as field widths.
MAX_BITS = 4096  # Maximum estimated number of bits in a product or a power.
_LOOK_STEPS = 64  # Number of steps between two readings of the clock.
_ENTRY_CHARS = 16
_ENTRIES_IN_STEP = 4  # Number of entries that can be measured in the time of a step.
_DIGIT_BITS = 3


class Work:
    """The work of one rendering, on one thread. The methods raise TemplateError if the work exceeds
    a limit.
    """

    def __init__(self) -> None:
        self._num_steps, self._look_at, self._num_made = 0, _LOOK_STEPS, 0
        self._until = time.thread_time() + MAX_SECONDS

    def step(self, count: int = 1) -> None:
        """Count `count` steps."""
        self._num_steps += count
        if self._num_steps >= self._look_at:
            self._look_at = self._num_steps + _LOOK_STEPS
            if self._num_steps > MAX_STEPS or time.thread_time() > self._until:
                raise jinja2.TemplateError(
                    f"it takes too long (over {MAX_STEPS:,} steps or {MAX_SECONDS:g} s); shorten its loops"
                )

    def make(self, num_chars: int) -> None:
        """Count the characters of a text that was made."""
        self._num_made += num_chars
        if self._num_made > MAX_MADE:
            raise jinja2.TemplateError(f"it makes texts of over {MAX_MADE:,} characters in all")

    def take(self, value: object) -> int:
        """Count a value that an operation made, and return its size."""
        if type(value) is str:
            self.make(len(value))
            return len(value)
        if isinstance(value, bytes):
            self.make(len(value))
        # An integer that a filter makes from a text may have more bits than a product.
        if isinstance(value, int) and value.bit_length() > 16 * MAX_BITS:
            refuse()
        return self.measure(value)

    def measure(self, value: object) -> int:
        """Return a value's size in characters."""
        if type(value) is str:
            return len(value)
        waiting = [value]
        size = num_entries = 0
        while waiting:
            one = waiting.pop()
            if type(one) is str:  # An exact test is fast; a value may have a million entries.
                size += len(one)
                continue
            if type(one) is int:
                size += one.bit_length() // _DIGIT_BITS
                continue
            parts = one if type(one) is list else _parts(one)
            num_entries += len(parts)
            size += _ENTRY_CHARS * len(parts) + (len(one) if isinstance(one, str | bytes) else 0)
            if size > MAX_CHARS:
                refuse()
            waiting.extend(parts)
        self.step(num_entries // _ENTRIES_IN_STEP)
        check_size(size)
        return size


def _parts(value: object) -> Collection[object]:
    """Return a collection's entries (for a mapping, keys and values), or () for any other value."""
    if isinstance(value, Namespace):
        value = object.__getattribute__(value, "_Namespace__attrs")
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    is_text = isinstance(value, str | bytes | jinja2.Undefined)
    return value if isinstance(value, Collection) and not is_text else ()


def check_size(size: int) -> None:
    if size > MAX_CHARS:
        refuse()


def refuse() -> NoReturn:
    raise jinja2.TemplateError(
        f"it makes a value that is too large (over {MAX_CHARS:,} characters, a width over {MAX_WIDTH:,}, or "
        f"a number that may exceed {MAX_BITS:,} bits)"
    )
