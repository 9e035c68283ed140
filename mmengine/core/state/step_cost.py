"""Measures how long decode-only steps take with and without drafts.

A bucket groups steps with similar row counts. Each bucket keeps its last MEMORY steps without drafts, and its
last MEMORY steps with drafts for each draft level. At level n, the drafters with the numbers 0 to n propose
drafts. With two steps in flight, the loop must wait for a step's end before drafters run. A step after which
drafters run therefore counts as a step with drafts, even if no row has drafts.

A draft level's gain is its throughput divided by the throughput without drafts. The time without drafts is
the lower quartile of the bucket's kept times. Outliers count as 1.5 times the usual time. A bucket with too
few steps without drafts uses a similar bucket.
"""

from collections.abc import Sequence
from statistics import median_low

ONE = 1 << 16
MEMORY = 16  # number of kept steps per list
ENOUGH_PLAIN, ENOUGH_DRAFTED = 4, 2  # minimum number of kept steps for a result, without and with drafts
# Minimum total number of rows in the kept steps with drafts.
ENOUGH_ROWS = 16
MOST_NS = 1 << 40  # upper limit for step times, because a log may contain any number
_OFFSET = 8  # a step's fixed cost, expressed in rows
_LARGEST = 1 << 26

DraftedStep = tuple[int, int, int, int]  # (ns, tokens, rows, drafts)


class StepCosts:
    """The measured steps of one engine, by bucket. All times are integers in ns."""

    def __init__(self) -> None:
        self._plain: dict[int, list[int]] = {}  # bucket -> list of ns per row, with _OFFSET added to the rows
        self._drafted: dict[tuple[int, int], list[DraftedStep]] = {}  # (bucket, draft level) -> steps
        # bucket -> number of steps with drafts since the last step without drafts
        self.since_plain: dict[int, int] = {}

    @staticmethod
    def bucket(num_rows: int) -> int:
        """Return the bucket for a row count.

        Each number up to 8 has its own bucket. Larger numbers share a bucket if their binary forms have the
        same length and the same first three bits.
        """
        shift = max(0, num_rows.bit_length() - 3)
        return num_rows if num_rows <= 8 else 4 * shift + (num_rows >> shift)

    def add_plain(self, bucket: int, num_rows: int, ns: int) -> None:
        """Record a step without drafts that took `ns`."""
        self.since_plain[bucket] = 0
        _add(self._plain.setdefault(bucket, []), max(1, min(ns, MOST_NS) // (num_rows + _OFFSET)))

    def add_drafted(self, bucket: int, level: int, num_rows: int, drafts: int, tokens: int, ns: int) -> None:
        """Record a step that verified `drafts` drafts and returned `tokens` tokens. `ns`: the step's time,
        including the time for proposing the next drafts.
        """
        self.since_plain[bucket] = self.since_plain.get(bucket, 0) + 1
        step = (max(1, min(ns, MOST_NS)), tokens, num_rows, drafts)
        _add(self._drafted.setdefault((bucket, level), []), step)

    def add_failure(self, bucket: int, level: int) -> None:
        """Record that this level's drafters proposed no drafts, or lost time."""
        self._drafted[bucket, level] = [(MOST_NS, 0, ENOUGH_ROWS, 1)] * ENOUGH_DRAFTED

    def wants_plain(self, bucket: int) -> bool:
        """Return whether the bucket needs more times of steps without drafts."""
        return len(self._plain.get(bucket, ())) < MEMORY // 2

    def knows_plain(self, bucket: int, *, itself: bool = False) -> bool:
        """Return whether the time of steps without drafts is known. `itself`: ignore similar buckets."""
        if itself:
            return len(self._plain.get(bucket, ())) >= ENOUGH_PLAIN
        return self._plain_of(bucket) is not None

    def plain_ns(self, bucket: int, num_rows: int) -> int:
        """Return the time of a step with `num_rows` rows without drafts; 0: unknown."""
        return (self._plain_of(bucket) or 0) * (num_rows + _OFFSET)

    def rate(self, bucket: int, level: int, beside_ns: int = 0) -> int | None:
        """Return a level's throughput relative to steps without drafts, in 1/65536, or None if too few steps
        were measured. `beside_ns`: the drafting time per token that the steps' times do not include.
        """
        steps, plain = self._drafted.get((bucket, level), ()), self._plain_of(bucket)
        if plain is None or not _are_enough(steps):
            return None
        took = sum(_capped(steps, ns, rows, drafts) for ns, _, rows, drafts in steps)
        took += beside_ns * sum(tokens for _, tokens, _, _ in steps)
        without = sum(plain * (rows + _OFFSET) * tokens // rows for _, tokens, rows, _ in steps)
        return min(without * ONE // took, _LARGEST)

    def capped_ns(self, bucket: int, level: int, num_rows: int, drafts: int, ns: int) -> int:
        """Return the step's time, but at most 1.5 times the usual time."""
        steps = self._drafted.get((bucket, level), ())
        return _capped(steps, ns, num_rows, drafts) if drafts and len(steps) >= MEMORY // 4 else ns

    def least_chance(self, bucket: int, level: int) -> int:
        """Return the lowest acceptance probability at which a draft is worth its time, in 1/65536; 0:
        unknown.

        The probability is a draft's additional time divided by a token's time. A token's time is measured
        with and without drafts, and the shorter time counts. The result is also divided by 3, because a
        step's drafts share a part of their cost.
        """
        steps, plain = self._drafted.get((bucket, level), ()), self._plain_of(bucket)
        if plain is None or not _are_enough(steps):
            return 0
        ns, tokens, rows, drafts = (sum(column) for column in zip(*steps, strict=True))
        if not drafts:
            return 0
        without = plain * (rows + _OFFSET * len(steps))
        token_ns = min(without // rows, ns // max(tokens, 1))
        return min(max(ns - without, 0) * ONE // max(3 * drafts * token_ns, 1), ONE // 2)

    def forget_plain(self, bucket: int) -> None:
        """Forget the measured times of steps without drafts."""
        self._plain.pop(bucket, None)

    def forget_drafted(self, bucket: int) -> None:
        """Forget the measured steps with drafts, at all levels."""
        for key in [key for key in self._drafted if key[0] == bucket]:
            del self._drafted[key]

    def saved(self) -> tuple[dict[int, list[int]], list[tuple[int, int, list[DraftedStep]]], dict[int, int]]:
        drafted = [(*key, list(steps)) for key, steps in self._drafted.items()]
        return {bucket: list(times) for bucket, times in self._plain.items()}, drafted, dict(self.since_plain)

    def restore(
        self,
        plain: dict[int, list[int]],
        drafted: list[tuple[int, int, list[DraftedStep]]],
        since_plain: dict[int, int],
    ) -> None:
        self._plain = {bucket: list(times) for bucket, times in plain.items()}
        self._drafted = {(bucket, level): list(steps) for bucket, level, steps in drafted}
        self.since_plain = dict(since_plain)

    def _plain_of(self, bucket: int) -> int | None:
        """Return the ns per row in steps without drafts, or None if unknown. The value comes from the nearest
        measured bucket with half to twice as many rows.
        """
        rows, found = rows_of(bucket), None
        for other, times in self._plain.items():
            less, more = sorted((rows, rows_of(other)))
            nearer = found is None or (abs(other - bucket), other) < (abs(found - bucket), found)
            if len(times) >= ENOUGH_PLAIN and more <= 2 * less and nearer:
                found = other
        return None if found is None else sorted(self._plain[found])[(len(self._plain[found]) - 1) // 4]


def rows_of(bucket: int) -> int:
    """Return the smallest number of rows in a bucket."""
    shift = bucket // 4 - 1
    return bucket if bucket <= 8 else (4 + bucket % 4) << shift


def _capped(steps: Sequence[DraftedStep], ns: int, num_rows: int, drafts: int) -> int:
    usual = median_low(ns // (rows + drafts) for ns, _, rows, drafts in steps)
    return min(ns, 3 * (usual + 1) * (num_rows + drafts) // 2)


def _are_enough(steps: Sequence[DraftedStep]) -> bool:
    return len(steps) >= ENOUGH_DRAFTED and sum(step[2] for step in steps) >= ENOUGH_ROWS


def _add(steps: list, step: object) -> None:
    steps.append(step)
    if len(steps) > MEMORY:
        del steps[0]
