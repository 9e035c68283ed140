"""Chooses the writes at which a test kills a process.

A trail is the list of a process's writes in a test round, as faults.py records them.
"""

import math
from collections import Counter
from functools import reduce
from operator import and_

RECORDS = "write of writer._write below writer._store"
EARLY = f"{RECORDS} after 5"
MOST_OF_A_KIND = 8  # maximum number of kill points per kind of write and side ("before", "after", "in")
LATE = 0.75  # kills happen only in the first 75 % of the writes; later, too few calls are unanswered


def chosen(trails, chance):
    """Return kill points that all trails reach, and {side and kind of write: (number of chosen points, number
    of writes)}.
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
    """Return a tuple for each round: a kill point for the first process, and usually a kill point for the
    process that resumes.

    The later the first process dies, the less the resuming process writes. Points are paired so that both are
    reached. `trail`: the writes of a process that is not killed. `behind`: the writes of a process that
    resumes after a kill at the point EARLY.
    """
    places, places_behind = _places(trail), _places(behind)

    def place(point):
        where, number = _write(point)
        return places[where][number - 1]

    def last_before(point):
        """Return the position in `trail` before which the first process must die, so that the next process
        reaches `point`.
        """
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
