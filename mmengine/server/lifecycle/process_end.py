"""Ends a server's process in bounded time, even if one of its threads does not end."""

import os
import signal
import threading

from mmengine.serve.requests.operator_log import operator_log


def end_process_after(seconds: float) -> None:
    """End this process with exit code 0 after a time, unless it has ended before.

    The log needs no shutdown: everything that left the process is written.
    """
    timer = threading.Timer(seconds, _end_process)
    timer.daemon = True
    timer.start()


def _end_process() -> None:
    operator_log.error("the server did not end in time; its process ends now")
    os._exit(0)


def drain_text(num_streams: int, drain_s: float, sig: int) -> str:
    """Return the line that the first signal `sig` prints while calls are being answered."""
    streams = "1 stream runs" if num_streams == 1 else f"{num_streams} streams run"
    again = "Ctrl-C again" if sig == signal.SIGINT else "a second signal"
    return f"\nmmengine: {streams}; up to {drain_s:g} s; {again} ends now\n"
