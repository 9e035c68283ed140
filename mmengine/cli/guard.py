"""The supervisor for `mmengine serve --log`. Runs the engine in a child process, and restarts it after
failures.

The supervisor owns the listening socket, so clients can connect while the engine restarts. The engine's
process inherits the socket and accepts the clients. The supervisor itself loads no torch, no model and no
event log.
"""

import os
import selectors
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from math import ceil
from types import FrameType

from mmengine.cli.loading import say
from mmengine.cli.memory_kills import how_killed, num_memory_kills
from mmengine.cli.restarts import Life, Restarts
from mmengine.cli.supervisor import HANG_EXIT, INTERRUPTED, CannotStart, Ended, Process, started
from mmengine.server.http.errors import LATER_S
from mmengine.server.lifecycle.health_port import Health, HealthPort, reported, silent
from mmengine.server.lifecycle.heartbeat import LATE_S, STUCK_S, Beat, HeartbeatReceiver

SOCKET = "MMENGINE_SOCKET"  # Environment variable for the descriptor of the listening socket.
BEATS = "MMENGINE_BEATS"  # Environment variable for the descriptor to which the engine sends heartbeats.
HASTE = "MMENGINE_IN_HASTE"  # Environment variable that is set if an earlier process has served.
ENDS = (signal.SIGTERM, signal.SIGINT)
FROZEN_S = 600.0  # Seconds without a heartbeat after which the engine's process is killed.
LAST_WORDS_S = 5.0  # Seconds between the second signal and killing the engine's process.
LONGEST_RETRY_S = 60


class Guard:
    """The supervisor. `arguments`: arguments for the engine's process. `bound`: the listening socket.
    `health`: the listening socket for health requests, or None.
    """

    def __init__(self, arguments: Sequence[str], bound: socket.socket, health: socket.socket | None) -> None:
        self._arguments, self._bound = arguments, bound
        self._selector = selectors.DefaultSelector()
        self._health = None if health is None else HealthPort(health, self._selector, self.health)
        self._restarts = Restarts()
        self._signals: list[int] = []  # Signals that were received but not yet handled.
        self._num_ends = 0  # Number of SIGTERM and SIGINT received.
        self._reloads = False  # Whether a SIGHUP must still be forwarded, once the engine serves.
        self._running: _Running | None = None
        self._kill_at = float("inf")
        self._load_s = float(LATER_S)  # Seconds that the last engine took to start.
        self._has_served = False

    def run(self) -> int:
        """Run until SIGTERM, SIGINT, or a normal end of the engine's process, and return the exit code.
        A process that refuses to start is restarted only if an earlier process has served.

        Raises MMEngineError if the process fails repeatedly.
        """
        with self._hearing_signals():
            while not self._num_ends:
                try:
                    code = self._one_life()
                except CannotStart as error:
                    if not self._has_served:
                        raise
                    code = None
                    self._pause(Life(Ended(1, "", 0), False, 0, 0.0, (str(error),)), str(error))
                if code is not None:
                    return code
        return 0

    def health(self) -> Health:
        """Return the health that the health port reports."""
        running = self._running
        if running is None:
            return Health(("the engine failed and is restarting",), self._retry_after_s(0.0), False)
        late = silent(time.monotonic() - running.heard_at, LATE_S, STUCK_S)
        if running.beat.is_regular and late is not None:
            return late
        if not running.beat.is_serving:
            why = "the first steps run" if running.beat.is_built else "the model is being loaded"
            return Health((why,), self._retry_after_s(time.monotonic() - running.begun), False)
        return reported(running.beat.reasons, running.beat.retry_after_s, running.beat.is_frozen)

    def _retry_after_s(self, waited_s: float) -> int:
        return max(1, min(LONGEST_RETRY_S, ceil(self._load_s - waited_s)))

    def _one_life(self) -> int | None:
        """Run an engine's process once. Return the exit code, or None if the engine must be restarted."""
        kills = num_memory_kills()
        with closing(HeartbeatReceiver.pair()) as heard:
            running, ended = self._watched(heard)
        if self._num_ends or ended.code in (0, INTERRUPTED) or -ended.code in ENDS:
            return ended.exit_code
        after = num_memory_kills()
        by_memory = kills is not None and after is not None and after > kills
        is_built = running.beat.is_built
        life = Life(
            ended, is_built, running.beat.num_tokens, running.served_s, running.beat.reasons, by_memory
        )
        if ended.code > 0 and ended.code != HANG_EXIT and not self._has_served:
            return ended.code  # The process refused to start, and has printed the reason.
        is_killed = ended.code == -signal.SIGKILL
        self._pause(life, how_killed(kills, after, ended.peak_bytes) if is_killed else life.what)
        return None

    def _watched(self, heard: HeartbeatReceiver) -> tuple["_Running", Ended]:
        """Run an engine's process to its end. Return its last state, and how the process ended."""
        fds = self._bound.fileno(), heard.sending_end.fileno()
        environment = {SOCKET: str(fds[0]), BEATS: str(fds[1]), **({HASTE: "1"} if self._has_served else {})}
        with started(self._arguments, self._restarts.cause, environment, fds, own_group=True) as process:
            heard.sending_end.close()  # The child has its own copy.
            running = self._running = _Running(process.popen.pid, heard)
            self._selector.register(heard.receiving_end, selectors.EVENT_READ, self._hear)
            ended = self._watch(process, running)
            self._hear()  # Reads the last heartbeat.
            self._selector.unregister(heard.receiving_end)
            self._running = None
        return running, ended

    def _watch(self, process: Process, running: "_Running") -> Ended:
        while True:
            found, status, usage = os.wait4(-1, os.WNOHANG)
            if found == running.pid:
                return process.ended(status, usage.ru_maxrss)
            # The supervisor may be process 1 in a container, and then inherits orphaned processes.
            if found:
                continue
            self._turn(self._due(running))
            if self._reloads and running.beat.is_serving:
                self._reloads = False
                os.kill(running.pid, signal.SIGHUP)
            if time.monotonic() >= self._due(running):
                if not self._num_ends:
                    say(f"the engine has not responded for {FROZEN_S:g} s and is killed")
                running.is_killed = True
                os.kill(running.pid, signal.SIGKILL)

    def _due(self, running: "_Running") -> float:
        """Return the monotonic time at which the engine's process must be killed, or infinity."""
        if running.is_killed:
            return float("inf")
        return min(self._kill_at, running.heard_at + FROZEN_S if running.beat.is_regular else float("inf"))

    def _pause(self, life: Life, what: str) -> None:
        """Print `what` (the failure), and wait before the next process starts."""
        pause_s = self._restarts.pause_s(life)
        say(f"{what}; starting again" + (f" in {pause_s:g} s" if pause_s else ""))
        until = time.monotonic() + pause_s
        while not self._num_ends and time.monotonic() < until:
            self._turn(until)

    def _turn(self, until: float) -> None:
        """Wait for an event, at most until the monotonic time `until`, and handle it."""
        waits = [until - time.monotonic()]
        if self._health is not None and (wait_s := self._health.wait_s()) is not None:
            waits.append(wait_s)
        timeout = min(waits)
        for key, _ in self._selector.select(None if timeout == float("inf") else max(0.0, timeout)):
            key.data()
        if self._health is not None:
            self._health.tidy()
        while self._signals:
            self._handle_signal(self._signals.pop(0))

    def _hear(self) -> None:
        running = self._running
        beat = running.heard.newest() if running is not None else None
        if running is None or beat is None:
            return
        now = time.monotonic()
        if beat.is_serving and not running.beat.is_serving:
            running.serving_since, self._load_s, self._has_served = now, now - running.begun, True
        running.beat, running.heard_at = beat, now

    def _handle_signal(self, number: int) -> None:
        """Handle a signal.

        SIGTERM and SIGINT are forwarded to the engine's process. After the first signal, streams can finish.
        The second signal ends all streams with an error. A process that still runs LAST_WORDS_S after the
        second signal is killed. SIGHUP is forwarded once an engine serves.
        """
        running = self._running
        if number == signal.SIGHUP:
            # Before an engine serves, the signal would have no effect.
            self._reloads = True
        elif number in ENDS:
            self._num_ends += 1
            self._bound.close()  # Otherwise new clients would wait for an engine that never comes.
            if self._num_ends == 2:
                self._kill_at = time.monotonic() + LAST_WORDS_S
            if running is not None:
                os.kill(running.pid, number if self._num_ends <= 2 else signal.SIGKILL)

    @contextmanager
    def _hearing_signals(self) -> Iterator[None]:
        def note(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)

        wakes, awake = socket.socketpair()
        wakes.setblocking(False)
        awake.setblocking(False)
        self._selector.register(wakes, selectors.EVENT_READ, lambda: wakes.recv(4096))
        heard = (*ENDS, signal.SIGHUP, signal.SIGCHLD)
        before = {number: signal.signal(number, note) for number in heard}
        fd = signal.set_wakeup_fd(awake.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(fd)
            for number, handler in before.items():
                signal.signal(number, handler)
            if self._health is not None:
                self._health.close()
            self._selector.close()
            wakes.close()
            awake.close()


class _Running:
    """A running engine process and its latest heartbeat."""

    def __init__(self, pid: int, heard: HeartbeatReceiver) -> None:
        self.pid, self.heard = pid, heard
        self.begun = self.heard_at = time.monotonic()
        self.beat = Beat()
        self.serving_since: float | None = None
        self.is_killed = False

    @property
    def served_s(self) -> float:
        return 0.0 if self.serving_since is None else time.monotonic() - self.serving_since
