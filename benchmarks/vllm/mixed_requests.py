"""Mixed requests for vLLM: text, images, JSON schemas, stop strings, logprobs, several answers, and arrivals
over time. vLLM serves the checkpoint in plugins/mmengine_shapes. Imports vLLM.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams

from mmengine_shapes.questions import image_questions
from mmengine_shapes.scenes import Scene, random_scene
from mmengine_vllm.vllm_object import VllmObject

SHAPES = Path(__file__).parents[2] / "plugins" / "mmengine_shapes"
CHECKPOINT, DRAFT_HEAD = SHAPES / "checkpoint", SHAPES / "draft_head"
TEXTS = ("What is 3 plus 4?", "Hello!", "Who are you?", "What is a triangle?")
FORM = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 8}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
LORA_RANK, NUM_LORAS = 8, 3


class Asked(NamedTuple):
    """A request. `step`: the request arrives before this engine step. `lora`: an adapter's number, or 0."""

    text: str
    scenes: list[Scene]
    is_video: bool
    step: int
    priority: int
    lora: int
    params: SamplingParams


def workload(
    number: int,
    *,
    videos: bool = False,
    loras: Sequence[int] = (),
    several: bool = True,
    short: bool = False,
) -> list[Asked]:
    """Return `number` requests. The same arguments always give equal requests. `loras`: adapter numbers to
    choose from (0: no adapter). `several`: let some requests ask for two answers. `short`: leave out JSON
    schemas, logprobs, stop strings and second answers. Their CPU work would disturb a throughput measurement.
    """
    draw = random.Random(3)
    shared = [random_scene(draw, side=side) for side in (128, 256)]
    made = []
    for index in range(number):
        scenes = {
            1: lambda: [draw.choice(shared)],
            2: lambda: [random_scene(draw, side=draw.choice((96, 192, 256)))],
            4: lambda: [draw.choice(shared), random_scene(draw, side=128)],
        }.get(index % 5, list)()
        question = " ".join([draw.choice(TEXTS)] * draw.randint(1, 12))
        if scenes:
            kinds = image_questions(scenes[0], draw).values()
            question = draw.choice([text for of_kind in kinds for text, _ in of_kind])
        is_form = index % 7 == 3 and not short
        more: dict[str, VllmObject] = {}
        if not short:
            more |= {"logprobs": 3 if index % 6 == 1 else None, "stop": ["e"] if index % 9 == 4 else None}
            if several and index % 10 == 5:  # top_k 1: greedy, since vLLM's CPU build refuses seeds
                more |= {"n": 2, "temperature": 1.0, "top_k": 1}
        if is_form:
            more["structured_outputs"] = StructuredOutputsParams(json=FORM)
        params = SamplingParams(
            max_tokens=draw.randint(24, 100),
            ignore_eos=not is_form and draw.random() < 0.7,
            **{"temperature": 0, **more},
        )
        made.append(
            Asked(
                question,
                scenes,
                videos and index % 5 == 2,
                2 * index if index < 12 else 12 + index,
                draw.randint(0, 2),
                draw.choice(loras) if loras else 0,
                params,
            )
        )
    return made


def prompt_of(asked: Asked, tokenizer: VllmObject) -> dict[str, VllmObject]:
    """Return the request's prompt for vLLM. A video shows its scene in four frames, each a bit darker."""
    media = [{"type": "video" if asked.is_video else "image"}] * len(asked.scenes)
    chat = [{"role": "user", "content": [*media, {"type": "text", "text": asked.text}]}]
    prompt = {"prompt": tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)}
    pictures = [scene.draw() for scene in asked.scenes]
    if asked.is_video:
        frames = [np.asarray(pictures[0]) // (1 + number) for number in range(4)]
        facts = {"fps": 2.0, "total_num_frames": 4, "duration": 2.0, "frames_indices": [0, 1, 2, 3]}
        facts |= {"video_backend": "opencv", "do_sample_frames": False}
        prompt["multi_modal_data"] = {"video": [(np.stack(frames), facts)]}
    elif pictures:
        prompt["multi_modal_data"] = {"image": pictures}
    return prompt


def make_adapters(folder: Path) -> list[LoRARequest]:
    """Write random LoRA adapters for the checkpoint's queries and values, and return requests for them."""
    config = json.loads((CHECKPOINT / "config.json").read_text())["text_config"]
    hidden, size = config["hidden_size"], config["head_dim"]
    widths = {"q_proj": config["num_attention_heads"] * size, "v_proj": config["num_key_value_heads"] * size}
    made = []
    for number in range(1, NUM_LORAS + 1):
        weights, draw = {}, torch.Generator().manual_seed(number)
        for layer in range(config["num_hidden_layers"]):
            for name, width in widths.items():
                where = f"base_model.model.model.language_model.layers.{layer}.self_attn.{name}"
                weights[f"{where}.lora_A.weight"] = torch.randn(LORA_RANK, hidden, generator=draw) * 0.1
                weights[f"{where}.lora_B.weight"] = torch.randn(width, LORA_RANK, generator=draw) * 0.1
        path = folder / f"adapter-{number}"
        path.mkdir()
        save_file(weights, path / "adapter_model.safetensors")
        facts = {"peft_type": "LORA", "r": LORA_RANK, "lora_alpha": LORA_RANK, "target_modules": [*widths]}
        (path / "adapter_config.json").write_text(json.dumps({**facts, "bias": "none", "use_dora": False}))
        made.append(LoRARequest(f"adapter-{number}", number, str(path)))
    return made
