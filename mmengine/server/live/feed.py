"""Sends events about the log to the open live pages. While a page is open, a follower process reads the log
for all pages.
"""

import asyncio
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

from mmengine.errors import ErrorCode
from mmengine.serve.requests.operator_log import operator_log
from mmengine.server.http.errors import LATER_S, ApiError, shutdown_error

MAX_VIEWERS = 16  # Maximum number of open pages.
MAX_LINE_BYTES = 64 * 2**20  # Maximum size of a message from the follower.
# Maximum size of all events since the follower's last `begin` event. These events are sent to each new page.
MAX_HELD_BYTES = 128 * 2**20
LINGER_S = 5.0  # Seconds that the follower continues without open pages, because a page may be reloading.
_BEGIN = b'{"type":"begin"'


class Feed:
    """Starts the follower process and distributes its events to the open pages. Belongs to the event loop
    that creates it.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._viewers: set[Viewer] = set()
        self._held: list[bytes] = []  # Events since the last `begin`.
        self._num_held = 0
        self._following: asyncio.Task[None] | None = None
        self._leaving: asyncio.TimerHandle | None = None
        self._is_over = False

    def view(self) -> "Viewer":
        """Add a page. Raises ApiError if MAX_VIEWERS pages are open, or during shutdown."""
        if self._is_over:
            raise shutdown_error(LATER_S)
        if len(self._viewers) >= MAX_VIEWERS:
            text = f"{MAX_VIEWERS} live pages are open, which is the limit; close one of the pages"
            raise ApiError(ErrorCode.LIVE_PAGES_FULL, text, headers={"retry-after": "10"})
        if self._leaving is not None:
            self._leaving.cancel()
        viewer = Viewer(self._held, self._left)
        self._viewers.add(viewer)
        if self._following is None:
            self._following = asyncio.get_running_loop().create_task(self._follow())
        return viewer

    def _left(self, viewer: "Viewer") -> None:
        self._viewers.discard(viewer)
        if not self._viewers and self._following is not None:
            self._leaving = asyncio.get_running_loop().call_later(LINGER_S, self._stop)

    def _stop(self) -> None:
        if self._following is not None:
            self._following.cancel()

    def close(self) -> None:
        """End all pages' event streams. Otherwise the streams would delay the shutdown."""
        self._is_over = True
        self._stop()

    async def _follow(self) -> None:
        process: asyncio.subprocess.Process | None = None
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "mmengine.server.live.follower", str(self._folder)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                limit=MAX_LINE_BYTES,
            )
            assert process.stdout is not None
            while line := await process.stdout.readline():
                self._take(line)
                if self._num_held > MAX_HELD_BYTES:
                    break  # The pages reconnect. A new follower then starts with a new `begin`.
        except ValueError:  # A message exceeds MAX_LINE_BYTES.
            operator_log.warning("a message for live pages is too large", limit=MAX_LINE_BYTES)
        finally:
            self._following, self._held, self._num_held = None, [], 0
            for viewer in list(self._viewers):  # The pages reconnect.
                viewer.end()
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()

    def _take(self, line: bytes) -> None:
        kind = b"begin" if line.startswith(_BEGIN) else b"more"
        event = b"event: %b\ndata: %b\n\n" % (kind, line.rstrip(b"\n"))
        if kind == b"begin":
            self._held.clear()
            self._num_held = 0
        self._held.append(event)
        self._num_held += len(event)
        for viewer in self._viewers:
            viewer.put(event)


class Viewer:
    """An open page. This object supplies the frames for the page's event stream."""

    def __init__(self, held: list[bytes], left: Callable[["Viewer"], None]):
        self._events, self._left = deque(held), left
        self._listener: Callable[[], None] | None = None
        self._is_over = False

    def put(self, event: bytes) -> None:
        self._events.append(event)
        self._wake()

    def end(self) -> None:
        self._is_over = True
        self._wake()

    def _wake(self) -> None:
        if self._listener is not None:
            self._listener()

    def take(self, to_api_error: Callable[[Exception], ApiError]) -> tuple[bytes, str]:
        """Return the new events, and the stream's state: "whole" after the last event, otherwise ""."""
        found = b"".join(self._events)
        self._events.clear()
        return found, "whole" if self._is_over else ""

    def error_frames(self, error: ApiError) -> bytes:
        return b""

    def listen(self, listener: Callable[[], None] | None) -> None:
        self._listener = listener

    @property
    def backlog(self) -> int:
        return len(self._events)

    has_more = False

    def close(self) -> None:
        self._left(self)

    def leave(self) -> None:
        self._left(self)
