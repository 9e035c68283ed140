"""Runs transformers' `generate` for a comparison, with the same weights, token ids and pixels.

By default `generate` uses SDPA and a growing KV cache. Some benchmarks also use a static cache, with and
without torch.compile.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F
from transformers import AutoModelForImageTextToText
from transformers.utils import logging

from benchmarks.common.measure import Sample
from benchmarks.common.workload import Ask
from mmengine.models.plugin import Prepared

PAD = 0  # Padding tokens are masked, so any id works.
MEDIA = (
    ("image", "pixel_values", "image_grid_thw", 1),
    ("video", "pixel_values_videos", "video_grid_thw", 2),
)
Inputs = dict[str, torch.Tensor]


class TokenClock:
    """A stopping criterion that records each token's time and never stops.

    `between`: a function that is called after the first token and then after every `burst` tokens. The time
    in `between` is not counted. If `between` runs mmengine, transformers and mmengine alternate within a
    single `generate`.
    """

    def __init__(self, between: Callable[[], None] | None = None, burst: int = 1) -> None:
        self.samples: list[Sample] = []
        self.first_token = 0.0  # By time.perf_counter().
        self._between, self._burst, self._count = between, burst, 0
        self._begin = (0.0, 0.0)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        wall, cpu = time.perf_counter(), time.process_time()
        if self._count:
            self.samples.append(Sample(wall - self._begin[0], cpu - self._begin[1]))
        else:
            self.first_token = wall
        if self._between is not None and self._count % self._burst == 0:
            self._between()
        self._count += 1
        self._begin = (time.perf_counter(), time.process_time())
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Reference:
    """transformers' model. Every answer has exactly the requested number of tokens."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        logging.disable_progress_bar()
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).to(device).eval()

    @classmethod
    def around(cls, model: torch.nn.Module) -> "Reference":
        """Return a Reference for a loaded model."""
        made = cls.__new__(cls)
        made.model = model.eval()
        return made

    def generate(
        self, inputs: Inputs, num_new: int, clock: TokenClock | None = None, **options: object
    ) -> list[list[int]]:
        """Return each row's new tokens, decoded greedily. `options` are passed to `generate`."""
        if clock is not None:
            options["stopping_criteria"] = [clock]
        inputs = self._there(inputs)
        with torch.inference_mode():
            out = self.model.generate(
                **inputs, max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False, **options
            )
        return out[:, inputs["input_ids"].shape[1] :].tolist()

    @contextmanager
    def compiled(self) -> Iterator[None]:
        """Compile the model's forward with torch.compile inside the `with` block. The first call for each
        shape includes the compilation.
        """
        plain = self.model.forward
        self.model.forward = torch.compile(plain)
        try:
            yield
        finally:
            self.model.forward = plain

    def count_images(self, run: Callable[[], object]) -> int:
        """Call `run`, and return how many images the vision tower encodes."""
        seen = 0

        def count(module: torch.nn.Module, args: tuple, kwargs: dict[str, torch.Tensor]) -> None:
            nonlocal seen
            seen += len(kwargs["grid_thw"])

        hook = self.model.model.visual.register_forward_pre_hook(count, with_kwargs=True)
        run()
        hook.remove()
        return seen

    def gap(self, inputs: Inputs, before: Sequence[int]) -> float:
        """Return the difference between the two best logits for the next token. `inputs`: the prompt.
        `before`: the answer's tokens so far.
        """
        ids = torch.cat((inputs["input_ids"], torch.tensor([list(before)], dtype=torch.int64)), 1)
        types = F.pad(inputs["mm_token_type_ids"], (0, len(before)))
        inputs = inputs | {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": types,
        }
        with torch.inference_mode():
            logits = self.model(**self._there(inputs), logits_to_keep=1).logits[0, -1].float()
            # `generate` never selects the end of sequence here, because of `min_new_tokens`.
            ends = self.model.generation_config.eos_token_id
            logits[[] if ends is None else ends] = float("-inf")
            best = logits.topk(2).values
        return float(best[0] - best[1])

    def _there(self, inputs: Inputs) -> Inputs:
        return {name: tensor.to(self.model.device) for name, tensor in inputs.items()}


def make_inputs(prompts: Sequence[Prepared], dtype: torch.dtype = torch.float32) -> Inputs:
    """Return the prompts as a left-padded batch with normalised pixels, as transformers' processor does."""
    width = max(len(one.prompt_token_ids) for one in prompts)
    ids = torch.full((len(prompts), width), PAD)
    mask, types = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.int32)
    for row, prompt in enumerate(prompts):
        start = width - len(prompt.prompt_token_ids)
        ids[row, start:] = torch.from_numpy(prompt.prompt_token_ids)
        mask[row, start:] = 1
        for kind, _, _, number in MEDIA:
            for one in prompt.media:
                for first, length in one.item.runs if one.item.modality == kind else ():
                    types[row, start + first : start + first + length] = number
    inputs = {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": types}
    for kind, pixels, grid, _ in MEDIA:
        media = [one for prompt in prompts for one in prompt.media if one.item.modality == kind]
        if media:
            patches = np.concatenate([one.patches for one in media]).astype(np.float32)
            inputs[pixels] = torch.from_numpy((patches / 255 - 0.5) / 0.5).to(dtype)
            inputs[grid] = torch.tensor([one.item.grid for one in media])
    return inputs


def padded_batches(asks: Sequence[Ask], size: int) -> list[tuple[list[int], Inputs, int]]:
    """Split `asks` into batches of `size`, sorted by number of new tokens. A static batch runs until its
    longest answer ends, so similar lengths waste few steps.

    Returns (indices into `asks`, inputs, maximum number of new tokens) for each batch.
    """
    order = sorted(range(len(asks)), key=lambda place: asks[place].num_new)
    batches = []
    for first in range(0, len(order), size):
        places = order[first : first + size]
        inputs = make_inputs([asks[place].prepared for place in places])
        batches.append((places, inputs, max(asks[place].num_new for place in places)))
    return batches


def describe_mismatches(
    reference: Reference,
    names: Sequence[str],
    inputs: Sequence[Inputs],
    got: Sequence[Sequence[int]],
    wanted: Sequence[Sequence[int]],
    most: int = 8,
) -> list[str]:
    """Return a line for each answer that differs from transformers', at most `most` lines. A line names the
    first different token and the difference between transformers' two best logits there.
    """
    parted = [number for number in range(len(wanted)) if list(got[number]) != list(wanted[number])]
    lines = []
    for number in parted[:most]:
        pairs = zip(got[number], wanted[number], strict=True)
        place = next(i for i, (mine, theirs) in enumerate(pairs) if mine != theirs)
        gap = reference.gap(inputs[number], wanted[number][:place])
        lines.append(
            f"Request {number} ({names[number]}) differs from transformers from token {place} of "
            f"{len(wanted[number])} on, where transformers' two best logits are {gap:.1e} apart."
        )
    if len(parted) > most:
        lines.append(f"{len(parted) - most} more differ from transformers.")
    return lines
