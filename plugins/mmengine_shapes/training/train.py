"""Trains the included checkpoint, on a single CPU core.

    OMP_NUM_THREADS=1 python -m mmengine_shapes.training.train WORK_FOLDER

Writes weights.pt and an exported checkpoint into the folder every few hundred steps. Computes in bf16 and
stores the weights in fp32. Muon optimizes the matrices, and AdamW all other weights. During training, an
auxiliary head predicts the properties of the shape whose centre is in a merged visual token.
"""

import argparse
import copy
import pathlib
import random
import time
from collections import defaultdict

import torch
from torch import nn
from torch.nn import functional as F
from transformers import Qwen3VLForConditionalGeneration

from mmengine_shapes import checkpoint_path
from mmengine_shapes.training.export import export, special_ids
from mmengine_shapes.training.forward import Forward
from mmengine_shapes.training.mixture import PHASES, Phase, Stage
from mmengine_shapes.training.model import make_model
from mmengine_shapes.training.packing import KINDS, Packer, Row, collate

SHORT, LONG = 208, 512  # Numbers of tokens in short and long packed rows.
TOKENS = 4160  # Number of tokens in a batch.
LONG_EVERY = 12
REPORT_EVERY, SAVE_EVERY = 50, 300
MUON_RATE, ADAM_RATE, WARM_UP = 3e-3, 2e-3, 40


def draw_batch(packer: Packer, stage: Stage, step: int) -> dict:
    """Return a batch with images of equal size. Every twelfth batch has long rows."""
    rng = packer.rng
    long = step % LONG_EVERY == LONG_EVERY - 1
    side = rng.choices(list(stage.sides), list(stage.sides.values()))[0]
    side = min(side, stage.long_side) if long else side
    patches, tokens = (side // 16) ** 2, (side // 32) ** 2
    length = LONG if long else SHORT
    if side > 128:
        length += 32 * round(tokens / 32)
    room = max(2, stage.patches // patches)
    rows: list[Row] = []
    for _ in range(TOKENS // length):
        draw = rng.random()
        if long:
            kind = "image" if draw < 0.4 else "text"
        elif draw < 0.12 and side <= stage.clip_side and room >= 4:
            kind = "clip"
        elif draw < 0.26 and side <= stage.pair_side and room >= 2:
            kind = "pair"
        else:
            kind = "text" if 0.26 <= draw < 0.36 or (room < 1 and rows) else "image"
        row = packer.row(kind, side, length, stage, long)
        room -= len(row.views)
        rows.append(row)
    if not any(row.views for row in rows):
        rows[0] = packer.row("image", side, length, stage, long)
    return collate(rows, length, packer.pad_id, side)


def schedule(step: int, total: int) -> float:
    """Return the factor for the learning rate: warm-up, then a cosine down to 2 %."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    angle = torch.pi * (step - WARM_UP) / max(1, total - WARM_UP)
    return 0.02 + 0.49 * (1 + float(torch.cos(torch.tensor(angle))))


class Trainer:
    """The fp32 weights, their optimisers, and a bf16 copy for the computation."""

    def __init__(self, model: Qwen3VLForConditionalGeneration, seed: int, rate: float) -> None:
        torch.manual_seed(seed)
        self.model = model
        self.probe = nn.Linear(model.lm_head.in_features, len(KINDS))
        self.fast = copy.deepcopy(model).bfloat16()
        self.fast_probe = copy.deepcopy(self.probe).to(torch.bfloat16)
        self.forward = Forward(self.fast)
        self.weights: list[torch.Tensor] = [*model.parameters(), *self.probe.parameters()]
        self.fast_weights: list[torch.Tensor] = [*self.fast.parameters(), *self.fast_probe.parameters()]
        matrices: list[nn.Parameter] = []
        others = list(self.probe.parameters())
        for name, weight in model.named_parameters():
            hidden = weight.ndim == 2 and "embed" not in name
            (matrices if hidden else others).append(weight)
        self.optimisers = [
            torch.optim.Muon(
                matrices,
                lr=MUON_RATE * rate,
                momentum=0.95,
                weight_decay=0.05,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(others, lr=ADAM_RATE * rate, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self.rates = [group["lr"] for optimiser in self.optimisers for group in optimiser.param_groups]

    def step(self, batch: dict, factor: float, probe_weight: float) -> dict[str, float]:
        """Run one update. Return the losses, and the accuracy on the target tokens."""
        logits, places, merged = self.forward.logits(batch)
        targets = batch["targets"].flatten()[places]
        weights = batch["weights"].flatten()[places]
        loss = (F.cross_entropy(logits, targets, reduction="none") * weights).sum() / weights.sum()
        flags = F.binary_cross_entropy_with_logits(self.fast_probe(merged).float(), batch["labels"])
        (loss + probe_weight * flags).backward()
        for weight, fast in zip(self.weights, self.fast_weights, strict=True):
            weight.grad = None if fast.grad is None else fast.grad.float()
            fast.grad = None
        nn.utils.clip_grad_norm_(self.weights, 1.0)
        for optimiser, rate in zip(self.optimisers, self.rates, strict=True):
            optimiser.param_groups[0]["lr"] = rate * factor
            optimiser.step()
        with torch.no_grad():
            torch._foreach_copy_(self.fast_weights, self.weights)
        right = (logits.argmax(-1) == targets).float().mean()
        return {"loss": loss.item(), "probe": flags.item(), "right": right.item()}


def train(folder: pathlib.Path, seed: int, start: pathlib.Path | None, first: int) -> None:
    """Run the phases from number `first` on. `start`: a file with the initial weights, or None."""
    model = make_model(special_ids(checkpoint_path()), seed)
    if start:
        model.load_state_dict(torch.load(start, weights_only=True)["model"])
    for number, phase in enumerate(PHASES[first:], first):
        print(f"phase {number}: {phase.steps} steps", flush=True)
        run_phase(folder, model, phase, seed + number)


def run_phase(folder: pathlib.Path, model: Qwen3VLForConditionalGeneration, phase: Phase, seed: int) -> None:
    """Run one phase. Every 50 steps, print the mean losses and the mean accuracy. Save every 300 steps."""
    trainer = Trainer(model, seed, phase.rate)
    packer = Packer(checkpoint_path(), random.Random(f"train {seed}"))
    step, began = 0, time.time()
    sums: defaultdict[str, float] = defaultdict(float)
    for stage in phase.stages:
        for _ in range(stage.steps):
            probe_weight = phase.probe * max(0.0, 1 - step / (0.7 * phase.schedule))
            batch = draw_batch(packer, stage, step)
            for name, value in trainer.step(batch, schedule(step, phase.schedule), probe_weight).items():
                sums[name] += value
            step += 1
            if step % REPORT_EVERY == 0:
                shown = " ".join(f"{name} {value / REPORT_EVERY:.4f}" for name, value in sums.items())
                print(f"{time.time() - began:6.0f} s  step {step}/{phase.steps}  {shown}", flush=True)
                sums.clear()
            if step % SAVE_EVERY == 0 or step == phase.steps:
                save(model, folder, step)


def save(model: Qwen3VLForConditionalGeneration, folder: pathlib.Path, step: int) -> None:
    """Write the training weights and an exported checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"model": model.state_dict(), "step": step}, folder / "weights.pt")
    target = folder / "checkpoint"
    target.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (target / name).write_bytes((checkpoint_path() / name).read_bytes())
    export(model, target)


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=pathlib.Path, help="weights.pt from which to continue")
    parser.add_argument("--first-phase", type=int, default=0, help="first phase to run, with --start")
    options = parser.parse_args()
    train(options.folder, options.seed, options.start, options.first_phase)


if __name__ == "__main__":
    main()
