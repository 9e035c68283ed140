"""The request option `repetition_detection`, which ends an answer that repeats itself."""

from collections.abc import Sequence

import msgspec
import numpy as np

from mmengine.errors import FIELD, FieldPath, InvalidRequest, shown

MAX_PATTERN = 512  # Largest max_pattern_size.
MAX_REPEATS = 1024  # Largest min_count.


class RepetitionDetection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ends an answer whose last tokens repeat a pattern. The fields have vLLM's names.

    A pattern has `min_pattern_size` to `max_pattern_size` tokens. The answer ends when a pattern occurs
    `min_count` times in a row. `max_pattern_size` 0 turns the option off.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __bool__(self) -> bool:
        return self.max_pattern_size > 0

    def check(self) -> None:
        """Raise InvalidRequest for the first field out of range."""
        for name, least, most in (
            ("max_pattern_size", 0, MAX_PATTERN),
            ("min_pattern_size", 0, self.max_pattern_size),
            ("min_count", 2 if self else 0, MAX_REPEATS),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise InvalidRequest(
                    f"{FIELD} must be an integer from {least} to {most}, not {shown(value)}",
                    path=FieldPath("repetition_detection", name),
                )

    def needed_matches(self, size: int) -> np.ndarray:
        """Return an int32 array [size] with a `count` for each pattern length p from 1 to `size`. The answer
        ends if its last `count` tokens equal the tokens p positions earlier. A `count` of 0 means that length
        p is not checked.
        """
        period = np.arange(1, size + 1)
        is_watched = (period >= self.min_pattern_size) & (period <= self.max_pattern_size)
        return np.where(is_watched, period * (self.min_count - 1), 0).astype(np.int32)

    def repeats(self, token_ids: Sequence[int]) -> bool:
        """Return whether an answer with `token_ids` ends in a repetition."""
        for period in range(max(self.min_pattern_size, 1), self.max_pattern_size + 1):
            last = token_ids[-period * self.min_count :]
            if len(last) == period * self.min_count and last[period:] == last[:-period]:
                return True
        return False
