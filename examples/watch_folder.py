"""Watch a folder into which a camera writes images, and answer questions about the last minute.

    python examples/watch_folder.py pictures                       # reads questions line by line
    python examples/watch_folder.py pictures --ask "What moves?"   # answers one question and exits

Images are read in the order of their names, with their modification times. The session computes each image on
arrival, so an answer starts at once. The encoder reads images in pairs, so the last image may wait for the
next image or for a question. When the session becomes too long, images older than --seconds are dropped.
"""

import argparse
import queue
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from mmengine import Engine

KINDS = {".jpg", ".jpeg", ".png", ".webp"}
SYSTEM = "You watch a camera. Answer in one sentence."
PAUSE_S = 0.2  # between two scans of the folder
ANSWER = 64  # tokens


class Watch:
    """A folder and its session. The session keeps the images from the last `seconds` seconds. `every`:
    expected seconds between two images.
    """

    def __init__(self, engine: Engine, folder: Path, seconds: float, every: float):
        self._folder, self._seen = folder, set[Path]()
        self._begun = self._last = (
            0.0  # the first image's modification time, and the seconds from the first to the last image
        )
        self._session = engine.session(system=SYSTEM, **self._lengths(engine, seconds / every))

    def _lengths(self, engine: Engine, num_frames: float) -> dict[str, int]:
        """Return the session's settings `length` and `keep` (tokens). A session that reaches `length` tokens
        keeps only the newest `keep` tokens (half as many).
        """
        first = next(iter(self._pictures()), None)
        if first is None:
            return {}
        with engine.session() as one:
            one.frame(first, 0.0)
            before = one.append("-").num_tokens
            one.frame(first, 1.0)
            each = one.append("-").num_tokens - before
        keep = int(each * (num_frames + 2) / getattr(engine.processor, "frames_in_patch", 1)) + ANSWER
        return {"keep": keep, "length": length} if (length := 2 * keep) < engine.config.max_model_len else {}

    def _pictures(self) -> list[Path]:
        return sorted(path for path in self._folder.iterdir() if path.suffix.lower() in KINDS)

    def look(self) -> int:
        """Append new images and return their number."""
        before = len(self._seen)
        for path in [path for path in self._pictures() if path not in self._seen]:
            try:
                with Image.open(path) as image:
                    picture = image.convert("RGB")
            except OSError:
                break  # the camera is still writing this file: the next scan reads it
            written = path.stat().st_mtime
            self._begun = self._begun or written
            self._last = max(self._last, written - self._begun)
            self._session.frame(picture, self._last)
            self._seen.add(path)
        return len(self._seen) - before

    def ask(self, question: str) -> tuple[str, float]:
        """Return the answer and its duration in seconds."""
        begun = time.monotonic()
        answer = self._session.ask(question, max_tokens=ANSWER)
        return answer.text.strip(), time.monotonic() - begun


def lines_of(stdin: Iterator[str]) -> "queue.SimpleQueue[str | None]":
    """Return a queue with the lines of `stdin`, then None."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        for line in stdin:
            lines.put(line.strip())
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="Answer questions about the last minute of a camera.")
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--model", default=None, help="Model folder or hub id (default: the included checkpoint)."
    )
    parser.add_argument("--ask", action="append", help="Question; may be repeated.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=1.0, help="Seconds between two images (default 1).")
    options = parser.parse_args()
    with Engine(options.model) as engine:
        watch = Watch(engine, options.folder, options.seconds, options.every)
        print(f"{watch.look()} images found", flush=True)
        for question in options.ask or ():
            answer, seconds = watch.ask(question)
            print(f"{answer}  ({seconds:.2f} s)", flush=True)
        if options.ask:
            return
        lines = lines_of(sys.stdin)
        while True:
            watch.look()
            try:
                question = lines.get(timeout=PAUSE_S)
            except queue.Empty:
                continue
            if question is None:
                return
            answer, seconds = watch.ask(question)
            print(f"{answer}  ({seconds:.2f} s)", flush=True)


if __name__ == "__main__":
    main()
