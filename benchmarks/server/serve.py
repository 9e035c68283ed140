"""Compare the HTTP server with the engine alone and with `transformers serve`.

    python -m benchmarks serve --out benchmarks/results/serve.md # all parts, within ten minutes
    python -m benchmarks serve --quick --part front # one part, a few seconds
    python -m benchmarks serve --rival-python VENV/bin/python # needs transformers[serving], torchvision

The compared programs run in turn. Each server runs in its own process.
"""

import asyncio
import enum
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from benchmarks.common.measure import THREAD_VARIABLES
from benchmarks.common.report import Part, Table, Target, machine_lines, markdown, show, target_table

TITLE = "The HTTP server on a CPU"
WANTED_REQUEST, WANTED_FRAME = 400, 15  # Microseconds of CPU.
WANTED_FIRST_MS, WANTED_LOSS, WANTED_RATIO = 3.0, 0.1, 10.0
STREAMS, RIVAL_STREAMS, RIVAL_REQUESTS = 16, 64, 256


class Which(enum.StrEnum):
    FRONT = "front"  # The HTTP layer alone.
    FIRST = "first"  # Time to first token, compared with AsyncEngine.
    STREAMS = "streams"  # Tokens per second, compared with a batch.
    RIVAL = "rival"  # Throughput, compared with transformers serve.


def main(
    part: Annotated[list[Which] | None, typer.Option(help="Parts to run (default: all).")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds.")] = False,
    rival_python: Annotated[
        str, typer.Option(help="Python interpreter with transformers[serving].")
    ] = sys.executable,
    out: Annotated[Path | None, typer.Option(help="Markdown file for the tables.")] = None,
) -> None:
    """Measure the server on this machine, with one torch thread for each process."""
    for variable in THREAD_VARIABLES:
        os.environ[variable] = "1"
    found = Part()
    for each in part or list(Which):
        match each:
            case Which.FRONT:
                found.add(_front(quick))
            case Which.FIRST:
                found.add(_first(quick))
            case Which.STREAMS:
                found.add(_streams(quick))
            case Which.RIVAL:
                found.add(_rival(quick, rival_python))
    tables, lines = [*found.tables, target_table(found.targets)], machine_lines(1)
    show(tables, lines)
    if out is not None:
        out.write_text(markdown(TITLE, tables, lines), encoding="utf-8")


def _front(quick: bool) -> Part:
    """Measure the HTTP layer alone. Call this function first, before torch is imported."""
    from benchmarks.server.front import front_costs

    rounds = [front_costs(quick) for _ in range(2 if quick else 5)]
    best = {name: min(each[name] for each in rounds) for name in rounds[0]}
    table = Table("The HTTP layer alone, CPU microseconds", ("", "least", "median"))
    for name in best:
        table.rows.append((name, f"{best[name]:.1f}", f"{median(each[name] for each in rounds):.1f}"))
    table.notes.append(
        "A script replaces the engine. A request: JSON, template, tokenizing and a whole one-token answer. "
        "A frame: the cost of one more token in each of 64 streams, socket write included. Clients run in "
        "their own process and do not sleep on a socket."
    )
    return Part(
        [table],
        [
            Target("CPU us a request", best["request"], WANTED_REQUEST, most=True),
            Target("CPU us a frame", best["frame"], WANTED_FRAME, most=True),
        ],
    )


def _first(quick: bool) -> Part:
    from benchmarks.server.clients import Load, load
    from benchmarks.server.processes import ours
    from mmengine.serve.async_engine.async_engine import AsyncEngine

    rounds, requests = (3, 10) if quick else (8, 20)
    direct: list[float] = []
    over_http: list[float] = []

    async def ask(engine: AsyncEngine, number: int) -> float:
        begun = time.perf_counter()
        messages = Load(1, 1, 4, True).messages(number)
        async with engine.stream(messages, max_tokens=4, ignore_eos=True) as stream:
            async for output in stream:
                if output.token_ids:
                    found = time.perf_counter() - begun
                    break
            async for _ in stream:
                pass
        return found

    async def all_rounds(port: int) -> None:
        async with AsyncEngine(device="cpu") as engine:
            # Fill both prefix caches with the prompts' common prefix.
            for number in range(requests):
                await ask(engine, number)
            load(port, Load(requests, 1, 4, True))
            for place in range(1, rounds + 1):
                start = place * 1000
                answers = load(port, Load(requests, 1, 4, True, start=start))
                over_http.extend(each.first_at - each.sent_at for each in answers)
                for number in range(start, start + requests):
                    direct.append(await ask(engine, number))

    with ours(None) as port:
        asyncio.run(all_rounds(port))
    more = 1e3 * (median(over_http) - median(direct))
    table = Table("Time to first token, one stream, milliseconds", ("", "median"))
    table.rows = [
        ("AsyncEngine", f"{1e3 * median(direct):.2f}"),
        ("over HTTP", f"{1e3 * median(over_http):.2f}"),
    ]
    return Part(
        [table], [Target("ms to the first token, more than AsyncEngine", more, WANTED_FIRST_MS, most=True)]
    )


def _streams(quick: bool) -> Part:
    from benchmarks.common.half_billion_model import cached_folder

    part = Part([], [])
    for name, folder, tokens in (
        ("0.4 B, bfloat16", cached_folder(), 12 if quick else 40),
        ("embedded", None, 40 if quick else 100),
    ):
        batch, http = _rates(folder, tokens, 2 if quick else 4)
        loss = 1 - http / batch
        table = Table(f"{STREAMS} streams of {tokens} tokens, {name}: tokens a second", ("", "median"))
        table.rows = [("a batch in one process", f"{batch:.1f}"), ("over HTTP", f"{http:.1f}")]
        table.notes.append(f"Over HTTP {100 * loss:.1f} % less, clients on the same machine.")
        part.tables.append(table)
        if folder is not None:
            part.targets.append(Target("share lost over HTTP, 0.4 B", loss, WANTED_LOSS, most=True))
    return part


def _rates(folder: Path | None, tokens: int, rounds: int) -> tuple[float, float]:
    """Return the median tokens per second of a batch and over HTTP."""
    from benchmarks.server.clients import Load, load
    from benchmarks.server.processes import ours
    from mmengine.serve.engine.engine import Engine
    from mmengine.serve.prompt.prompt import Prompt

    batch, http = [], []
    with ours(folder) as port, Engine(folder, device="cpu") as engine:
        for place in range(rounds + 1):  # The first round is a warm-up.
            asked = Load(STREAMS, STREAMS, tokens, True, (("ignore_eos", True),), start=1000 * place)
            prompts = [Prompt(messages=asked.messages(asked.start + each)) for each in range(STREAMS)]
            begun = time.perf_counter()
            engine.generate(prompts, max_tokens=tokens, ignore_eos=True)
            middle = time.perf_counter()
            load(port, asked)
            if place:
                batch.append(STREAMS * tokens / (middle - begun))
                http.append(STREAMS * tokens / (time.perf_counter() - middle))
    return median(batch), median(http)


def _rival(quick: bool, python: str) -> Part:
    from benchmarks.server.clients import Load
    from benchmarks.server.processes import NoAnswer, ours, theirs, tokens_a_second
    from mmengine.models.loader import resolve_folder

    folder, tokens, rounds = resolve_folder(None), 32, 1 if quick else 3
    table = Table(
        f"{RIVAL_STREAMS} streams of at most {tokens} tokens, embedded checkpoint: tokens a second",
        ("", "median"),
    )
    rates: dict[str, list[float]] = {"mmengine serve": []}
    with ours(None) as port:
        for name, words in (
            ("transformers serve, continuous batching", ["--continuous-batching"]),
            ("transformers serve", []),
        ):
            try:
                with theirs(python, folder, words) as other:
                    for place in range(rounds + 1):
                        asked = Load(RIVAL_REQUESTS, RIVAL_STREAMS, tokens, True, start=1000 * place)
                        mine, said = tokens_a_second(port, asked)
                        his, heard = tokens_a_second(other, asked, str(folder))
                        if sum(one == two for one, two in zip(said, heard, strict=True)) < 0.9 * len(said):
                            raise NoAnswer("the answers differ from the model's")
                        if place:
                            rates["mmengine serve"].append(mine)
                            rates.setdefault(name, []).append(his)
            except NoAnswer as error:
                table.notes.append(f"{name}: {error}")
                continue
    best = max((median(each) for name, each in rates.items() if name != "mmengine serve"), default=0.0)
    table.rows = [(name, f"{median(each):.1f}") for name, each in rates.items() if each]
    table.notes.append(
        f"{RIVAL_REQUESTS} requests, each sent when another ends; in turns, with both servers running."
    )
    if not best:
        table.notes.append("No comparison: set --rival-python to a Python with transformers[serving].")
        return Part([table], [])
    ratio = median(rates["mmengine serve"]) / best
    return Part([table], [Target("times the tokens of transformers serve", ratio, WANTED_RATIO)])


if __name__ == "__main__":
    typer.run(main)
