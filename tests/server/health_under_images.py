"""Measures the response time of /health/live while 64 images with 2,000 x 2,000 pixels arrive, as data: URLs
or as URLs that the server fetches.

`python -m tests.server.health_under_images [--by-url] [options of the server]`. The server, the sender and
the probe run in separate processes.
"""

import base64
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path

import numpy as np
from PIL import Image

NUM_IMAGES, SIDE, EVERY_S = 64, 2000, 0.005
AT_ONCE = 16  # Concurrent connections that send images.
_SEND = "import sys; from tests.server.health_under_images import send; send(len(sys.argv) > 1)"
_SERVE_URLS = "import sys; from tests.server.health_under_images import serve_urls; serve_urls(sys.argv[1:])"
_HOST = "pictures.example.org"


def photo(seed: int) -> Image.Image:
    """Return an image with gradients and noise, which compresses like a photo: its PNG has half the
    raw size.
    """
    random = np.random.default_rng(seed)
    slopes = np.add.outer(np.linspace(0, 120, SIDE), np.linspace(0, 100, SIDE))[..., None]
    noise = random.integers(0, 16, (SIDE, SIDE, 3))
    return Image.fromarray((slopes + noise + random.integers(0, 20, 3)).astype(np.uint8))


def encoded(seed: int) -> tuple[str, bytes]:
    data, kind = io.BytesIO(), ("jpeg", "png")[seed % 2]
    photo(seed).save(data, kind, **({"quality": 90} if kind == "jpeg" else {"compress_level": 1}))
    return kind, data.getvalue()


def data_url(kind: str, data: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def body(url: str) -> bytes:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    return json.dumps({"messages": [{"role": "user", "content": parts}], "max_tokens": 4}).encode()


def pages(images: list[tuple[str, bytes]]) -> int:
    """Serve these images under /0, /1, …, and return the port."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # noqa: N802 (http.server requires this name)
            data = images[int(self.path.strip("/"))][1]
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_port


def send(by_url: bool) -> None:
    """Send all images to the model server, whose port is read from stdin. Prints two JSON lines: first the
    page server's port and the image sizes, then the response statuses.
    """
    images = [encoded(seed) for seed in range(8)]  # The requests use these images in turn.
    page_port = pages(images) if by_url else 0
    urls = [f"http://{_HOST}:{page_port}/{n}" if by_url else data_url(*each) for n, each in enumerate(images)]
    bodies = [body(url) for url in urls]

    def one(number: int) -> int:
        connection = HTTPConnection("127.0.0.1", port, timeout=600)
        own = bodies[number % 8][:-1] + b', "seed": %d, "cache_salt": "%d"}' % (number, number)
        connection.request("POST", "/v1/chat/completions", own, {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
        connection.close()
        return response.status

    print(json.dumps([page_port, *(len(each) for _, each in images)]), flush=True)
    port = int(sys.stdin.readline())
    with ThreadPoolExecutor(AT_ONCE) as pool:
        print(json.dumps(list(pool.map(one, range(NUM_IMAGES)))), flush=True)


def serve_urls(arguments: list[str]) -> None:
    """Run `mmengine serve` with a resolver that maps each host name to 127.0.0.1."""
    from mmengine.cli.main import main
    from mmengine.processing.fetch.fetcher import MediaFetcher
    from mmengine.processing.fetch.limits import FetchLimits
    from mmengine.server.chat import media_fetch as media

    limits = FetchLimits(http=True, ports=(int(arguments[0]),))
    media.make_media_fetcher = lambda settings: MediaFetcher(
        limits, resolve=lambda name: [ip_address("127.0.0.1")], is_allowed=lambda address: True
    )
    sys.argv[1:] = arguments[1:]
    main()


def started(arguments: list[str], err: Path, page_port: int = 0) -> tuple[subprocess.Popen, int]:
    """Start a server, and return its process and its port."""
    words = ["-c", _SERVE_URLS, str(page_port)] if page_port else ["-m", "mmengine.cli.main"]
    with open(err, "w") as written:
        server = subprocess.Popen(
            [sys.executable, *words, "serve", "--port", "0", *arguments], stderr=written
        )
    while (found := re.search(r"serving .* at http://[^:]*:(\d+)/", err.read_text())) is None:
        assert server.poll() is None, err.read_text()
        time.sleep(0.05)
    return server, int(found[1])


def asked(connection: HTTPConnection) -> float:
    """Return the response time of /health/live in seconds."""
    begun = time.perf_counter()
    connection.request("GET", "/health/live")
    response = connection.getresponse()
    assert response.status == 200 and response.read()
    return time.perf_counter() - begun


def measured(arguments: list[str] | None = None, *, by_url: bool = False) -> dict[str, object]:
    """Run the measurement and return its results. Times are in milliseconds."""
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        sender = subprocess.Popen(
            [sys.executable, "-c", _SEND, *(["by url"] if by_url else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: os.nice(10),
        )
        page_port, *sizes = json.loads(sender.stdout.readline())
        server, port = started([*(arguments or []), "--no-request-log"], Path(folder) / "err", page_port)
        try:
            connection = HTTPConnection("127.0.0.1", port)
            idle = [asked(connection) for _ in range(200)]
            sender.stdin.write(f"{port}\n")
            sender.stdin.flush()
            begun, times = time.perf_counter(), []
            os.set_blocking(sender.stdout.fileno(), False)
            while sender.poll() is None:
                times.append(asked(connection))
                time.sleep(EVERY_S)
            took_s = time.perf_counter() - begun
            answers = json.loads(sender.stdout.read())
            metrics = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
        finally:
            server.kill()
            server.wait()
    lag = re.findall(r'mmengine_event_loop_lag_seconds_bucket{le="([^"]*)"} (\d+)', metrics)
    return {
        "load_before": load_before,
        "image_bytes": [min(sizes), max(sizes)],
        "answers": {str(status): answers.count(status) for status in sorted(set(answers))},
        "seconds": took_s,
        "asked": len(times),
        "idle": shares(idle),
        "live": shares(times),
        "loop_lag_le": {bound: int(float(count)) for bound, count in lag},
    }


def shares(times: list[float]) -> dict[str, float]:
    p50, p99, most = np.quantile(times, [0.5, 0.99, 1.0]) * 1000
    return {"p50": round(float(p50), 2), "p99": round(float(p99), 2), "max": round(float(most), 2)}


if __name__ == "__main__":
    rest = [each for each in sys.argv[1:] if each != "--by-url"]
    for name, value in measured(rest, by_url="--by-url" in sys.argv).items():
        print(name, value)
