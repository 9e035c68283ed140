"""Carriers for tests: they send messages to replicas in this process or in other processes."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from mmengine.fleet.attempt import ReplicaLost
from mmengine.fleet.replica import Replica
from mmengine.fleet.routing import Ring

LONGEST = 2**28  # maximum frame size in bytes


class LocalCarrier:
    """A carrier to replicas in this process. `lose` removes a replica and breaks its calls, while its engine
    keeps running.
    """

    def __init__(self, *replicas: Replica):
        self.replicas = {each.name: each for each in replicas}
        self.leaving: set[str] = set()
        self.calls: list[tuple[str, bytes]] = []  # replica's name, and data
        self.delay_s = 0.0  # pause before each message from a replica
        self._lost: dict[str, asyncio.Future] = {}

    def lose(self, name):
        self.replicas.pop(name)
        lost = self._lost.pop(name, None)
        if lost is not None:
            lost.set_result(None)

    def is_leaving(self, replica):
        return replica in self.leaving

    async def call(self, key, data):
        order = [name for name in Ring(self.replicas).order(key) if name not in self.leaving]
        if not order:
            await asyncio.sleep(1000)
        name = order[0]
        self.calls.append((name, data))
        if name not in self._lost:
            self._lost[name] = asyncio.get_running_loop().create_future()
        lost = self._lost[name]
        async with contextlib.aclosing(self.replicas[name].run(data)) as words:
            while True:
                word = asyncio.ensure_future(anext(words))
                try:
                    await asyncio.wait((word, lost), return_when=asyncio.FIRST_COMPLETED)
                    if lost.done():
                        raise ReplicaLost("it was cut off")
                    if self.delay_s:
                        await asyncio.sleep(self.delay_s)
                    yield word.result()
                except StopAsyncIteration:
                    return
                finally:
                    if not word.done():
                        word.cancel()
                        await asyncio.wait((word,))


class SocketCarrier:
    """A carrier to the ReplicaProcesses whose sockets are in `folder`."""

    def __init__(self, folder: Path):
        self._folder = folder

    def is_leaving(self, replica):
        return False

    async def call(self, key, data):
        names = {path.stem for path in self._folder.glob("*.sock")}
        writer = None
        for name in Ring(names).order(key):
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_unix_connection(str(self._folder / f"{name}.sock"))
                break
        if writer is None:
            raise ReplicaLost("there is none")
        try:
            writer.write(len(data).to_bytes(4, "big") + data)
            while True:
                size = int.from_bytes(await reader.readexactly(4), "big")
                if not size:
                    return
                yield await reader.readexactly(size)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise ReplicaLost(type(error).__name__) from None
        finally:
            writer.close()


class ReplicaProcess:
    def __init__(self, folder: Path, name: str):
        self.name, self._socket = name, folder / f"{name}.sock"
        command = [sys.executable, "-m", "tests.fleet.replica_process", str(folder), name]
        self._process = subprocess.Popen(command, cwd=Path(__file__).parents[2])

    def wait_until_it_listens(self, limit_s=60):
        end = time.monotonic() + limit_s
        while not self._socket.exists():
            assert self._process.poll() is None and time.monotonic() < end
            time.sleep(0.01)

    def kill(self):
        self._process.kill()
        self._process.wait()
        self._socket.unlink(missing_ok=True)

    def freeze(self):
        os.kill(self._process.pid, signal.SIGSTOP)
