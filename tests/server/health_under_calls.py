"""Measures the response time of GET /health/live while 600 calls arrive within a second.

`python -m tests.server.health_under_calls [options of the server]`. The server and the sender of calls are
separate processes. Each request to /health/live has a new connection.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from http.client import HTTPConnection
from pathlib import Path

from tests.server.health_under_images import shares, started

NUM_CALLS, WITHIN_S, EVERY_S = 600, 0.8, 0.02
_SEND = "import sys; from tests.server.health_under_calls import send; send(int(sys.argv[1]))"


def send(port: int) -> None:
    """Send all calls on separate connections, and print the statuses of the responses."""
    message = {"role": "user", "content": "What is a triangle? " * 20}
    body = json.dumps({"messages": [message], "max_tokens": 2, "stream": True}).encode()
    statuses = []

    def one() -> None:
        connection = HTTPConnection("127.0.0.1", port, timeout=600)
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
        statuses.append(response.status)
        connection.close()

    threads = [threading.Thread(target=one) for _ in range(NUM_CALLS)]
    for thread in threads:
        thread.start()
        time.sleep(WITHIN_S / NUM_CALLS)
    for thread in threads:
        thread.join()
    print(json.dumps(statuses))


def probed(port: int, path: str = "/health/live") -> float:
    """Return the response time of `path` on a new connection, in seconds."""
    begun = time.perf_counter()
    connection = HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("GET", path)
    response = connection.getresponse()
    assert response.status == 200 and response.read()
    connection.close()
    return time.perf_counter() - begun


class Repeated(threading.Thread):
    """Measures the response times of a path until `is_over`."""

    def __init__(self, port: int, path: str) -> None:
        super().__init__()
        self.port, self.path, self.is_over, self.times = port, path, False, list[float]()

    def run(self) -> None:
        while not self.is_over:
            self.times.append(probed(self.port, self.path))
            time.sleep(EVERY_S)


def measured(arguments: list[str] | None = None) -> dict[str, object]:
    """Run the measurement, and return the results. Response times are in milliseconds."""
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        server, port = started([*(arguments or []), "--no-request-log"], Path(folder) / "err")
        try:
            idle = [probed(port) for _ in range(100)]
            sender = subprocess.Popen(
                [sys.executable, "-c", _SEND, str(port)], stdout=subprocess.PIPE, text=True
            )
            # The event loop answers /version, so response times for /version show the event loop's delay.
            begun, both = time.perf_counter(), [Repeated(port, path) for path in ("/health/live", "/version")]
            for each in both:
                each.start()
            sender.wait()
            for each in both:
                each.is_over = True
                each.join()
            took_s = time.perf_counter() - begun
            answers = json.loads(sender.stdout.read())
        finally:
            server.kill()
            server.wait()
    return {
        "load_before": load_before,
        "answers": {str(status): answers.count(status) for status in sorted(set(answers))},
        "seconds": took_s,
        "asked": [len(each.times) for each in both],
        "idle": shares(idle),
        "live": shares(both[0].times),
        "event_loop": shares(both[1].times),
    }


if __name__ == "__main__":
    for name, value in measured(sys.argv[1:]).items():
        print(name, value)
