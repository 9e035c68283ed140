"""Runs `mmengine serve --log` with a small script in place of the engine. Each start of the script is a
new process, numbered from 0. A process answers each connection with its number, and obeys a command in the
received bytes.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATIENCE_S = 30
ENGINE = """
import os, select, signal, socket, sys, time
from pathlib import Path
from mmengine.cli.supervisor import ended_by, obey_supervisor
from mmengine.server.lifecycle.heartbeat import BEAT_S, Beat, HeartbeatSender

folder, plan = Path(sys.argv[1]), sys.argv[2].split(",")
obey_supervisor()
life = len(list(folder.glob("life-*")))
(folder / f"life-{life}").write_text(f"{os.getpid()} {ended_by()}")
bound = socket.socket(fileno=int(os.environ["MMENGINE_SOCKET"]))
beats = HeartbeatSender(int(os.environ["MMENGINE_BEATS"]))
how = plan[min(life, len(plan) - 1)]
tokens, reasons, told, is_built = 0, (), [], how != "dies loading"

def dies(what):
    if what.startswith("exit"):
        os._exit(int(what.split()[1]))
    os.kill(os.getpid(), getattr(signal, what))

def ends(number, frame):
    told.append(number)
    print("told", len(told), file=sys.stderr, flush=True)
    if len(told) > 1 or how != "lingers":
        os._exit(0 if how != "lingers" else 7)

signal.signal(signal.SIGHUP, lambda *given: (folder / "hup").touch())
if how == "loads":
    time.sleep(1000)
if how.startswith("refuses"):
    os._exit(int(how.split()[1]))
if how.startswith("loading"):
    dies(how.split(" ", 1)[1])
beats.report_built()
if how.startswith("built"):
    dies(how.split(" ", 1)[1])
time.sleep(0.3 if how == "slow" else 0)
signal.signal(signal.SIGTERM, ends)
signal.signal(signal.SIGINT, ends)
while True:
    beats.send(Beat(True, True, True, reasons, 7, tokens))
    if how.startswith("serving"):
        dies(how.split(" ", 1)[1])
    if not select.select([bound], [], [], BEAT_S)[0]:
        continue
    connection, _ = bound.accept()
    asked = connection.recv(100).decode()
    connection.sendall(f"life {life}".encode())
    connection.close()
    tokens += asked == "token"
    reasons = ("a reason",) if asked == "unwell" else ()
    if asked.startswith("die "):
        dies(asked[4:])
    if asked == "freeze":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        time.sleep(1000)
"""
GUARD = """
import atexit, sys
from mmengine.cli import restarts, guard, supervisor
supervisor.COMMAND = (sys.executable, "-c", {engine!r}, {folder!r}, {plan!r})
restarts.MAX_PAUSE_S, guard.LATE_S, guard.STUCK_S, guard.LAST_WORDS_S = 0.2, 1.0, 1.5, 0.5
guard.FROZEN_S = {frozen_s!r}

def tell():
    print("MODULES", *sorted({{name.partition(".")[0] for name in sys.modules}}), file=sys.stderr)
    rss = next(line for line in open("/proc/self/status") if line.startswith("VmRSS"))
    print(rss, file=sys.stderr)

atexit.register(tell)
sys.argv = ["mmengine", "serve", "--log", {folder!r} + "/log", *{options!r}]
from mmengine.cli.main import main
main()
"""

AS_SYSTEMD = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "mmengine.socket"}
os.execv(sys.argv[2], sys.argv[2:])
"""


def as_systemd(command, given):
    """Return a command that runs `command` with a listening socket as descriptor 3 (LISTEN_FDS), as systemd
    does, and the file descriptors to pass to the process. `given`: the socket, or None.
    """
    if given is None:
        return command, ()
    return [sys.executable, "-c", AS_SYSTEMD, str(given.fileno()), *command], (given.fileno(),)


class Guarded:
    """A supervisor process."""

    def __init__(self, folder, plan, options, given=None, frozen_s=600):
        self.folder = folder
        script = GUARD.format(
            engine=ENGINE, folder=str(folder), plan=",".join(plan), options=options, frozen_s=frozen_s
        )
        self.path = folder / "err"
        env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'plugins'}"}
        command, fds = as_systemd([sys.executable, "-c", script], given)
        with self.path.open("w") as err:
            self.process = subprocess.Popen(command, stderr=err, env=env, pass_fds=fds)

    @property
    def said(self):
        return self.path.read_text()

    def health(self, path="/health"):
        """Get `path` of the health port. Return status, headers and body."""
        self.wait_for(lambda: "health at" in self.said)
        where = re.search(r"health at (http://[^/]+)/health", self.said)[1]
        try:
            with urllib.request.urlopen(where + path, timeout=PATIENCE_S) as got:
                return got.status, dict(got.headers), got.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers), error.read().decode()

    def ask(self, port, what="hello"):
        """Send `what` to the process, and return its answer, or "" if the connection was reset."""
        self.wait_for(lambda: self.num_lives)
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
            connection.sendall(what.encode())
            try:
                return connection.recv(100).decode()
            except ConnectionError:
                return ""

    @property
    def num_lives(self):
        return len(list(self.folder.glob("life-*")))

    def life(self, number):
        """Return the process id of process `number`, and how the previous process ended."""
        self.wait_for(lambda: (self.folder / f"life-{number}").exists())
        self.wait_for(lambda: (self.folder / f"life-{number}").read_text())
        pid, _, cause = (self.folder / f"life-{number}").read_text().partition(" ")
        return int(pid), cause

    def wait_for(self, true):
        end = time.monotonic() + PATIENCE_S
        while not true():
            assert time.monotonic() < end, self.said
            assert self.process.poll() is None or true(), self.said
            time.sleep(0.01)

    def ends(self):
        return self.process.wait(PATIENCE_S)


@contextmanager
def guarded(folder, plan=("serves",), options=("--port", "0", "--health-port", "0"), **given):
    """Run a supervisor. `plan`: the behaviour of each process; the last value applies to all later processes.
    `given`: a listening socket, passed to the supervisor as systemd passes sockets. `frozen_s`: the
    supervisor's FROZEN_S.
    """
    one = Guarded(folder, plan, [str(each) for each in options], **given)
    try:
        yield one
    finally:
        one.process.send_signal(signal.SIGKILL)
        one.process.wait()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return bound.getsockname()[1]
