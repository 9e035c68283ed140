"""Fifty open calls survive killed processes, kills during recovery, short drains, a wrong clock, and a full
disk.
"""

import http.client
import json
import os
import signal
import time
from collections import Counter

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
    """The test owns the socket, as systemd does, and starts the server again."""
    chance, begun = seeded(22), time.monotonic()
    with matrix(tmp_path, "echo", keeps_socket=True) as one:
        one.round()
        for _ in range(5):
            one.round(both_die(one, chance))
        one.end()
    tell("both", one, check_log(tmp_path), time.monotonic() - begun)


def test_killed_twice_more_while_it_resumes(tmp_path):
    chance, begun = seeded(23), time.monotonic()

    def disturb():
        time.sleep(chance.uniform(0.1, 0.4))
        return at_random(one, chance, 0.0, 0.1, 0.1)()

    with matrix(tmp_path, "echo") as one:
        one.round()
        for _ in range(10):
            one.round(disturb)
        one.end()
    tell("in recovery", one, check_log(tmp_path), time.monotonic() - begun)


@pytest.mark.parametrize("drain_s", [0, 1])
def test_told_to_end_with_a_short_drain(tmp_path, drain_s):
    """The next process finishes calls that outlast the drain."""
    chance, begun = seeded(24), time.monotonic()

    def disturb():
        time.sleep(chance.uniform(0.1, 0.4))
        life, killed = one.num_lives, time.monotonic()
        one.process.send_signal(signal.SIGTERM)
        assert one.process.wait(30) == 0
        one.start()
        one.wait_for_life(life)
        return [killed]

    with matrix(tmp_path, "echo", "--drain-s", str(drain_s), keeps_socket=True) as one:
        one.round()
        for _ in range(5):
            one.round(disturb)
        one.end()
    tell("short drains", one, check_log(tmp_path), time.monotonic() - begun)


def test_the_time_of_day_is_set_back_and_forth(tmp_path):
    """Times in stored answers do not change, and nothing expires too early."""
    chance, begun, clock = seeded(25), time.monotonic(), tmp_path / "clock"
    clock.write_text("0")

    def set_by(seconds):
        (tmp_path / "clock.new").write_text(str(seconds))
        os.replace(tmp_path / "clock.new", clock)

    def disturb(seconds):
        def both():
            set_by(seconds)
            return at_random(one, chance, 0.4, 0.4)()

        return both

    with matrix(tmp_path, "echo", environment={CLOCK: str(clock)}) as one:
        one.round()
        for seconds in (-3600, -10 * 86400, 3600, -86400, 0):
            one.round(disturb(seconds))
        one.end()
    tell("clock", one, check_log(tmp_path), time.monotonic() - begun)


@pytest.mark.parametrize("how", ["but for its reserve", "wholly"])
def test_a_disk_that_is_full_while_it_serves(tmp_path, how):
    """Accepted calls are answered, and new calls are refused. When there is space again, the server
    continues, even after a crash on the full disk.
    """
    chance, begun, told = seeded(26), time.monotonic(), []
    full = tmp_path / "full"

    def disturb(dies):
        def fill():
            time.sleep(chance.uniform(0.05, 0.3))
            full.write_text(how)
            kills = at_random(one, chance, 0.3)() if dies else []
            end = time.monotonic() + 1.5
            while time.monotonic() < end:
                told.append(status_of(one.port))
                time.sleep(0.1)
            full.unlink()
            return kills

        return fill

    with matrix(tmp_path, "echo") as one:
        one.round()
        for dies in (False, True, False, True):
            one.round(disturb(dies))
            assert status_of(one.port) == 200
        one.end()
    print(f"{how}: answers to new calls: {Counter(told)}")
    assert set(told) <= {200, 503, 507, None} and told.count(503) + told.count(507) > 10
    tell("full disk", one, check_log(tmp_path), time.monotonic() - begun)


def status_of(port):
    """Return a new call's HTTP status, or None after a second without a response."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}]})
    try:
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
