"""Ends the server's process within a time limit, even if one of its threads never ends. Also builds the
message that is printed when the server begins to shut down.
"""

import os
import signal
import threading

from mmengine.serve.requests.operator_log import operator_log


def end_process_after(seconds: float) -> None:
    """End this process with exit code 0 after `seconds`, unless the process ends earlier.

    The log needs no shutdown: everything that clients received is already written.
    """
    timer = threading.Timer(seconds, _end_process)
    timer.daemon = True
    timer.start()


def _end_process() -> None:
    operator_log.error("the server did not end in time; its process ends now")
    os._exit(0)


def drain_text(num_streams: int, drain_s: float, sig: int) -> str:
    """Return the message that is printed when the first signal `sig` arrives while calls are running."""
    streams = "1 stream is running" if num_streams == 1 else f"{num_streams} streams are running"
    again = "press Ctrl-C again" if sig == signal.SIGINT else "send a second signal"
    return f"\nmmengine: {streams}; waiting up to {drain_s:g} s; {again} to end now\n"
