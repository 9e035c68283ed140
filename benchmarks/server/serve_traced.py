"""Measure the cost of OpenTelemetry spans: 16 streams of a server with and without spans.

    python -m benchmarks serve_traced # into benchmarks/results/serve_traced.md, five minutes
    python -m benchmarks serve_traced --quick

The servers are measured alternately (sides.py). The collector discards all spans.
"""

import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.common.measure import THREAD_VARIABLES
from benchmarks.common.report import Part, Table, Target, machine_lines, markdown, show, target_table
from benchmarks.server.sides import STREAMS, compared

if TYPE_CHECKING:  # Imported late, after the number of threads is set.
    from benchmarks.server.processes import Running

TITLE = "Spans of OpenTelemetry, on a CPU"
SIDES = ("without spans", "with spans")
TOKENS, WANTED_LOSS = 40, 0.01
RESULTS = Path(__file__).parents[1] / "results" / "serve_traced.md"
COLLECTOR = """
import http.server
class Takes(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
    def log_message(self, *said):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Takes)
print(server.server_port, flush=True)
server.serve_forever()
"""


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds.")] = False,
    rounds: Annotated[int, typer.Option(help="Number of rounds.")] = 12,
    out: Annotated[Path | None, typer.Option(help="Markdown file for the tables.")] = None,
) -> None:
    """Measure on this machine, with one torch thread for each process."""
    for variable in THREAD_VARIABLES:
        os.environ[variable] = "1"
    collector = subprocess.Popen([sys.executable, "-c", COLLECTOR], stdout=subprocess.PIPE, text=True)
    assert collector.stdout is not None
    try:
        url = f"http://127.0.0.1:{int(collector.stdout.readline())}/v1/traces"
        found = _compared(url, 2 if quick else rounds)
    finally:
        collector.kill()
    tables, lines = [*found.tables, target_table(found.targets)], machine_lines(1)
    show(tables, lines)
    if out is not None or not quick:
        (out or RESULTS).write_text(markdown(TITLE, tables, lines), encoding="utf-8")


def _compared(url: str, rounds: int) -> Part:
    from benchmarks.common.half_billion_model import cached_folder
    from benchmarks.server.processes import serving

    model = cached_folder()
    with serving(model) as plain, serving(model, traces=url) as traced:
        return _rates(dict(zip(SIDES, (plain, traced), strict=True)), rounds)


def _rates(servers: "dict[str, Running]", rounds: int) -> Part:
    found = compared(servers, rounds, TOKENS)
    columns = ("", *SIDES, "lost or more", "±")
    table = Table(f"{STREAMS} streams of {TOKENS} tokens, 0.4 B, bfloat16", columns)
    table.rows = [found.rates_row("tokens a second"), found.costs_row("CPU us a token")]
    lost = Target("share of tokens lost, 0.4 B", median(found.lost()), WANTED_LOSS, most=True)
    return Part([table], [lost])


if __name__ == "__main__":
    typer.run(main)
