"""Measures batches on a hosted model (transformers' modules in mmengine), and the same batches in
transformers. For texts, transformers uses continuous batching. For images, transformers' `generate` answers
one request after another.

mmengine and continuous batching have equal KV cache sizes and equal maximum tokens per step. Without a set
cache size, continuous batching on a CPU allocates 60 % of the machine's memory.
"""

import gc
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    ContinuousBatchingConfig,
    GenerationConfig,
)

from benchmarks.common.engine_runner import EngineRunner
from benchmarks.common.half_billion_model import TEXT, write_random
from benchmarks.common.measure import Sample, clocked
from benchmarks.common.report import Part, Table, Target
from benchmarks.common.workload import Ask, random_texts
from mmengine.config import EngineConfig
from mmengine.models.registry import plugin_for
from tests.any_model.factories import make_template, make_tokenizer
from tests.any_model.factories_image import LIGHTON, MERGED, build, processor

WANTED_BATCH = 2.0
LENGTHS = tuple(32 * (1 + 31 * place // 15) for place in range(16))  # 32 to 1,024 tokens
NUM_NEW = 32
TOKEN_BUDGET, CACHE_TOKENS, PAGE = 1024, 16_384, 256
SIZES = {
    "max_model_len": 2048,
    "max_num_seqs": 16,
    "num_blocks": CACHE_TOKENS // 16 + 1,
    "block_size": 16,
    "token_budget": TOKEN_BUDGET,
    "spec": "none",
    "model_impl": "transformers",
}
SIDES = (224, 280, 336, 392, 448, 504, 560, 616)  # Heights of the images in pixels; widths are 448.
TOWER = {
    "model_type": "pixtral",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "head_dim": 64,
    "image_size": 896,
    "patch_size": 14,
}


def texts(folder: Path, num_tokens: int) -> Part:
    """Time 16 requests on the hosted model and with transformers' continuous batching.

    `num_tokens`: the random prompts use token ids below this number.
    """
    asks = [random_texts(1, length, NUM_NEW, num_tokens, seed=length)[0] for length in LENGTHS]
    ours, answers = _answers(folder, asks)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    prompts = [ask.prepared.prompt_token_ids.tolist() for ask in asks]
    options = GenerationConfig(max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    bounds = ContinuousBatchingConfig(
        page_size=PAGE, num_blocks=CACHE_TOKENS // PAGE, max_batch_tokens=TOKEN_BUDGET
    )
    model.generate_batch(prompts[:1], options, bounds)
    theirs, found = clocked(lambda: model.generate_batch(prompts, options, bounds))
    produced = [len(each.generated_tokens) for each in found.values()]
    assert produced == [len(answer) for answer in answers] == [NUM_NEW] * len(asks), produced
    title = f"16 text requests of 32 to 1,024 tokens, {NUM_NEW} new tokens each, half a billion weights"
    sides = {"mmengine, transformers' modules": ours, "transformers, continuous batching": theirs}
    table, ratio = _table(title, sides, sum(LENGTHS) + NUM_NEW * len(asks))
    table.notes.append(
        f"Both have a KV cache of {CACHE_TOKENS:,} tokens and at most {TOKEN_BUDGET:,} tokens in a step."
    )
    return Part([table], [Target("hosted_batch", ratio, WANTED_BATCH)])


def with_images(folder: Path) -> Part:
    """Time 8 requests with an image on the hosted model, and with transformers' `generate` one by one."""
    write_image_model(folder)
    content = [{"type": "image"}, {"type": "text", "text": "Read the text in the image."}]
    messages = [{"role": "user", "content": content}]
    pictures = [_picture(side) for side in SIDES]
    prepare = plugin_for(folder, "transformers").load_processor(folder).prepare
    asks = [Ask(prepare(messages, images=[each]), NUM_NEW, "one image") for each in pictures]
    ours, answers = _answers(folder, asks)
    own = AutoProcessor.from_pretrained(folder)
    prompt = own.apply_chat_template(messages, add_generation_prompt=True)
    inputs = [own(text=prompt, images=[each], return_tensors="pt") for each in pictures]
    assert [len(each.input_ids[0]) for each in inputs] == [len(ask.prepared.prompt_token_ids) for ask in asks]
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def generate(count: int) -> list[int]:
        options = {"max_new_tokens": NUM_NEW, "min_new_tokens": NUM_NEW, "do_sample": False}
        with torch.inference_mode():
            rows = [model.generate(**_in_bfloat16(each), **options) for each in inputs[:count]]
        return [row.shape[1] - len(each.input_ids[0]) for row, each in zip(rows, inputs)]

    generate(1)
    theirs, produced = clocked(lambda: generate(len(inputs)))
    assert produced == [len(answer) for answer in answers] == [NUM_NEW] * len(asks), produced
    total = sum(len(each.input_ids[0]) for each in inputs) + NUM_NEW * len(inputs)
    sides = {"mmengine, transformers' modules": ours, "transformers, generate one by one": theirs}
    title = f"{len(asks)} requests with an image (LightOnOCR's modules), {NUM_NEW} new tokens each"
    table, _ = _table(title, sides, total)
    table.notes.append("Pixels are processed before the clock starts. transformers batches no images itself.")
    return Part([table], [])


def _answers(folder: Path, asks: list[Ask]) -> tuple[Sample, list[list[int]]]:
    """Return mmengine's time for all requests, and the answers' tokens."""
    runner = EngineRunner(model=folder, dtype="bfloat16", config=EngineConfig.from_dict(SIZES))
    runner.answer(asks[:1])
    took, answers = clocked(lambda: runner.answer(asks))
    runner.close()
    gc.collect()
    return took, answers


def _table(title: str, sides: dict[str, Sample], num_tokens: int) -> tuple[Table, float]:
    """Return the table, and transformers' CPU time divided by mmengine's."""
    table = Table(title, ("", "CPU seconds", "tokens per CPU second", "seconds"))
    for side, took in sides.items():
        figures = (f"{took.cpu:.1f}", f"{num_tokens / took.cpu:.0f}", f"{took.wall:.1f}")
        table.rows.append((side, *figures))
    ours, theirs = sides.values()
    ratio = theirs.cpu / ours.cpu
    table.notes.append(f"transformers takes {ratio:.2f} times the CPU time.")
    return table, ratio


def write_image_model(folder: Path) -> None:
    """Write a LightOnOCR with half a billion random weights, its tokenizer and its processor."""
    tokenizer = make_tokenizer(LIGHTON)
    tokenizer.chat_template = make_template(LIGHTON)
    rope = {"rope_type": "default", "rope_theta": 1e6}
    with torch.device("meta"):
        model = build(
            "lighton_ocr",
            text_config={**TEXT, "model_type": "qwen3", "vocab_size": 32_768, "rope_parameters": rope},
            vision_config=TOWER,
            image_token_id=tokenizer.get_added_vocab()["<|image_pad|>"],
        )
    folder.mkdir()
    write_random(folder, type(model), model.config)
    settings = {"size": {"longest_edge": 896}, "patch_size": {"height": 14, "width": 14}}
    made: Any = processor("LightOnOcrProcessor", "PixtralImageProcessor", settings, **MERGED)(tokenizer)
    made.chat_template = tokenizer.chat_template
    made.save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": 2, "pad_token_id": 0}')


def _picture(height: int) -> Image.Image:
    pixels = np.random.default_rng(height).integers(0, 255, (height, 448, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def _in_bfloat16(inputs: Any) -> dict[str, Any]:
    return {
        name: value.bfloat16() if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
