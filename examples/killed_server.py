"""Kill a server while it answers, and check that every client gets its whole answer.

Starts `mmengine serve --log`, opens streams of the Responses API with OpenAI's client, kills the engine with
SIGKILL, and waits until the streams finish. A client needs only the five-line loop in `events_of` to
reconnect. Requires the package openai, version 3 or newer.

python examples/killed_server.py
python examples/killed_server.py --streams 50 --kills 2 --model Qwen/Qwen3-VL-2B-Instruct
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

try:
    import openai
except ModuleNotFoundError:
    raise SystemExit("the package openai is missing: run this with .venv/bin/python") from None

QUESTION = "Describe a picture of a red circle, a blue square and a green star, at length."
BROKEN = (openai.APIConnectionError, openai.InternalServerError)
MAX_TOKENS = 1000
ENDS = ("response.completed", "response.incomplete", "response.failed")
PATIENCE_S = 300.0  # for a server to load, and for all answers


def events_of(client: openai.OpenAI, name: str) -> Iterator[object]:
    """Yield all events of a response, and reconnect whenever the connection breaks."""
    last, after = None, -1
    while last is None or last.type not in ENDS:
        with suppress(*BROKEN):
            for last in client.responses.retrieve(name, stream=True, starting_after=after):
                yield last
                after = last.sequence_number


class Reader(threading.Thread):
    """A thread that reads one response to its end."""

    def __init__(self, client: openai.OpenAI, number: int, model: str):
        super().__init__(daemon=True)
        self._client, self.name = client, f"star-{number}"
        self._call = {"model": model, "input": f"{number}. {QUESTION}", "max_output_tokens": MAX_TOKENS}
        self.id = ""
        self.numbers: list[int] = []
        self.text = ""
        self.was_broken = False
        self.error: Exception | None = None

    def run(self) -> None:
        key = {"Idempotency-Key": self.name}  # a retry with this key returns the same response
        try:
            self.id = self._client.responses.create(**self._call, background=True, extra_headers=key).id
            for event in events_of(self._client, self.id):
                self.numbers.append(event.sequence_number)
                self.text += event.delta if event.type == "response.output_text.delta" else ""
        except Exception as error:  # reported at the end
            self.error = error

    def is_whole(self) -> bool:
        """Return whether each event arrived once and the events' text equals the stored response."""
        if self.error is not None:
            return False
        stored = self._client.responses.retrieve(self.id)
        is_numbered = self.numbers == list(range(len(self.numbers)))
        return (
            is_numbered and self.text == stored.output_text and stored.status in ("completed", "incomplete")
        )


def engine_of(supervisor: subprocess.Popen) -> int:
    """Return the process id of the engine, which is the supervisor's child; 0 while no engine runs."""
    found = subprocess.run(["pgrep", "-P", str(supervisor.pid)], capture_output=True, text=True, check=False)
    return int(found.stdout.split()[0]) if found.stdout.split() else 0


def await_server(server: subprocess.Popen, port: int, output: Path) -> None:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=PATIENCE_S):
                return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"the server did not start:\n{output.read_text().strip()[-2000:]}")


def watch(server: subprocess.Popen, readers: list[Reader], kills: int) -> None:
    """Wait until all streams end. Kill the engine whenever they have received 20 more events on average, at
    most `kills` times.
    """
    end, share, killed = time.monotonic() + PATIENCE_S, 20 * len(readers), 0
    due = share
    while any(reader.is_alive() for reader in readers):
        count = sum(len(reader.numbers) for reader in readers)
        if kills and count >= due and (engine := engine_of(server)) not in (0, killed):
            open_ones = [reader for reader in readers if reader.is_alive()]
            os.kill(engine, signal.SIGKILL)
            print(f"kill -9 {engine}: {len(open_ones)} streams open, {count} events received", flush=True)
            for reader in open_ones:
                reader.was_broken = True
            kills, killed, due = kills - 1, engine, count + share
        if server.poll() is not None or time.monotonic() > end:
            raise SystemExit("the server has ended, or the answers took too long")
        time.sleep(0.01)


def run(options: argparse.Namespace, folder: Path) -> bool:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    model = ["--model", options.model] if options.model else []
    command = [str(Path(sys.executable).with_name("mmengine")), "serve", *model, "--log", str(folder / "log")]
    output = folder / "server.txt"
    with output.open("w") as file:
        server = subprocess.Popen(
            [*command, "--port", str(port), "--no-request-log"],
            stdout=file,
            stderr=file,
        )
    try:
        await_server(server, port, output)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        (model, *_) = client.models.list()
        readers = [Reader(client, number, model.id) for number in range(options.streams)]
        begun = time.monotonic()
        for reader in readers:
            reader.start()
        print(f"{len(readers)} responses are streaming from port {port}", flush=True)
        watch(server, readers, options.kills)
        return report(readers, time.monotonic() - begun)
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def report(readers: list[Reader], seconds: float) -> bool:
    """Print the outcome and return whether all answers are complete."""
    for reader in readers:
        if reader.error is not None:
            print(f"{reader.name}: {reader.error}")
    whole = sum(reader.is_whole() for reader in readers)
    broken = sum(reader.was_broken for reader in readers)
    events = sum(len(reader.numbers) for reader in readers)
    print(f"{broken} streams broke and continued; {whole} of {len(readers)} answers are complete")
    print(f"{events} events in {seconds:.1f} s; the first answer: {readers[0].text[:60]!r} …")
    return whole == len(readers)


def main() -> int:
    about, _, usage = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--streams", type=int, default=20, help="Number of concurrent responses (default %(default)s)."
    )
    parser.add_argument("--kills", type=int, default=1, help="Number of kills (default %(default)s).")
    parser.add_argument("--model", help="Model id or folder (default: the included checkpoint).")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        try:
            return 0 if run(options, Path(folder)) else 1
        except KeyboardInterrupt:
            print("stopped the script and the server", file=sys.stderr)
            return 130


if __name__ == "__main__":
    sys.exit(main())
