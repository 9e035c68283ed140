"""Requests for the included checkpoint, transformers' tokens for them, and a runner for mmengine."""

import random
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from transformers import AutoModelForImageTextToText

from mmengine.config import ENCODER_CACHE, EngineConfig
from mmengine.core.engine import EngineCore
from mmengine.events.log import LogWriter
from mmengine.models.plugin import Prepared
from mmengine.native import library
from mmengine.replay import verify
from mmengine.request import Request, SamplingParams
from mmengine.runtime.device.cpu import CpuDevice
from mmengine.runtime.device.placement import Placement
from mmengine.runtime.executor import TorchExecutor
from mmengine_qwen3_vl import plugin
from mmengine_shapes import checkpoint_path
from mmengine_shapes.questions import clip_questions, image_questions, pair_questions
from mmengine_shapes.scenes import random_clip, random_scene

TEXTS = (
    "What is 3 plus 4?",
    "Hello!",
    "Which is larger, 7 or 12?",
    "What is 9 minus 5?",
    "Hi there.",
    "Who are you?",
)
SIDES = (64, 96, 96, 128, 160, 192, 256)


@dataclass(frozen=True)
class Case:
    prepared: Prepared
    max_tokens: int


def make_cases(processor, seed: int = 11) -> list[Case]:
    """Return 66 requests in random order: 10 with text only, 28 with an image (four per image), 16 that share
    one image, 7 with two or three images, and 5 with a video.
    """
    rng = random.Random(seed)
    asked = [([], [], rng.choice(TEXTS)) for _ in range(10)]
    for _ in range(7):
        scene = random_scene(rng, side=rng.choice(SIDES))
        asked += [
            ([scene.draw()], [], question) for question in _questions(rng, image_questions(scene, rng), 4)
        ]
    scene = random_scene(rng)
    asked += [([scene.draw()], [], question) for question in _questions(rng, image_questions(scene, rng), 16)]
    for _ in range(5):
        scenes = random_scene(rng), random_scene(rng, side=rng.choice(SIDES))
        pictures = [scene.draw() for scene in scenes]
        asked.append((pictures, [], _questions(rng, pair_questions(*scenes, rng), 1)[0]))
    for _ in range(2):
        pictures = [random_scene(rng, side=rng.choice(SIDES)).draw() for _ in range(3)]
        asked.append((pictures, [], "Describe the second image."))
    for _ in range(5):
        clip = random_clip(rng)
        frames = [np.asarray(frame) for frame in clip.frames()]
        asked.append(([], [frames], _questions(rng, clip_questions(clip, rng), 1)[0]))
    rng.shuffle(asked)
    return [Case(_prepare(processor, *one), rng.randint(16, 48)) for one in asked]


def _questions(rng: random.Random, by_task: dict, count: int) -> list[str]:
    questions = [question for pairs in by_task.values() for question, _ in pairs]
    return [rng.choice(questions) for _ in range(count)]


def _prepare(processor, images, videos, question) -> Prepared:
    parts = [{"type": "image"}] * len(images) + [{"type": "video"}] * len(videos)
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]
    return processor.prepare(messages, images=images, videos=videos)


def load_reference(dtype=torch.float32):
    return AutoModelForImageTextToText.from_pretrained(checkpoint_path(), dtype=dtype).eval()


def reference_inputs(prepared: Prepared, dtype=torch.float32) -> dict[str, torch.Tensor]:
    """Return transformers' model inputs, made from mmengine's token ids and pixels. Other tests check that
    transformers' processor returns the same inputs.
    """
    ids = torch.from_numpy(prepared.prompt_token_ids).long()[None]
    types = torch.zeros_like(ids, dtype=torch.int32)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": types}
    for kind, pixels, grid in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        some = [one for one in prepared.media if one.item.modality == kind]
        if some:
            patches = np.concatenate([one.patches for one in some]).astype(np.float32)
            inputs[pixels] = torch.from_numpy((patches / 255 - 0.5) / 0.5).to(dtype)
            inputs[grid] = torch.tensor([one.item.grid for one in some])
        for one in some:
            for start, length in one.item.runs:
                types[0, start : start + length] = 1 if kind == "image" else 2
    return inputs


def reference_tokens(model, case: Case) -> list[int]:
    """Return the greedy tokens from `generate` for one request, including the end-of-sequence token."""
    inputs = reference_inputs(case.prepared, model.dtype)
    with torch.inference_mode():
        out = model.generate(**inputs, max_new_tokens=case.max_tokens, do_sample=False)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


def load_processor():
    return plugin.load_processor(checkpoint_path())


class Runner:
    """A loaded model, with methods that build engines and run requests."""

    def __init__(self, dtype: str = "float32", attention: str = "auto"):
        self.dtype, self.attention = getattr(torch, dtype), attention
        self.network = plugin.load_model(checkpoint_path(), device="cpu", dtype=dtype)
        self.processor = load_processor()

    @property
    def has_kernels(self) -> bool:
        return self.attention == "auto" and library.load() is not None

    def config(self, **settings) -> EngineConfig:
        defaults = {"max_model_len": 512, "num_blocks": 2049, "encoder_cache_size": ENCODER_CACHE}
        eos_token_ids = self.processor.eos_token_ids
        config = EngineConfig(**{**defaults, "eos_token_ids": eos_token_ids, **settings})
        config.check()
        return config

    def engine(self, config: EngineConfig, log: Path | None = None) -> EngineCore:
        placement = Placement(CpuDevice(), self.dtype, self.attention)
        executor = TorchExecutor(self.network, plugin.positions, config, placement)
        return EngineCore(config, executor, sink=LogWriter(log) if log else None)

    def run(
        self,
        core: EngineCore,
        cases: list[Case],
        *,
        arrivals: random.Random | None = None,
        tag: str = "",
        sampling: SamplingParams | None = None,
        copies: int = 1,
    ) -> list[list[int]]:
        """Return the tokens of each case.

        `arrivals`: draws how many requests arrive before each step; None: all arrive at once. `copies`:
        number of consecutive cases that are samples of the same prompt, as with n > 1.
        """
        sampling = sampling or SamplingParams(seed=0)
        tokens: dict[str, list[int]] = {}
        waiting = [(f"{tag}{number}", case) for number, case in enumerate(cases)][::-1]
        while waiting or core.has_work:
            while waiting and (arrivals is None or arrivals.random() < 0.5):
                name, case = waiting.pop()
                number = int(name.removeprefix(tag))
                request = Request(
                    name,
                    case.prepared.prompt_token_ids,
                    msgspec.structs.replace(sampling, max_tokens=case.max_tokens),
                    tuple(one.item for one in case.prepared.media),
                    sample_index=number % copies,
                    group=f"{tag}{number - number % copies}" if number % copies else "",
                )
                core.submit(request)
                core.executor.attach(name, case.prepared.media)
            for output in core.step():
                assert output.finish_reason in (None, "stop", "length"), output
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
        return [tokens[f"{tag}{number}"] for number in range(len(cases))]


def assert_verifies(folder: Path) -> None:
    report = verify(folder)
    assert report.ok and report.rederived and not report.unfinished, report
