"""Walks all generating architectures of the installed transformers, and writes docs/reference/models.md.

    python -m tests.any_model.table [--only NAME ...] [--rows FILE]

An architecture with a factory (catalogue.py) runs as a tiny random checkpoint: its greedy tokens in float32
are compared with transformers' generate under each setting. Of the others, the fallback plugin's own checks
say whether they are refused, and why. `--rows` names a file in which finished rows are kept between runs.
"""

import argparse
import json
import sys
import tempfile
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "models.md"
sys.path[:0] = [str(Path(__file__).parent / "torchvision_shim")]  # Before transformers is imported.
sys.path.append(str(ROOT / "build" / "torchvision"))

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402
from transformers.models.auto.modeling_auto import (  # noqa: E402
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from mmengine.config import EngineConfig  # noqa: E402
from mmengine.errors import MMEngineError  # noqa: E402
from mmengine.models.registry import load_plugins  # noqa: E402
from mmengine.replay import verify  # noqa: E402
from mmengine.serve.engine.engine import Engine  # noqa: E402
from mmengine.testing.contract import SETTINGS  # noqa: E402
from mmengine_transformers.classes import why_not  # noqa: E402
from tests.any_model.catalogue import IMAGE, TEXT  # noqa: E402
from tests.any_model.hosted_contract import contract_of  # noqa: E402
from tests.any_model.models_page import Row, write_page  # noqa: E402

NUM_NEW = 12
CHECKS = ("beside others", "in chunks", "from the cache", "drafted")
SIZES = {
    "num_blocks": 1025,
    "max_model_len": 1024,
    "spec": "none",
    "num_threads": 1,
    "model_impl": "transformers",
}


def run_factory(kind: str) -> Row:
    """Return the row of an architecture with a factory."""
    suite = contract_of(kind)()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        reference = suite.make_checkpoint(folder)
        name = json.loads((folder / "config.json").read_text())["architectures"][0]
        wanted = []
        for chat in suite.chats:
            inputs = suite.inputs(folder, chat)
            options = {"max_new_tokens": NUM_NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            out = reference.generate(**inputs, **options)
            wanted.append(out[0, inputs["input_ids"].shape[1] :].tolist())
        cells = {check: _cell(folder, check, suite.chats, wanted, Path(place)) for check in CHECKS}
    good = all(cell in ("equal", "refused") for cell in cells.values())
    return Row(name, kind, "works" if good else "broken", "", cells)


def _cell(folder: Path, check: str, chats, wanted: list[list[int]], place: Path) -> str:
    """Return "equal" if all tokens are transformers' and the log verifies, or what happened instead."""
    log = place / check.replace(" ", "_")
    config = EngineConfig.from_dict({**SIZES, **SETTINGS[check]})
    try:
        with Engine(folder, device="cpu", dtype="float32", config=config, log=log) as engine:
            answers = engine.generate(chats, max_tokens=NUM_NEW, ignore_eos=True)
    except MMEngineError as error:
        return "refused" if "token_budget" in error.text else f"fails: {error.text[:120]}"
    if [answer.token_ids for answer in answers] != wanted:
        return "differs"
    return "equal" if verify(log).ok else "log differs"


def run_class(name: str, kind: str) -> Row:
    """Return the row of an architecture without a factory: refused with the reason, or not run."""
    if name in load_plugins():
        return Row(name, kind, "described", "", {})
    found = getattr(transformers, name, None)
    if found is None:
        return Row(name, kind, "refused", "this transformers has no such class", {})
    try:
        reason = why_not(found, CONFIG_MAPPING[kind]())
    except Exception as error:  # A default config may be incomplete.
        return Row(name, kind, "refused", f"no default config: {type(error).__name__}", {})
    return Row(name, kind, "refused" if reason else "not run", reason, {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=[*IMAGE, *TEXT], help="Names of factories to run.")
    parser.add_argument("--rows", type=Path, help="File that keeps finished rows.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    kept = options.rows
    done = json.loads(kept.read_text()) if kept is not None and kept.exists() else {}
    for kind in options.only:
        if kind in done:
            continue
        try:
            row = run_factory(kind)
        except Exception as error:  # The table tells what broke.
            traceback.print_exc()
            row = Row(kind, kind, "broken", f"{type(error).__name__}: {str(error)[:160]}", {})
        done[kind] = row._asdict()
        print(f"{row.verdict:10} {row.architecture} {row.cells or row.reason}", flush=True)
        if kept is not None:
            kept.write_text(json.dumps(done))
    rows = [Row(**row) for row in done.values()]
    ran = {row.architecture for row in rows}
    for names in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        for kind, found in names.items():
            for name in [found] if isinstance(found, str) else found:
                if name not in ran:
                    ran.add(name)
                    rows.append(run_class(name, kind))
                    print(f"{rows[-1].verdict:10} {name} {rows[-1].reason}", flush=True)
    write_page(PAGE, rows, CHECKS, transformers.__version__)


if __name__ == "__main__":
    main()
