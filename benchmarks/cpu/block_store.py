"""Compare the time to first token on a CPU with a prefix from a block store and with a computed prefix.

    python -m benchmarks block_store    # writes benchmarks/results/block_store_cpu.md, takes some minutes
    python -m benchmarks block_store --quick --out store.md    # half a minute; only tests that it runs

Three engines with the same weights (common/half_billion_model.py, bfloat16) take turns in one process. The
first has no store, the second fills the store, and the third fetches from the store. Each engine gets the
same 4,096 tokens followed by a question, and generates one token. The store's files are still in the page
cache. So the benchmark measures reading, checking and copying, but no disk access.
"""

import json
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from benchmarks.common.measure import use_threads
from benchmarks.common.report import Table, machine_lines, markdown, show

RESULTS = Path(__file__).parents[1] / "results" / "block_store_cpu.md"
TITLE = "A prefix from a block store, on a CPU"
PREFIX, QUESTION, BLOCK = 4096, 24, 16
MAX_LEN = 4352


def main(
    threads: Annotated[int, typer.Option(min=1, help="Threads for torch, and CPUs.")] = 2,
    rounds: Annotated[
        int, typer.Option(min=1, help="Number of prefixes, each computed and fetched once.")
    ] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="Use one prefix with 256 tokens.")] = False,
    out: Annotated[Path, typer.Option(help="Markdown file for the table.")] = RESULTS,
) -> None:
    """Measure the seconds to the first token with a computed and with a fetched prefix."""
    use_threads(threads)
    prefix, rounds = (256, 1) if quick else (PREFIX, rounds)
    with tempfile.TemporaryDirectory() as folder:
        table = measure(threads, rounds, prefix, Path(folder))
    lines = machine_lines(threads)
    show([table], lines)
    out.write_text(markdown(TITLE, [table], lines), encoding="utf-8")


def measure(threads: int, rounds: int, prefix: int, folder: Path) -> Table:
    import torch  # imported after the thread environment is set

    from benchmarks.common.half_billion_model import cached_folder

    torch.set_num_threads(threads)
    model, store = longer(cached_folder(), folder / "model"), folder / "store"
    plain = engine(model, threads)
    computed, kept, fetched, others = [], [], [], 0
    warm(plain)
    for number in range(rounds):
        computed.append(first_token(plain, prompt(prefix, number)))
        with engine(model, threads, store) as writer:
            warm(writer)
            kept.append(first_token(writer, prompt(prefix, number)))
        with engine(model, threads, store) as reader:
            warm(reader)
            before = reader.stats().num_fetched_blocks
            fetched.append(first_token(reader, prompt(prefix, number)))
            num_blocks = reader.stats().num_fetched_blocks - before
        assert num_blocks == (prefix + QUESTION) // BLOCK, f"{num_blocks} blocks were fetched"
        others += len({token for _, token in (computed[-1], kept[-1], fetched[-1])}) - 1
    plain.close()
    size = sum(path.stat().st_size for path in store.rglob("*") if path.is_file()) / rounds
    table = Table(
        f"A prefix of {prefix} tokens, {prefix // BLOCK} blocks, {size / 1e6:.0f} MB, {threads} threads",
        ["", "seconds to the first token", "of the time to compute it"],
    )
    base = median(seconds for seconds, _ in computed)
    for name, found in (
        ("computed, no store", computed),
        ("computed, and kept", kept),
        ("fetched", fetched),
    ):
        seconds = median(seconds for seconds, _ in found)
        table.rows.append([name, f"{seconds:.2f}", f"{seconds / base:.2f}"])
    table.notes.append(
        f"fetched: {size / 1e6 / median(s for s, _ in fetched):.0f} MB/s over the whole request"
    )
    table.notes.append(f"first tokens that differ: {others} of {2 * rounds}")
    return table


def longer(folder: Path, target: Path) -> Path:
    """Create a folder `target` with links to the model's files and a larger max_position_embeddings."""
    shutil.copytree(folder, target, copy_function=link)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 2 * MAX_LEN
    (target / "config.json").unlink()
    (target / "config.json").write_text(json.dumps(config))
    return target


def link(source: str, target: str) -> None:
    Path(target).symlink_to(source)


def engine(model: Path, threads: int, store: Path | None = None):
    from mmengine import Engine, EngineConfig

    kept = {"block_store": "folder", "block_store_path": str(store)} if store is not None else {}
    config = EngineConfig(
        max_model_len=MAX_LEN, max_num_seqs=4, num_blocks=400, spec="none", num_threads=threads, **kept
    )
    return Engine(model, dtype="bfloat16", config=config)


def prompt(count: int, number: int) -> list[int]:
    """Return prefix number `number`, with `count` tokens, followed by a question."""
    return [100 + (7919 * (place + 1) * (number + 1)) % 1400 for place in range(count + QUESTION)]


def warm(engine) -> None:
    first_token(engine, [99] * 40)


def first_token(engine, tokens: list[int]) -> tuple[float, int]:
    from mmengine.serve.prompt.prompt import Prompt

    begun = time.perf_counter()
    (answer,) = engine.generate([Prompt(token_ids=tokens)], max_tokens=1, temperature=0.0)
    return time.perf_counter() - begun, answer.token_ids[0]


if __name__ == "__main__":
    typer.run(main)
