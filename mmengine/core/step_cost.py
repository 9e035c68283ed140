"""What steps take that only decode, by how many rows they have: with and without drafts.

    without       t0
    with d drafts t0 + c + b d    c: what drafting takes however few they are; b includes making one

Sums over the last few steps of each kind, in integers. A time that is far beyond the mean so far counts as
twice that: one hiccup of the machine must not decide anything.
"""

ONE = 1 << 16
STEP = 16  # what one step with drafts counts
PLAIN_MEMORY, DRAFTED_MEMORY, MADE_MEMORY = 16, 16 * STEP, 256  # at which older ones fade
ENOUGH_PLAIN, ENOUGH_DRAFTED = 4, 24
MOST_NS = 1 << 40  # of one step; a log may say anything
_LARGEST = 1 << 24  # relative times end here
_SIZE = 10
# Places in the sums of a bucket: steps without drafts, and their time; steps with, their drafts, the squares
# of these, their time, drafts times time; drafts made, and the time for that; and b of when it was last seen.
_N0, _T0, _N1, _D, _DD, _T1, _DT, _M, _MT, _SLOPE = range(_SIZE)


class StepCosts:
    def __init__(self) -> None:
        self._sums: dict[int, list[int]] = {}

    @staticmethod
    def bucket(num_rows: int) -> int:
        """Numbers of rows up to 8 are told apart, above that by their first three bits."""
        shift = max(0, num_rows.bit_length() - 3)
        return num_rows if num_rows <= 8 else 4 * shift + (num_rows >> shift)

    def ran(self, bucket: int, drafts: int, ns: int) -> None:
        """A step took `ns`, without what making drafts took."""
        sums = self._of(bucket)
        ns = max(1, min(ns, MOST_NS))
        if not drafts:
            if sums[_N0] >= ENOUGH_PLAIN:
                ns = min(ns, 2 * sums[_T0] // sums[_N0])
            elif 4 * ns * sums[_N0] < sums[_T0]:
                sums[_N0] = sums[_T0] = 0  # the first ones were cold
            sums[_N0] += 1
            sums[_T0] += ns
            if sums[_N0] >= PLAIN_MEMORY:
                _halve(sums, _N0, _T0)
            return
        if sums[_N1] >= ENOUGH_DRAFTED:
            self._weigh_surprise(sums, bucket, drafts, ns)
        if sums[_N1] >= ENOUGH_DRAFTED:
            ns = min(ns, 2 * sums[_T1] * max(1, drafts * sums[_N1] // max(1, sums[_D])) // sums[_N1])
        for place, value in ((_N1, 1), (_D, drafts), (_DD, drafts * drafts), (_T1, ns), (_DT, drafts * ns)):
            sums[place] += value * STEP
        if _spread(sums) * 16 >= sums[_D] ** 2 and sums[_N0] and sums[_N1] >= ENOUGH_DRAFTED:
            rise = sums[_N1] * sums[_DT] - sums[_D] * sums[_T1]
            sums[_SLOPE] = max(1, rise * ONE // (_spread(sums) * max(1, sums[_T0] // sums[_N0])))
        if sums[_N1] >= DRAFTED_MEMORY:
            _halve(sums, _N1, _D, _DD, _T1, _DT)

    def made(self, bucket: int, drafts: int, ns: int) -> None:
        """`drafts` were made in `ns`."""
        sums = self._of(bucket)
        sums[_M] += drafts
        known = sums[_MT] * drafts // (sums[_M] - drafts) if sums[_M] > drafts else self.plain_ns(bucket)
        sums[_MT] += min(ns, 2 * known, MOST_NS)
        if sums[_M] >= MADE_MEMORY:
            _halve(sums, _M, _MT)

    def likely(self, bucket: int, drafts: int, ns: int) -> int:
        """`ns` of a step with drafts, of which twice what was expected is not exceeded by chance alone."""
        shape = self.relative(bucket)
        return min(ns, 2 * self.plain_ns(bucket) * (shape[0] + shape[1] * drafts) // ONE) if shape else ns

    def plain_ns(self, bucket: int) -> int:
        """Of a step without drafts; 0: not known."""
        sums = self._sums.get(bucket)
        return sums[_T0] // sums[_N0] if sums and sums[_N0] else 0

    def relative(self, bucket: int) -> tuple[int, int] | None:
        """A step with d drafts takes base + each * d, where one without takes 65536. None: not known yet."""
        sums = self._sums.get(bucket)
        if not sums or sums[_N0] < ENOUGH_PLAIN or sums[_N1] < ENOUGH_DRAFTED:
            return None
        plain = max(1, sums[_T0] // sums[_N0])
        further = max(0, sums[_T1] - plain * sums[_N1])  # beyond steps without
        drafts = max(1, sums[_D])
        chord = further * ONE // (plain * drafts)
        slope = min(sums[_SLOPE] or chord, chord)
        base = ONE + (chord - slope) * drafts // sums[_N1]
        making = sums[_MT] * ONE // (plain * sums[_M]) if sums[_M] else 0
        return min(base, _LARGEST), min(max(slope + making, 1), _LARGEST)

    def doubt(self, bucket: int) -> None:
        """What steps with drafts took was long ago, or is so no more."""
        sums = self._of(bucket)
        for place in (_N1, _D, _DD, _T1, _DT, _MT):  # making drafts counts as cheaper until it is seen again
            sums[place] -= sums[place] >> 2

    def probe_steps(self, bucket: int, drafts: int) -> int:
        """After how many steps another probe of so many drafts takes about half a percent of the time."""
        shape = self.relative(bucket)
        return min(200 * (shape[0] - ONE + shape[1] * drafts) // ONE, 8192) if shape else 0

    def saved(self) -> dict[int, tuple[int, ...]]:
        return {bucket: tuple(sums) for bucket, sums in self._sums.items()}

    def restore(self, saved: dict[int, tuple[int, ...]]) -> None:
        """Raises ValueError for what `saved` did not give."""
        self._sums = {bucket: list(sums) for bucket, sums in saved.items()}
        if any(len(sums) != _SIZE for sums in self._sums.values()):
            raise ValueError("sums of step costs are missing")

    def _weigh_surprise(self, sums: list[int], bucket: int, drafts: int, ns: int) -> None:
        """Half as much again may be chance, and makes what was seen so far count less; a step that is so much
        faster cannot be."""
        shape = self.relative(bucket)
        expected = self.plain_ns(bucket) * (shape[0] + shape[1] * drafts) // ONE if shape else ns
        if 3 * ns < 2 * expected:
            for place in (_N1, _D, _DD, _T1, _DT):
                sums[place] = 0
        elif 2 * ns > 3 * expected:
            self.doubt(bucket)

    def _of(self, bucket: int) -> list[int]:
        sums = self._sums.get(bucket)
        return self._sums.setdefault(bucket, [0] * _SIZE) if sums is None else sums


def _spread(sums: list[int]) -> int:
    """How far numbers of drafts differ: N times the sum of squares around their mean."""
    return sums[_N1] * sums[_DD] - sums[_D] ** 2


def _halve(sums: list[int], *places: int) -> None:
    for place in places:
        sums[place] >>= 1
