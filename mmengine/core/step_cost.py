"""What steps take that only decode, by how many rows they have and how many drafts of a row they verify.

For each bucket of like numbers of rows, and in it for each level of drafts a row, the last few times are
kept, and their lower quartile counts: what a machine does besides only ever makes a step longer, and a hiccup
of it decides nothing. Computing a step and making the drafts for the next one are kept apart, the latter by
who was asked. Between levels costs are interpolated. Where as many rows never ran, a like number speaks.
"""

from bisect import insort
from collections.abc import Callable

ONE = 1 << 16
SIXTEENTH = 16  # drafts a row are counted in these
MEMORY = 7  # times of one kind that are kept
ENOUGH = 2  # of them say something
MOST_NS = 1 << 40  # of one step; a log may say anything
_LEVELS = 16  # of drafts a row: none, up to 1, 2, 4, …
_LARGEST = 1 << 26  # relative times end here
_OFFSET = 8  # rows that a step's fixed cost stands for, where times of unlike numbers of rows are compared

Point = tuple[int, int]  # time of a row, and sixteenths of drafts a row


class StepCosts:
    def __init__(self) -> None:
        # By bucket and kind (a level of verifying, or 16 for each asked and a level of making).
        self._times: dict[int, dict[int, list[Point]]] = {}
        self.since_plain: dict[int, int] = {}  # by bucket, measured steps with drafts since one without

    @staticmethod
    def bucket(num_rows: int) -> int:
        """Numbers of rows up to 8 are told apart, above that by their first three bits."""
        shift = max(0, num_rows.bit_length() - 3)
        return num_rows if num_rows <= 8 else 4 * shift + (num_rows >> shift)

    def computed(self, bucket: int, num_rows: int, drafts: int, ns: int) -> None:
        """A step took `ns`, without what making drafts took."""
        self.since_plain[bucket] = self.since_plain.get(bucket, 0) + 1 if drafts else 0
        self._add(bucket, 0, num_rows, drafts, ns)

    def made(self, bucket: int, num_rows: int, asked: int, drafts: int, ns: int) -> None:
        """Drafters up to number `asked` made `drafts` in `ns`."""
        self._add(bucket, asked + 1, num_rows, drafts, ns)

    def _add(self, bucket: int, what: int, num_rows: int, drafts: int, ns: int) -> None:
        a_row = drafts * SIXTEENTH // num_rows
        level = min((-(-drafts // num_rows) * 2 - 1).bit_length(), _LEVELS - 1) if drafts else 0
        kinds = self._times.setdefault(bucket, {})
        times = kinds.setdefault(what * _LEVELS + level, [])
        times.append((max(1, min(ns, MOST_NS) // (num_rows + _OFFSET)), a_row))
        if len(times) > MEMORY:
            del times[0]

    def wants_plain(self, bucket: int) -> bool:
        """Whether steps without drafts are worth a look, as they come."""
        return len(self._times.get(bucket, {}).get(0, ())) < MEMORY

    def speaker(self, bucket: int) -> int | None:
        """The bucket itself, or the nearest one like it, of which both kinds of steps are known."""
        return self._nearest(
            bucket, lambda other: self._knows_drafted(other) and self.plain_speaker(other) is not None
        )

    def drafted_speaker(self, bucket: int) -> int | None:
        """The same where only steps with drafts must be."""
        return self._nearest(bucket, self._knows_drafted)

    def plain_speaker(self, bucket: int) -> int | None:
        """The same where only steps without drafts must be."""
        return self._nearest(bucket, lambda other: len(self._times[other].get(0, ())) >= ENOUGH)

    def num_drafted(self, bucket: int) -> int:
        """Steps with like many drafts that are remembered."""
        kinds = self._times[bucket]
        return max((len(times) for kind, times in kinds.items() if 0 < kind < _LEVELS), default=0)

    def _knows_drafted(self, bucket: int) -> bool:
        return self.num_drafted(bucket) >= ENOUGH

    def _nearest(self, bucket: int, knows: Callable[[int], bool]) -> int | None:
        """The nearest bucket that `knows`, if it has at most half as many rows more."""
        if bucket in self._times and knows(bucket):
            return bucket
        rows, found = rows_of(bucket), None
        for other in sorted(self._times):
            less, more = sorted((rows, rows_of(other)))
            nearer = found is None or abs(other - bucket) < abs(found - bucket)
            if 2 * more <= 3 * less and nearer and knows(other):
                found = other
        return found

    def curve(self, speaker: int, asked: int) -> "Curve":
        """Of a `speaker`: what it takes to verify drafts and to ask drafters up to number `asked`."""
        kinds = self._times[speaker]
        plain, _ = _usual(self._times[self.plain_speaker(speaker)][0])
        verify = [(max(time, plain), a_row) for time, a_row in _points(kinds, 0)]
        make = _points(kinds, asked + 1)
        return Curve(plain, [(plain, 0), *verify], [(make[0][0] // 4 if make else 0, 0), *make])

    def forget_drafted(self, bucket: int) -> None:
        """What steps with drafts took is to be seen again."""
        kinds = self._times.get(bucket, {})
        for kind in [kind for kind in kinds if kind]:
            del kinds[kind]

    def saved(self) -> tuple[list[tuple[int, int, list[Point]]], dict[int, int]]:
        times = [(b, kind, list(times)) for b, kinds in self._times.items() for kind, times in kinds.items()]
        return times, dict(self.since_plain)

    def restore(self, times: list[tuple[int, int, list[Point]]], since_plain: dict[int, int]) -> None:
        self._times.clear()
        for bucket, kind, values in times:
            self._times.setdefault(bucket, {})[kind] = list(values)
        self.since_plain = dict(since_plain)


class Curve:
    """Points are (time, drafts a row in sixteenths), ascending in drafts."""

    def __init__(self, plain: int, verify: list[Point], make: list[Point]):
        self._plain, self._verify, self._make = plain, verify, make

    def at(self, a_row: int) -> int:
        """What a step with so many sixteenths of drafts a row takes, where one without takes 65536."""
        time = _between(self._verify, a_row) + _between(self._make, a_row)
        return min(time * ONE // self._plain, _LARGEST)


def rows_of(bucket: int) -> int:
    """The least number of rows of it."""
    shift = bucket // 4 - 1
    return bucket if bucket <= 8 else (4 + bucket % 4) << shift


def _points(kinds: dict[int, list[Point]], what: int) -> list[Point]:
    """Of each level with drafts of which enough is known, the median."""
    found: list[Point] = []
    for level in range(1, _LEVELS):
        times = kinds.get(what * _LEVELS + level, ())
        if len(times) >= ENOUGH:
            insort(found, _usual(times), key=lambda point: point[1])
    return found


def _usual(times: list[Point]) -> Point:
    """The lower quartile."""
    return sorted(times)[(len(times) - 1) // 4]


def _between(points: list[Point], a_row: int) -> int:
    """The time at `a_row`; beyond the last point along the line from the first one through it."""
    (first, _), (time, at) = points[0], points[-1]
    if a_row >= at:
        return first + (time - first) * a_row // at if at else first
    before = points[0]
    for point in points[1:]:
        if a_row <= point[1]:
            break
        before = point
    width = max(1, point[1] - before[1])
    return before[0] + (point[0] - before[0]) * (a_row - before[1]) // width
