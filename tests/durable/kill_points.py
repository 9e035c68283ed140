"""Chooses the writes at which a process is killed, among writes that every process reaches.

A trail lists a process's writes in a round, in order, as faults.py notes them.
"""

import math
from collections import Counter
from functools import reduce
from operator import and_

RECORDS = "write of writer._write below writer._store"
EARLY = f"{RECORDS} after 5"
MOST_OF_A_KIND = 8  # maximum number of points for a kind of write and a side
LATE = 0.75  # later than this share of a round's writes, too many calls are answered


def chosen(trails, chance):
    """Return kill points that all trails reach.

    Also returns, for each side and kind of write, (number of chosen points, number of writes).
    """
    points, told = [], {}
    for where, count in sorted(reduce(and_, map(Counter, trails)).items()):
        sides = ("before", "after", "in") if where == RECORDS else ("before", "after")
        for side in sides:
            late = max(1, int(count * LATE)) if count > MOST_OF_A_KIND else count
            some = range(1, late + 1)
            if late > MOST_OF_A_KIND:
                some = sorted(chance.sample(some, MOST_OF_A_KIND))
            points += [f"{where} {side} {number}" for number in some]
            told[f"{side} {where}"] = len(some), count
    return points, told


def paired(first, second, trail, behind):
    """Return each round's kill points as a tuple: for the first process, and mostly for the next process.

    The next process must still reach the second point: the later a process dies, the less the next one
    writes. `trail` has the writes of a process that did not die, and `behind` the writes of a process after
    an EARLY death.
    """
    places, places_behind = _places(trail), _places(behind)

    def place(point):
        where, number = _write(point)
        return places[where][number - 1]

    def last_before(point):
        """Return the position in `trail` before which the first process must die."""
        where, number = _write(point)
        left = len(trail) - places_behind[where][number - 1] / LATE
        if where not in places:  # only a process that resumes makes these writes
            return left
        wanted = number if len(places[where]) <= MOST_OF_A_KIND else math.ceil(number / LATE)
        return min(left, places[where][-wanted]) if wanted <= len(places[where]) else 0

    waiting, rounds = sorted(first, key=place), []
    for point in sorted(second, key=last_before):
        is_there = waiting and place(waiting[0]) < last_before(point)
        rounds.append((waiting.pop(0) if is_there else EARLY, point))
    return [*rounds, *((point,) for point in waiting)]


def _write(point):
    where, _, number = point.rsplit(" ", 2)
    return where, int(number)


def _places(trail):
    """Return, for each kind of write, its positions in the trail."""
    places = {}
    for place, where in enumerate(trail):
        places.setdefault(where, []).append(place)
    return places
