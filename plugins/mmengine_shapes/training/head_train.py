"""Trains the draft head of the included checkpoint, on a single CPU core.

    OMP_NUM_THREADS=1 python -m mmengine_shapes.training.head_train WORK_FOLDER

Uses training-time test (arXiv 2503.01840): from every position in an answer, the head drafts four tokens.
Each draft reads the previous draft's hidden state, and is trained on the target's distribution. Every 500
steps, the script saves head.pt and prints the tokens per pass on held-out items.
"""

import argparse
import pathlib
import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmengine.config import EngineConfig
from mmengine.serve.engine.engine import Engine
from mmengine_shapes import checkpoint_path
from mmengine_shapes.training.head_batch import batches
from mmengine_shapes.training.head_data import Conversation, Sample, draw_items, regenerate
from mmengine_shapes.training.head_model import DraftHead, HeadBatch, HeadShape
from mmengine_shapes.training.head_simulate import acceptance, held_out_samples
from mmengine_shapes.training.head_start import start_head
from mmengine_shapes.training.head_target import Target

UNROLLED, STEP_DECAY = 4, 0.8
CONVERSATIONS, BATCH, STEPS = 20480, 48, 3000
RATE, LAST_RATE, WARM_UP, CLIP = 3e-3, 0.01, 0.02, 1.0
REPORT_EVERY, SAVE_EVERY = 100, 500


def collect(target: Target, number: int, seed: int) -> list[Sample]:
    """Return `number` conversations with the target's hidden states that the head reads (70 KB per
    conversation).
    """
    samples: list[Sample] = []
    config = EngineConfig(max_num_seqs=64, token_budget=4096, num_threads=1)
    with Engine(checkpoint_path(), config=config) as engine:
        pool: list[Conversation] = []
        for conversation in regenerate(engine, draw_items(number, seed), seed):
            pool.append(conversation)
            if len(pool) == 512:
                samples += aux_rows(target, pool)
                pool.clear()
        samples += aux_rows(target, pool)
    return samples


def kept_samples(path: pathlib.Path | None, target: Target, number: int, seed: int) -> list[Sample]:
    """Return the samples in the file `path`. Without a file, collect the samples and, if `path` is not None,
    write the file (1.4 GB).
    """
    if path is not None and path.exists():
        return [Sample(*fields) for fields in torch.load(path, weights_only=True)]
    samples = collect(target, number, seed)
    if path is not None:
        torch.save(
            [(one.task, one.ids, one.num_prompt, one.positions, one.aux_hidden_states) for one in samples],
            path,
        )
    return samples


def aux_rows(target: Target, conversations: list[Conversation], size: int = 32) -> list[Sample]:
    """Run the conversations through the target, in batches of similar lengths."""
    ordered = sorted(conversations, key=lambda one: len(one.token_ids))
    parts = [ordered[k : k + size] for k in range(0, len(ordered), size)]
    return [sample for part in parts for sample in target.samples(part)]


def draft_vocabulary(samples: Sequence[Sample], vocab_size: int, size: int) -> Tensor:
    """Return the ids of the `size` most frequent tokens in answers, ascending, int64 [size]."""
    counts = Counter(token for sample in samples for token in sample.ids[sample.num_prompt :].tolist())
    order = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(order[:size]))


class Teacher:
    """Computes the target's distribution for the next token, over the draft vocabulary."""

    def __init__(self, target: Target, vocabulary: Tensor) -> None:
        self._target, self._vocabulary = target, vocabulary

    @torch.no_grad()
    def probabilities(self, batch: HeadBatch, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next-token probabilities at the positions `places` [B, R] in B conversations, float32
        [B, R, draft_vocab]. Also return whether the draft vocabulary contains the likeliest token (bool
        [B, R]).
        """
        last = batch.aux_hidden_states[:, :, -1].gather(
            1, places[..., None].expand(-1, -1, batch.aux_hidden_states.shape[-1])
        )
        logits = self._target.logits(last)
        inside = logits[..., self._vocabulary]
        return inside.softmax(-1), inside.max(-1).values >= logits.max(-1).values


def loss_of(head: DraftHead, teacher: Teacher, batch: HeadBatch) -> tuple[Tensor, list[Tensor]]:
    """Return the weighted soft cross-entropy, and each drafting step's accuracy."""
    last = batch.lengths[:, None] - 2  # The last position that has a next token.
    num_rows = batch.rows.shape[1]
    # Drafting step k predicts k tokens further ahead than step 0. This range covers all steps' targets.
    places = batch.rows[:, :1] + 1 + torch.arange(num_rows + UNROLLED - 1)
    wanted, inside = teacher.probabilities(batch, places.clamp(max=last))
    asked = inside & (places <= last)

    def token_of(k: int, _: Tensor | None) -> Tensor:
        return batch.ids.gather(1, (batch.rows + 1 + k).clamp(max=last + 1))

    total, right = torch.zeros(()), []
    for k, logits in enumerate(head.unroll(batch, UNROLLED, token_of)):
        here = slice(k, k + num_rows)
        mask = (batch.valid & asked[:, here]).float()
        losses = -(wanted[:, here] * F.log_softmax(logits, -1)).sum(-1)
        total = total + STEP_DECAY**k * (losses * mask).sum() / mask.sum().clamp(min=1)
        same = (logits.argmax(-1) == wanted[:, here].argmax(-1)).float()
        right.append((same * mask).sum() / mask.sum().clamp(min=1))
    return total, right


def rate_at(step: int, steps: int) -> float:
    """Return the factor for the learning rate: warm-up, then a cosine down to LAST_RATE."""
    warm = WARM_UP * steps
    if step < warm:
        return (step + 1) / warm
    angle = torch.tensor(torch.pi * (step - warm) / max(1.0, steps - warm))
    return LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + float(angle.cos()))


def train(
    head: DraftHead,
    teacher: Teacher,
    samples: Sequence[Sample],
    held_out: Sequence[Sample],
    vocabulary: Tensor,
    options: argparse.Namespace,
) -> None:
    """Train with AdamW over `options.steps` batches. Prints means, saves and evaluates at intervals."""
    matrices = [weight for weight in head.parameters() if weight.ndim == 2]
    norms = [weight for weight in head.parameters() if weight.ndim == 1]
    optimiser = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.01}, {"params": norms, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    source, began = batches(samples, BATCH, options.seed), time.time()
    sums: defaultdict[str, float] = defaultdict(float)
    for step in range(1, options.steps + 1):
        for group in optimiser.param_groups:
            group["lr"] = options.rate * rate_at(step - 1, options.steps)
        loss, right = loss_of(head, teacher, next(source))
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), CLIP)
        optimiser.step()
        sums["loss"] += loss.item()
        for k, part in enumerate(right):
            sums[f"right{k + 1}"] += part.item()
        if step % REPORT_EVERY == 0:
            shown = " ".join(f"{name} {value / REPORT_EVERY:.4f}" for name, value in sums.items())
            print(f"{time.time() - began:6.0f} s  step {step}/{options.steps}  {shown}", flush=True)
            sums.clear()
        if step % SAVE_EVERY == 0 or step == options.steps:
            save(head, vocabulary, options.folder / "head.pt")
            print("        held out, K=4: " + describe(head, vocabulary, held_out), flush=True)


def describe(head: DraftHead, vocabulary: Tensor, held_out: Sequence[Sample]) -> str:
    """Return a text with the tokens per pass for each task."""
    tasks = dict.fromkeys(sample.task for sample in held_out)
    parts = ((task, [sample for sample in held_out if sample.task == task]) for task in tasks)
    return "  ".join(f"{task} {acceptance(head, vocabulary, part, 4):.2f}" for task, part in parts)


def save(head: DraftHead, vocabulary: Tensor, path: pathlib.Path) -> None:
    """Save the weights, shape and draft vocabulary, for `head_export`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = {name: getattr(head.shape, name) for name in HeadShape.__dataclass_fields__}
    torch.save({"head": head.state_dict(), "shape": shape, "vocabulary": vocabulary}, path)


def main() -> None:
    """Parse the command line, make the data, and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=pathlib.Path, help="data file; written if missing")
    parser.add_argument("--conversations", type=int, default=CONVERSATIONS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--levels", type=int, nargs="+", default=[2, 4, 5], help="tapped layers, ascending")
    parser.add_argument("--draft-vocab-size", type=int, default=512)
    parser.add_argument("--intermediate-size", type=int, default=384)
    parser.add_argument("--plain", action="store_true", help="EAGLE-3 without the switches of 3.1")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    random.seed(options.seed)
    target = Target(checkpoint_path(), options.levels)
    samples = kept_samples(options.samples, target, options.conversations, options.seed)
    vocabulary = draft_vocabulary(samples, target.config.text.vocab_size, options.draft_vocab_size)
    shape = HeadShape(
        tuple(options.levels),
        options.draft_vocab_size,
        options.intermediate_size,
        fc_norm=not options.plain,
        norm_output=not options.plain,
    )
    head = start_head(target, shape, vocabulary)
    held_out = held_out_samples(target, ("json", "describe", "where", "story"), 50, options.seed)
    train(head, Teacher(target, vocabulary), samples, held_out, vocabulary, options)


if __name__ == "__main__":
    main()
