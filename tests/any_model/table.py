"""Writes docs/reference/models.md, with a row for each generative architecture in transformers.

    python -m tests.any_model.table [--only NAME ... [--checks COLUMN ...]] [--fresh] [--workers 2]

An architecture with a factory (catalogue.py) runs the plugin contract's checks on a tiny random checkpoint.
Other text architectures run with small sizes (shrunk.py). Other architectures with media are refused, or
remain unknown. Each row is computed in a separate process and stored in build/models/rows.jsonl. The next run
computes only missing and broken rows.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "models.md"
ROWS = ROOT / "build" / "models" / "rows.jsonl"
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path[:0] = [str(Path(__file__).parent / "torchvision_shim")]  # Before transformers is imported.
sys.path.append(str(ROOT / "build" / "torchvision"))

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers.models.auto.modeling_auto import (  # noqa: E402
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from mmengine.models.registry import load_plugins  # noqa: E402
from tests.any_model.catalogue import IMAGE, TEXT  # noqa: E402
from tests.any_model.models_page import write_page  # noqa: E402
from tests.any_model.row_workers import Task, run_rows  # noqa: E402
from tests.any_model.rows import (  # noqa: E402
    ALL_CHECKS,
    BROKEN,
    CHECKS,
    GOOD,
    UNKNOWN,
    VIDEO_CHECKS,
    Row,
    run_class,
    run_factory,
)


def classes() -> dict[str, str]:
    """Return the model type of each generating architecture."""
    found: dict[str, str] = {}
    for names in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        for kind, listed in names.items():
            for name in [listed] if isinstance(listed, str) else listed:
                found.setdefault(name, kind)
    return found


def tasks_of(
    factories: list[str], done: dict[str, Row], walk: bool, checks: Collection[str] = ALL_CHECKS
) -> Iterator[tuple[str, Task]]:
    """Yield (name, task) for each missing row. A class with a row from a factory gets a second row
    only if mmengine has a plugin for the class.
    """
    for kind in factories:
        if kind not in done:
            yield kind, partial(_as_dict, run_factory, kind, checks)
    ran = {row.architecture for row in done.values()}
    for name, kind in classes().items() if walk else ():
        if name not in done and (name not in ran or name in load_plugins()):
            yield name, partial(_as_dict, run_class, name, kind)


def _as_dict(compute, *given) -> dict[str, object]:
    return compute(*given)._asdict()


def read_rows() -> dict[str, Row]:
    """Return the finished rows for this version of transformers, without broken rows."""
    if not ROWS.exists():
        return {}
    lines = [json.loads(line) for line in ROWS.read_text().splitlines()]
    found = {line["name"]: Row(**line["row"]) for line in lines if line["of"] == transformers.__version__}
    return {name: row for name, row in found.items() if row.verdict != BROKEN}


def _store(name: str, row: dict[str, object]) -> None:
    with ROWS.open("a") as file:
        file.write(json.dumps({"of": transformers.__version__, "name": name, "row": row}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", help="Names of factories to run again; no page is written.")
    parser.add_argument(
        "--checks",
        nargs="*",
        choices=list(ALL_CHECKS),
        metavar="COLUMN",
        help="Columns to run, whose cells are printed; no row is stored. Needs --only.",
    )
    parser.add_argument("--fresh", action="store_true", help="Forget finished rows.")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="Number of processes.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    ROWS.parent.mkdir(parents=True, exist_ok=True)
    if options.fresh:
        ROWS.unlink(missing_ok=True)
    done = read_rows()
    started = time.monotonic()
    names = classes()
    if options.only is not None:
        steps = [tasks_of(options.only, {}, False, options.checks or ALL_CHECKS)]
    else:  # The factories run first, so that the walk omits their architectures.
        steps = [tasks_of([*IMAGE, *TEXT], done, walk=False), tasks_of([], done, walk=True)]
    for tasks in steps:
        for name, found in run_rows(tasks, options.workers):
            if isinstance(found, str):
                is_class = name in names
                found = Row(name, name, UNKNOWN if is_class else BROKEN, found, {})._asdict()
            row = done[name] = Row(**found)
            if not options.checks:
                _store(name, found)
            cells = {check: cell for check, cell in row.cells.items() if options.checks or cell not in GOOD}
            print(f"{row.verdict:12}{name} {row.reason} {cells or ''}".rstrip(), flush=True)
    print(f"{time.monotonic() - started:.0f} s with {options.workers} workers")
    if options.only is None:
        write_page(PAGE, list(done.values()), list(CHECKS), list(VIDEO_CHECKS), transformers.__version__)
    ran = done if options.only is None else options.only
    if any(done[name].verdict == BROKEN and name not in names for name in ran):
        sys.exit(1)


if __name__ == "__main__":
    main()
