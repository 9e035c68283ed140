"""Which writes of a life are tried as the one that it dies at: such as there is in each life that gets there.

A trail is what a life wrote in a round, in order, as faults.py notes it.
"""

import math
from collections import Counter
from functools import reduce
from operator import and_

RECORDS = "write of writer._write below writer._store"
EARLY = f"{RECORDS} after 5"
MOST_OF_A_KIND = 8  # points before, in or after writes of one kind that are tried
LATE = 0.75  # of the writes of a round: behind that, too many calls have their answers


def chosen(trails, chance):
    """Points of writes that all these lives came by, and of each kind how many of how many."""
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
    """Points of two lives of a round, the second of which is there behind the first: the later a life dies,
    the less the next one writes. `trail`: of a life that did not die; `behind`: behind an EARLY death."""
    places, places_behind = _places(trail), _places(behind)

    def place(point):
        where, number = _write(point)
        return places[where][number - 1]

    def last_before(point):
        """Where the first has to die before."""
        where, number = _write(point)
        left = len(trail) - places_behind[where][number - 1] / LATE
        if where not in places:  # of who takes up what was left, whatever that is
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
    """Of the writes of a trail, by their kinds."""
    places = {}
    for place, where in enumerate(trail):
        places.setdefault(where, []).append(place)
    return places
