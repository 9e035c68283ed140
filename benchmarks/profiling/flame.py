"""Makes a flame graph of Python code: samples the stack, and writes a self-contained HTML file.

A timer signal requests a sample every half millisecond. Python handles a signal only after a running C call
has returned. Each sample is therefore weighted with the time since the previous sample, so a long C call
counts in full.
"""

import html
import json
import linecache
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

INTERVAL_S = 0.0005
SMALLEST = 1e-4  # Frames with less than this share of the time are omitted.
TEMPLATE = Path(__file__).with_name("flame.html")
Stack = tuple[tuple[CodeType, int], ...]  # (code, current line) of each frame, the outermost first.


class Sampler:
    """Samples the main thread. `spent`: nanoseconds, keyed by stack. A stack starts at the function
    `outermost`.

    Time outside `outermost` counts for the empty stack. Needs interval timers, which Windows does not have.
    """

    def __init__(self, outermost: Callable) -> None:
        self.spent: dict[Stack, int] = defaultdict(int)
        self._outermost = outermost.__code__
        self._last = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Sample while the block runs."""
        before = signal.signal(signal.SIGALRM, self._see)
        self._last = time.perf_counter_ns()
        signal.setitimer(signal.ITIMER_REAL, INTERVAL_S, INTERVAL_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _see(self, number: int, frame: FrameType | None) -> None:
        weight = time.perf_counter_ns() - self._last
        stack, is_inside = [], False
        while frame is not None and not is_inside:
            stack.append((frame.f_code, frame.f_lineno or frame.f_code.co_firstlineno))
            is_inside = frame.f_code is self._outermost
            frame = frame.f_back
        self.spent[tuple(reversed(stack)) if is_inside else ()] += weight
        self._last = time.perf_counter_ns()

    def tree(self, name: str) -> dict[str, Any]:
        """Return the samples as a tree of {"name", "ns", "inside": [...]}; the largest child comes first. A
        leaf is a source line.
        """
        root: dict[str, Any] = {"name": name, "ns": 0, "inside": {}}
        for stack, spent in self.spent.items():
            names = [_function(code) for code, _ in stack]
            if stack:
                names.append(_line(*stack[-1]))
            _add(root, names, spent)
        return _sorted(root, int(root["ns"] * SMALLEST))


def _add(node: dict[str, Any], names: list[str], spent: int) -> None:
    node["ns"] += spent
    for name in names:
        node = node["inside"].setdefault(name, {"name": name, "ns": 0, "inside": {}})
        node["ns"] += spent


def _sorted(node: dict[str, Any], least: int) -> dict[str, Any]:
    inside = [_sorted(each, least) for each in node["inside"].values() if each["ns"] >= least]
    return node | {"inside": sorted(inside, key=lambda each: -each["ns"])}


def _function(code: CodeType) -> str:
    path = Path(code.co_filename)
    return f"{code.co_qualname} ({path.parent.name}/{path.name})"


def _line(code: CodeType, number: int) -> str:
    text = linecache.getline(code.co_filename, number).strip()
    return f"{Path(code.co_filename).name}:{number}  {text}"


def write(path: Path, title: str, trees: list[dict[str, Any]]) -> None:
    """Write an HTML page that shows the flame graphs `trees`, one below another."""
    # "<" is escaped so that no name can end the script.
    data = json.dumps(trees, ensure_ascii=False).replace("<", "\\u003c")
    page = TEMPLATE.read_text(encoding="utf-8")
    page = page.replace("{{title}}", html.escape(title)).replace("{{trees}}", data)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
