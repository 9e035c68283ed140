"""The other side: transformers' `generate` on the same weights, ids and pixels.

It runs with its defaults, SDPA and a growing cache, which were faster here than eager attention and
than a static cache.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForImageTextToText
from transformers.utils import logging
from workload import Ask

from mmengine.models.plugin import Prepared

PAD = 0  # masked, so any id will do
MEDIA = (
    ("image", "pixel_values", "image_grid_thw", 1),
    ("video", "pixel_values_videos", "video_grid_thw", 2),
)
Inputs = dict[str, torch.Tensor]


class TokenClock:
    """A stopping criterion that never stops anything and notes when each token was ready."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Reference:
    """transformers' model. Every answer has exactly the tokens asked for, as on the other side."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        logging.disable_progress_bar()
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).eval()

    def generate(self, inputs: Inputs, num_new: int, clock: TokenClock | None = None) -> list[list[int]]:
        """New tokens of each row, greedy."""
        criteria = {"stopping_criteria": [clock]} if clock is not None else {}
        with torch.inference_mode():
            out = self.model.generate(
                **inputs, max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False, **criteria
            )
        return out[:, inputs["input_ids"].shape[1] :].tolist()

    def count_images(self, run: Callable[[], object]) -> int:
        """How many images reach the vision tower while `run` runs."""
        seen = 0

        def count(module: torch.nn.Module, args: tuple, kwargs: dict[str, torch.Tensor]) -> None:
            nonlocal seen
            seen += len(kwargs["grid_thw"])

        hook = self.model.model.visual.register_forward_pre_hook(count, with_kwargs=True)
        run()
        hook.remove()
        return seen

    def gap(self, inputs: Inputs, num_new: int, place: int) -> float:
        """Distance of the two best logits where token `place` of an answer is chosen."""
        with torch.inference_mode():
            out = self.model.generate(
                **inputs,
                max_new_tokens=num_new,
                min_new_tokens=num_new,
                do_sample=False,
                return_dict_in_generate=True,
                output_scores=True,
            )
        best = out.scores[place][0].topk(2).values
        return float(best[0] - best[1])


def make_inputs(prompts: Sequence[Prepared], dtype: torch.dtype = torch.float32) -> Inputs:
    """Prompts as one batch, padded on the left, pixels normalised: what transformers' processor gives."""
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
    """(places in `asks`, inputs, tokens to make) of batches of `size`, sorted by the tokens to make:
    the order in which static batches waste least."""
    order = sorted(range(len(asks)), key=lambda place: asks[place].num_new)
    batches = []
    for first in range(0, len(order), size):
        places = order[first : first + size]
        inputs = make_inputs([asks[place].prepared for place in places])
        batches.append((places, inputs, max(asks[place].num_new for place in places)))
    return batches
