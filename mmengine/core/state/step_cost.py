"""What steps take that only decode, and how many tokens drafts gave in them, by how many rows they have.

For each bucket of like numbers of rows the last few steps of each kind are kept: those without drafts, and,
by who was level, those that verified some; with two steps in flight also those that could have, as others do
not wait for the step before. What drafts give is the tokens of the latter over their time, beside the lower
quartile of the former. Times count up to half as much again as is usual among them: what a machine does
besides only makes a step longer, and a hiccup of it decides nothing. Where no step without drafts ran with as
many rows, a like number speaks.
"""

from collections.abc import Sequence
from statistics import median_low

ONE = 1 << 16
MEMORY = 16  # steps of one kind that are kept
ENOUGH_PLAIN, ENOUGH_DRAFTED = 4, 2  # of them say something
ENOUGH_ROWS = 16  # of steps with drafts: what one answer alone gave is chance
MOST_NS = 1 << 40  # of one step; a log may say anything
_OFFSET = 8  # rows that a step's fixed cost stands for, where times of unlike numbers of rows are compared
_LARGEST = 1 << 26

DraftedStep = tuple[int, int, int, int]  # ns, tokens, rows, drafts


class StepCosts:
    def __init__(self) -> None:
        self._plain: dict[int, list[int]] = {}  # ns for each row and _OFFSET more
        self._drafted: dict[tuple[int, int], list[DraftedStep]] = {}  # by bucket, and who was level
        self.since_plain: dict[int, int] = {}  # by bucket, steps with drafts since one without

    @staticmethod
    def bucket(num_rows: int) -> int:
        """Numbers of rows up to 8 are told apart, above that by their first three bits."""
        shift = max(0, num_rows.bit_length() - 3)
        return num_rows if num_rows <= 8 else 4 * shift + (num_rows >> shift)

    def add_plain(self, bucket: int, num_rows: int, ns: int) -> None:
        """A step without drafts took `ns`."""
        self.since_plain[bucket] = 0
        _add(self._plain.setdefault(bucket, []), max(1, min(ns, MOST_NS) // (num_rows + _OFFSET)))

    def add_drafted(self, bucket: int, level: int, num_rows: int, drafts: int, tokens: int, ns: int) -> None:
        """A step that verified `drafts` gave `tokens` and took `ns`, with making drafts for the next one."""
        self.since_plain[bucket] = self.since_plain.get(bucket, 0) + 1
        step = (max(1, min(ns, MOST_NS)), tokens, num_rows, drafts)
        _add(self._drafted.setdefault((bucket, level), []), step)

    def add_failure(self, bucket: int, level: int) -> None:
        """Drafters up to number `level` were level, and nobody had any, or none that were worth it."""
        self._drafted[bucket, level] = [(MOST_NS, 0, ENOUGH_ROWS, 1)] * ENOUGH_DRAFTED

    def wants_plain(self, bucket: int) -> bool:
        """Whether steps without drafts are worth a look, as they come."""
        return len(self._plain.get(bucket, ())) < MEMORY // 2

    def knows_plain(self, bucket: int, *, itself: bool = False) -> bool:
        """`itself`: not from a like number of rows."""
        if itself:
            return len(self._plain.get(bucket, ())) >= ENOUGH_PLAIN
        return self._plain_of(bucket) is not None

    def plain_ns(self, bucket: int, num_rows: int) -> int:
        """What a step of so many rows takes without drafts; 0: not known."""
        return (self._plain_of(bucket) or 0) * (num_rows + _OFFSET)

    def rate(self, bucket: int, level: int, beside_ns: int = 0) -> int | None:
        """Tokens per time with drafters up to number `level`, where 65536 is without; None: not known.
        `beside_ns`: what drafts take of each token, beside what these steps took."""
        steps, plain = self._drafted.get((bucket, level), ()), self._plain_of(bucket)
        if plain is None or not _are_enough(steps):
            return None
        took = sum(_capped(steps, ns, rows, drafts) for ns, _, rows, drafts in steps)
        took += beside_ns * sum(tokens for _, tokens, _, _ in steps)
        without = sum(plain * (rows + _OFFSET) * tokens // rows for _, tokens, rows, _ in steps)
        return min(without * ONE // took, _LARGEST)

    def capped_ns(self, bucket: int, level: int, num_rows: int, drafts: int, ns: int) -> int:
        """What a step that had a part for drafts took, up to half as much again as is usual."""
        steps = self._drafted.get((bucket, level), ())
        return _capped(steps, ns, num_rows, drafts) if drafts and len(steps) >= MEMORY // 4 else ns

    def least_chance(self, bucket: int, level: int) -> int:
        """What chance a draft needs to be worth its time, in 1/65536: what a draft took beside what a token
        takes at best. A third of it, as the drafts of a step share what each of them is charged for here."""
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
        """What steps without drafts take is to be seen again."""
        self._plain.pop(bucket, None)

    def forget_drafted(self, bucket: int) -> None:
        """What steps with drafts give is to be seen again."""
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
        """What a row takes of a step without drafts, by the nearest bucket that knows, if it has at most
        twice as many rows or half as many."""
        rows, found = rows_of(bucket), None
        for other, times in self._plain.items():
            less, more = sorted((rows, rows_of(other)))
            nearer = found is None or (abs(other - bucket), other) < (abs(found - bucket), found)
            if len(times) >= ENOUGH_PLAIN and more <= 2 * less and nearer:
                found = other
        return None if found is None else sorted(self._plain[found])[(len(self._plain[found]) - 1) // 4]


def rows_of(bucket: int) -> int:
    """The least number of rows of it."""
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
