"""The short version of `make soak-durable`: four rounds of fifty concurrent calls of all kinds. Each of the
last three rounds kills the engine process twice.
"""

import time

from tests.durable.matrix import at_points, at_random, check_log, matrix, seeded, tell

STORED = "store commit"
WRITTEN = "write of writer._write below writer._store"


def test_fifty_calls_of_all_kinds_survive_six_kills(tmp_path):
    chance, begun = seeded(6), time.monotonic()
    with matrix(tmp_path, "echo") as one:
        one.round()
        one.round(at_random(one, chance, 0.4, 0.4))
        one.round(at_points(one, [f"{WRITTEN} in 40", f"{STORED} before 3"]))
        one.round(at_points(one, [f"{STORED} after 3", f"{WRITTEN} after 5"]))
        one.end()
    unfinished = check_log(tmp_path)
    tell("six kills", one, unfinished, time.monotonic() - begun)
    without = [count for each in one.rounds for count in each.open]
    assert len(without) == 6 and min(without) >= 40
