"""Fifty open calls of all kinds, and a server that is killed at any instant, and at any write."""

import time
from itertools import zip_longest

import pytest

from tests.durable.matrix import at_points, at_random, check_log, matrix, seeded, tell

pytestmark = pytest.mark.soak
NUM_RANDOM = 200
MOST_OF_A_KIND = 8  # points before, in or after writes of one kind that are tried
LATE = 0.75  # of the writes of a round: behind that, too many calls have their answers
RECORDS = "write of writer._write below writer._store"


def check_open(one, least=40):
    without = [count for each in one.rounds for count in each.open]
    assert min(without) >= least, without


def test_killed_at_random_instants(tmp_path):
    chance, begun = seeded(19), time.monotonic()
    with matrix(tmp_path, "echo") as one:
        one.round()
        for _ in range(NUM_RANDOM // 2):
            one.round(at_random(one, chance, 0.5, 0.5))
        one.end()
    tell("at random", one, check_log(tmp_path), time.monotonic() - begun)
    check_open(one)


def test_killed_at_random_instants_with_a_model(tmp_path):
    """The embedded checkpoint: images, forms and tools are its own, lives are as people start them."""
    chance, begun = seeded(20), time.monotonic()
    with matrix(tmp_path, "embedded") as one:
        one.round()
        for _ in range(10):
            one.round(at_random(one, chance, 0.8, 3.5))
        one.end()
    tell("at random, with a model", one, check_log(tmp_path), time.monotonic() - begun)
    check_open(one, 30)


def counted(folder, *before):
    """How often a life writes where, from the beginning of a round on, or after it died at these points."""
    with matrix(folder, "echo") as one:
        one.round()
        one.round(at_points(one, [*before]))
        one.end()
    lines = (folder / "points").read_text().splitlines()
    return {where: int(count) for where, count in (line.rsplit(" ", 1) for line in lines)}


def chosen(counts, chance):
    """Points to try, and of each kind how many of how many."""
    points, told = [], {}
    for where, count in counts.items():
        sides = ("before", "after", "in") if where == RECORDS else ("before", "after")
        for side in sides:
            late = max(1, int(count * LATE)) if count > MOST_OF_A_KIND else count
            some = range(1, late + 1)
            if late > MOST_OF_A_KIND:
                some = sorted(chance.sample(some, MOST_OF_A_KIND))
            points += [f"{where} {side} {number}" for number in some]
            told[f"{side} {where}"] = f"{len(some)} of {count}"
    chance.shuffle(points)
    return points, told


def test_killed_before_and_after_each_kind_of_write(tmp_path):
    """The first of a round dies in what it does anyhow, the second as it takes up what was left, or later."""
    chance, begun = seeded(21), time.monotonic()
    first, of_first = chosen(counted(tmp_path / "first"), chance)
    second, of_second = chosen(counted(tmp_path / "second", f"{RECORDS} after 60"), chance)
    reached = [0, 0]
    with matrix(tmp_path / "all", "echo") as one:
        one.round()
        for points in zip_longest(first, second, fillvalue=f"{RECORDS} after 50"):
            found = one.round(at_points(one, points))
            for number, of_kind in enumerate((first, second)):
                reached[number] += len(found.kills) > number and points[number] in of_kind
            (tmp_path / "all" / "plan").unlink(missing_ok=True)
        one.end()
    unfinished = check_log(tmp_path / "all")
    for what, some in ("anew", of_first), ("behind a death", of_second):
        for where, count in some.items():
            print(f"{what}, {where}: {count}")
    print(f"reached {reached[0]} of {len(first)} and {reached[1]} of {len(second)}")
    tell("at writes", one, unfinished, time.monotonic() - begun)
    assert reached[0] >= 0.9 * len(first) and reached[1] >= 0.9 * len(second)
