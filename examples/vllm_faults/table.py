"""Records the six faults, finds each fault with `verify`, minimizes each log, and prints a table.

    build/vllm/bin/python -m examples.vllm_faults.table [FAULT ...] [--out FOLDER]

FOLDER gets each fault's log, the smallest log, and a pytest file that runs only vLLM's scheduler. The exit
code is 1 if `verify` misses a fault. The exit code is also 1 if a minimized log has more than 6 requests or
costs more than 60 seconds of CPU time. On a busy machine the search gets up to 8 times as much wall time.
"""

import argparse
import json
import sys
import tempfile
import time
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path

from vllm.version import __version__

from mmengine.cli.main import app
from mmengine.replay import verify

FAULTS = {
    "priority_victim": "PreemptsTheNewest",
    "draft_budget": "LeavesOutDrafts",
    "double_free": "FreesTwice",
    "lost_rows": "LosesRows",
    "encoder_reference": "KeepsReferences",
    "chunk_livelock": "",  # vLLM 0.33's own class
}
MOST_REQUESTS, MOST_SECONDS, SEARCH_SECONDS = 6, 60, 57
MOST_DELAY = 8
COLUMNS = ("fault", "named by", "step", "requests", "left", "candidates", "seconds", "CPU s")
FORMAT = "{:<19}{:<24}{:>5}{:>10}{:>6}{:>12}{:>9}{:>7}"


def minimized(fault, log, out, seconds):
    """Minimize a log, and return the JSON that `mmengine log minimize --json` prints."""
    name = f"examples.vllm_faults.{fault}:{FAULTS[fault]}" if FAULTS[fault] else "vllm"
    options = ["--with", name, "--seconds", str(seconds), "--json"]
    with redirect_stdout(StringIO()) as printed:
        app(["log", "minimize", str(log), "-o", str(out), *options], standalone_mode=False)
    return json.loads(printed.getvalue())


def row(fault, folder, seconds):
    """Record and minimize one fault. Returns the table's row, and whether the exit code may be 0."""
    sys.argv[1:] = [str(folder / fault)]
    begin, cpu_begin = time.monotonic(), time.process_time()
    with redirect_stdout(StringIO()):
        log = import_module(f"examples.vllm_faults.{fault}").record()
    found = verify(log, invariants=True).divergence
    if found is None:
        return FORMAT.format(fault, "nothing", *[""] * 6), False
    searched_from = time.process_time()
    delay = (time.monotonic() - begin) / (searched_from - cpu_begin)
    limit = round(seconds * min(max(1, delay), MOST_DELAY))
    small = minimized(fault, log, folder / f"{fault}_small", limit)
    cpu_s = round(time.process_time() - searched_from, 1)
    cells = [small.get(name, "") for name in ("requests_before", "requests", "candidates", "seconds")]
    is_good = 0 < small["requests"] <= MOST_REQUESTS and cpu_s <= MOST_SECONDS
    return FORMAT.format(fault, found.field, found.step, *cells, cpu_s), is_good


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=f"of {', '.join(FAULTS)}")
    parser.add_argument("--out", type=Path, default=Path(tempfile.mkdtemp()))
    parser.add_argument(
        "--seconds", type=int, default=SEARCH_SECONDS, help="limit for each search, on an idle machine"
    )
    args = parser.parse_args()
    print(f"vllm {__version__}, logs in {args.out}")
    print(FORMAT.format(*COLUMNS), flush=True)
    are_good = []
    for fault in args.faults or FAULTS:
        if fault == "chunk_livelock" and __version__.startswith("0.32"):
            print(FORMAT.format(fault, "not in this version", *[""] * 6), flush=True)
            continue
        text, is_good = row(fault, args.out, args.seconds)
        are_good.append(is_good)
        print(text, flush=True)
    sys.exit(not all(are_good))


if __name__ == "__main__":
    main()
