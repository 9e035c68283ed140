"""Other ways in which a server's life goes wrong, with fifty calls open."""

import os
import signal
import time

import pytest

from tests.durable.matrix import at_random, check_log, matrix, seeded, tell
from tests.durable.server_process import CLOCK

pytestmark = pytest.mark.soak


def both_die(one, chance):
    def disturb():
        kills = []
        for _ in range(2):
            time.sleep(chance.uniform(0.0, 0.4))
            life = one.num_lives
            kills.append(time.monotonic())
            one.kill_both()
            one.start()
            one.wait_for_life(life)
        return kills

    return disturb


def test_supervisor_and_engine_are_killed_together(tmp_path):
    """The socket is in other hands, as under systemd, and both are started again."""
    chance, begun = seeded(22), time.monotonic()
    with matrix(tmp_path, "echo", keeps_socket=True) as one:
        one.round()
        for _ in range(5):
            one.round(both_die(one, chance))
        one.end()
    tell("both", one, check_log(tmp_path), time.monotonic() - begun)


def test_killed_twice_more_while_it_takes_up_what_was_left(tmp_path):
    chance, begun = seeded(23), time.monotonic()

    def disturb():
        time.sleep(chance.uniform(0.1, 0.4))
        kills = []
        for longest_s in (0.0, 0.1, 0.1):
            time.sleep(chance.uniform(0.0, longest_s))
            life = one.num_lives
            kills.append(time.monotonic())
            one.kill()
            one.wait_for_life(life)
        return kills

    with matrix(tmp_path, "echo") as one:
        one.round()
        for _ in range(10):
            one.round(disturb)
        one.end()
    tell("in recovery", one, check_log(tmp_path), time.monotonic() - begun)


def test_told_to_end_with_a_short_drain(tmp_path):
    """What is not finished then is finished by the next."""
    chance, begun = seeded(24), time.monotonic()

    def disturb():
        time.sleep(chance.uniform(0.1, 0.4))
        life, killed = one.num_lives, time.monotonic()
        one.process.send_signal(signal.SIGTERM)
        assert one.process.wait(30) == 0
        one.start()
        one.wait_for_life(life)
        return [killed]

    with matrix(tmp_path, "echo", "--drain-s", "0.2", keeps_socket=True) as one:
        one.round()
        for _ in range(5):
            one.round(disturb)
        one.end()
    tell("short drains", one, check_log(tmp_path), time.monotonic() - begun)


def test_the_time_of_day_is_set_back_and_forth(tmp_path):
    """What clients see of times stays as it was first said, and nothing is too old."""
    chance, begun, clock = seeded(25), time.monotonic(), tmp_path / "clock"
    clock.write_text("0")

    def set_by(seconds):
        (tmp_path / "clock.new").write_text(str(seconds))
        os.replace(tmp_path / "clock.new", clock)

    def disturb(seconds):
        def both():
            set_by(seconds)
            return at_random(one, chance, 0.4)()

        return both

    with matrix(tmp_path, "echo", environment={CLOCK: str(clock)}) as one:
        one.round()
        for seconds in (-3600, -10 * 86400, 3600, -86400, 0):
            one.round(disturb(seconds))
        one.end()
    tell("clock", one, check_log(tmp_path), time.monotonic() - begun)
