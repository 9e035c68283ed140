"""Runs rounds of fifty calls against a server that is killed, and checks the results."""

import json
import os
import random
import re
import select
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from mmengine.replay.verify import verify
from tests.server.guarded import as_systemd, free_port

ROOT = Path(__file__).parents[2]
PATIENCE_S = 100
EMBEDDED = ("--chat-template", str(ROOT / "examples" / "tool_calls.jinja"), "--set", "max_num_seqs=96")
ENV = {"PYTHONPATH": f"{ROOT}:{ROOT / 'plugins'}", "OMP_NUM_THREADS": "1"}


class Round(NamedTuple):
    """A round's result. `calls`: each call's report from clients.py. `kills`: the kill times
    (time.monotonic).
    """

    name: str
    calls: dict
    retries: int
    kills: list

    @property
    def open(self):
        """How many calls had no answer at each kill."""
        return [sum(call["ended"] > kill for call in self.calls.values()) for kill in self.kills]


class Matrix:
    """A server under its supervisor, and clients in another process. With `keeps_socket`, this process owns
    the listening socket, as systemd does.
    """

    def __init__(self, folder, engine, *options, environment=None, keeps_socket=False):
        self.folder, self.engine, self._environment = folder, engine, environment or {}
        self.rounds, self._expected = [], None
        self._bound = socket.create_server(("127.0.0.1", 0), backlog=128) if keeps_socket else None
        self.port = free_port() if self._bound is None else self._bound.getsockname()[1]
        self._options = ["--port", str(self.port), "--log", str(folder / "log"), *options]
        folder.mkdir(exist_ok=True)
        if engine == "embedded":
            self._options += EMBEDDED
        self.start()
        self.wait_for_life(0)
        self._clients = subprocess.Popen(
            [sys.executable, "-m", "tests.durable.clients", str(self.port), engine],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **ENV},
            text=True,
        )

    def start(self):
        words = ["-m", "tests.durable.server_process", str(self.folder), self.engine, "serve", *self._options]
        command, fds = as_systemd([sys.executable, *words], self._bound)
        env = {**os.environ, **ENV, **self._environment}
        with (self.folder / "err").open("a") as err:
            self.process = subprocess.Popen(command, stderr=err, env=env, pass_fds=fds)

    @property
    def said(self):
        return (self.folder / "err").read_text()

    @property
    def num_lives(self):
        return len([path for path in self.folder.glob("life-*") if path.suffix != ".new"])

    def plan(self, points):
        """Make the next engine processes die at these points, a process per point."""
        new = self.folder / "plan.new"
        new.write_text("\n".join(points))
        new.rename(self.folder / "plan")

    @property
    def trail(self):
        """The engine process's writes since `plan`, in order."""
        return (self.folder / "trail").read_text().splitlines()

    def kill(self):
        """Kill the live engine process, if there is one."""
        with suppress(ProcessLookupError, FileNotFoundError):
            os.kill(int((self.folder / f"life-{self.num_lives - 1}").read_text()), signal.SIGKILL)

    def kill_both(self):
        self.process.kill()
        self.process.wait()
        self.kill()  # in case the kernel has not killed the engine yet

    def wait_for_life(self, number):
        self.wait_for(lambda: self.num_lives > number)

    def wait_for(self, true):
        end = time.monotonic() + PATIENCE_S
        while not true():
            assert time.monotonic() < end, self.said[-1500:]
            assert self.process.poll() is None, self.said[-1500:]
            time.sleep(0.002)

    def round(self, disturb=None):
        """Run fifty calls, call `disturb` when all are sent, and check their results."""
        name = f"round{len(self.rounds)}"
        self._clients.stdin.write(name + "\n")
        self._clients.stdin.flush()
        are_sent = self._line()["sent"] >= 50
        before = self.num_lives
        kills = disturb() if disturb is not None and are_sent else []
        told = self._line()
        one = Round(name, told["calls"], told["retries"], kills)
        self.rounds.append(one)
        self._check(one, self.num_lives - before)
        return one

    @property
    def is_answered(self):
        return bool(select.select([self._clients.stdout], [], [], 0)[0])

    def _line(self):
        assert select.select([self._clients.stdout], [], [], PATIENCE_S)[0], self.said[-1500:]
        return json.loads(self._clients.stdout.readline())

    def _check(self, one, num_kills):
        errors = {name: call["error"] for name, call in one.calls.items() if "error" in call}
        assert not errors, (one.name, list(errors), list(errors.items())[:3])
        found = {name: call["text"] for name, call in one.calls.items()}
        if self._expected is None:
            assert not num_kills
            self._expected = found
        else:
            other = {name: (text, self._expected[name]) for name, text in found.items()}
            other = {name: both for name, both in other.items() if both[0] != both[1]}
            assert not other, (one.name, len(other), list(other), list(other.items())[:1])

    def end(self):
        """Stop the server with SIGTERM, and check that it exits with 0."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(PATIENCE_S) == 0, self.said[-1500:]

    def close(self):
        self._clients.stdin.close()
        self._clients.kill()
        self._clients.wait()
        self.kill_both()
        if self._bound is not None:
            self._bound.close()


@contextmanager
def matrix(folder, engine, *options, **more):
    one = Matrix(folder, engine, *options, **more)
    try:
        yield one
    finally:
        one.close()


def check_log(folder):
    """Check that the log verifies and that each request ends exactly once. Returns how many calls were
    unfinished each time the engine process died.
    """
    report = verify(folder / "log")
    assert report.ok, report
    live, ended, unfinished = {}, Counter(), []
    for record in LogReader(folder / "log"):
        event = record.event
        if isinstance(event, ev.Queued):
            assert event.request_id not in live and event.request_id not in ended, event.request_id
            live[event.request_id] = call_of(event)
        elif isinstance(event, ev.Finished):
            del live[event.request_id]
            ended[event.request_id] += 1
        elif isinstance(event, ev.Recovered):
            unfinished.append(len(set(live.values())))
    assert set(ended.values()) <= {1} and not live, (ended.most_common(3), live)
    return unfinished


def call_of(queued):
    """Return the call to which a queued request belongs. A call with several answers, prompts or batch lines
    has several requests.
    """
    name = (queued.group or queued.request_id).removesuffix("/0")
    return re.sub(r"^(batch_\w+)-\d+$|^(.*two-prompts.*)-\d$", r"\1\2", name)


def tell(what, one, unfinished, seconds):
    """Print a line with the numbers of kills, unfinished calls, retries and broken streams."""
    retries = sum(each.retries for each in one.rounds)
    breaks = sum(len(call["breaks"]) for each in one.rounds for call in each.calls.values())
    without = [count for each in one.rounds for count in each.open]
    print(
        f"{what}: {len(without)} kills in {len(one.rounds)} rounds, {seconds:.0f} s; calls without an answer "
        f"at each: {_least(without)}; of these in the log: {_least(unfinished)}; {retries} retries of the "
        f"client, {breaks} streams that broke and came again or went on"
    )


def _least(counts):
    return f"{min(counts)} at least, {statistics.median(counts):g} in the median" if counts else "-"


def at_random(one, chance, *longest_s):
    """Return a function that kills the engine at random times and returns these times.

    `longest_s`: for each kill, the maximum delay in seconds.
    """

    def disturb():
        kills = []
        for longest in longest_s:
            time.sleep(chance.uniform(0.0, longest))
            life = one.num_lives
            kills.append(time.monotonic())
            one.kill()
            one.wait_for_life(life)
        return kills

    return disturb


def at_points(one, points):
    """Return a function that makes successive engine processes die at these points. The function returns the
    kill times, and ends early if all calls are answered.
    """

    def disturb():
        life, kills = one.num_lives, []
        one.plan(points)
        while len(kills) < len(points) and not one.is_answered:
            if one.num_lives > life:
                life += 1
                kills.append(time.monotonic())
            time.sleep(0.002)
        return kills

    return disturb


def seeded(seed):
    print(f"seed {seed}")
    return random.Random(seed)
