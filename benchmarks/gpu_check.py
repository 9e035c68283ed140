"""Called by gpu.sh: is the torch backend right on CUDA, and how fast is it. Not yet run on a GPU."""

import argparse
import json
import platform
import re
import sys
from datetime import date
from pathlib import Path

import torch
from gpu_shapes import SHAPE_2B, random_model, reduced
from gpu_speed import Sizes, speeds
from report import Table, show
from workload import Ask, mixed

from mmengine.errors import MMEngineError
from mmengine.models.loader import resolve_folder
from mmengine.request import SamplingParams
from mmengine.serve.engine import Engine
from mmengine.serve.prompts import Options
from mmengine.version import __version__
from mmengine_qwen3_vl import plugin

RESULTS = Path(__file__).resolve().parent / "results"
# How far apart the two best logprobs on the CPU may be where another device parts from it.
ROUNDING = {"float32": 1e-3, "bfloat16": 0.5}
SMALL = Sizes(rows=(1, 16, 64), prompt=256, prefills=64, steps=64, grid=(1, 16, 16))
LARGE = Sizes(rows=(1, 16, 64), prompt=1024, prefills=16, steps=64, grid=(1, 64, 64))
DRY = Sizes(rows=(1, 2), prompt=24, prefills=2, steps=4, grid=(1, 4, 4))
Answer = tuple[list[int], list[float]]


def main() -> int:
    parser = argparse.ArgumentParser(description="Check and measure --device cuda with the torch backend.")
    parser.add_argument("--dry-run", action="store_true", help="everything on the CPU, few and small")
    parser.add_argument("--requests", type=int, default=60, help="compared with the CPU's tokens")
    parser.add_argument("--out", type=Path, help="where the JSON goes; results/gpu_<device>.json beside this")
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        print("torch sees no GPU here: run this where it does, or with --dry-run", file=sys.stderr)
        return 1
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        return run(options)
    except MMEngineError as error:
        print(error, file=sys.stderr)
        return 1


def run(options: argparse.Namespace) -> int:
    dry = options.dry_run
    device = "cpu" if dry else "cuda"
    name = "cpu (dry run)" if dry else torch.cuda.get_device_name()
    requests = min(options.requests, 4) if dry else options.requests
    print(f"plan: {requests} requests on the CPU and on {name}, then in bfloat16; speeds of the embedded")
    print(f"checkpoint and of {'a reduced' if dry else 'a'} Qwen3-VL-2B shape; TF32 is off")
    compared = compare(device, requests)
    measured = measure(device, dry)
    facts = {
        "device": name,
        "date": str(date.today()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "mmengine": __version__,
        "backend": "torch",
        "compared": compared,
        "speeds": measured,
    }
    show(tables(facts), [])
    if dry and options.out is None:
        print("dry run: nothing is written; not yet run on a GPU")
    else:
        out = options.out or RESULTS / f"gpu_{re.sub(r'[^a-z0-9]+', '_', name.lower()).strip('_')}.json"
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        print(f"written: {out}")
    return 0 if all(one["within_rounding"] for one in compared.values()) else 1


def compare(device: str, count: int) -> dict[str, dict[str, object]]:
    """Tokens of the embedded checkpoint on `device` beside the CPU's in float32, by dtype."""
    asks, wanted = None, None
    found = {}
    for where, dtype in (("cpu", "float32"), (device, "float32"), (device, "bfloat16")):
        with Engine(device=where, dtype=dtype) as engine:
            if asks is None:
                asks = mixed(engine.processor, count, 48)
                wanted = answers(engine, asks)
                continue
            partings = compare_answers(wanted, answers(engine, asks))
        gaps = [parting["gap"] for parting in partings]
        found[dtype] = {
            "requests": count,
            "equal": count - len(partings),
            "largest_gap": max(gaps, default=0.0),
            "within_rounding": all(gap <= ROUNDING[dtype] for gap in gaps),
            "partings": partings,
        }
    return found


def answers(engine: Engine, asks: list[Ask]) -> list[Answer]:
    """Tokens to the natural end, and at each the distance of the two best logprobs."""
    names = {}
    for place, ask in enumerate(asks):
        sampling = SamplingParams(max_tokens=ask.num_new, logprobs=2, seed=0)
        names[engine.submit_prepared(ask.prepared, Options(sampling), stream=False)] = place
    done: dict[int, Answer] = {}
    while engine.has_work:
        for output in engine.step():
            if output.completion is not None:
                choice = output.completion.choices[0]
                gaps = [best[1] - second[1] for _, best, second in choice.logprobs]
                done[names[output.request_id]] = choice.token_ids, gaps
    return [done[place] for place in range(len(asks))]


def compare_answers(wanted: list[Answer], got: list[Answer]) -> list[dict[str, float | int]]:
    """Where answers part: request, token, and the distance of the two best logprobs on the CPU."""
    partings = []
    for request, ((want, gaps), (mine, _)) in enumerate(zip(wanted, got, strict=True)):
        if want != mine:
            shorter = min(len(want), len(mine))
            place = next((i for i in range(shorter) if want[i] != mine[i]), shorter - 1)
            partings.append({"request": request, "token": place, "gap": round(gaps[place], 6)})
    return partings


def measure(device: str, dry: bool) -> list[dict[str, object]]:
    """Speeds by model and dtype."""
    rows = []
    for name in ("float32", "bfloat16"):
        network = plugin.load_model(resolve_folder(None), device=device, dtype=name)
        figures = speeds(network, device, getattr(torch, name), DRY if dry else SMALL)
        rows.append({"model": "embedded checkpoint", "dtype": name, **figures})
    shape = reduced(SHAPE_2B) if dry else SHAPE_2B
    network = random_model(shape, device, torch.bfloat16)
    figures = speeds(network, device, torch.bfloat16, DRY if dry else LARGE)
    label = "Qwen3-VL-2B shape, reduced" if dry else "Qwen3-VL-2B shape, random weights"
    rows.append({"model": label, "dtype": "bfloat16", **figures})
    return rows


def tables(facts: dict) -> list[Table]:
    equal = Table("Tokens beside the CPU's in float32", ("dtype", "equal", "largest gap", "within rounding"))
    for dtype, one in facts["compared"].items():
        verdict = "yes" if one["within_rounding"] else "NO"
        equal.rows.append(
            (dtype, f"{one['equal']} of {one['requests']}", f"{one['largest_gap']:.1e}", verdict)
        )
    equal.notes.append("gap: distance of the CPU's two best logprobs where an answer parts from the CPU's")
    batches = list(facts["speeds"][0]["decode"])
    decodes = (f"decode x{rows} ms, tokens/s" for rows in batches)
    fast = Table(f"Speeds on {facts['device']}", ("model", "dtype", "prefill tokens/s", *decodes, "image ms"))
    for one in facts["speeds"]:
        cells = [f"{each['step_ms']:.2f}, {each['tokens_per_s']:.0f}" for each in one["decode"].values()]
        image = f"{one['image_ms']:.2f}"
        fast.rows.append((one["model"], one["dtype"], str(one["prefill_tokens_per_s"]), *cells, image))
    return [equal, fast]


if __name__ == "__main__":
    sys.exit(main())
