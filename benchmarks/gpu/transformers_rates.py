"""Measure transformers' `generate` and continuous batching, with mmengine's requests and model shape."""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from benchmarks.common.reference import Reference, make_inputs
from benchmarks.common.workload import Ask
from mmengine.errors import in_one_line
from mmengine.models.plugin import MediaInput, Prepared
from mmengine.request import MediaItem
from mmengine_qwen3_vl.config import ModelConfig


def transformers_model(shape: ModelConfig, device: str, dtype: torch.dtype) -> Reference:
    """Return transformers' model for a shape, with random weights made on the device."""
    text, vision = shape.text, shape.vision
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": text.vocab_size,
            "hidden_size": text.hidden_size,
            "intermediate_size": text.intermediate_size,
            "num_hidden_layers": text.num_layers,
            "num_attention_heads": text.num_heads,
            "num_key_value_heads": text.num_kv_heads,
            "head_dim": text.head_dim,
            "max_position_embeddings": text.max_positions,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": text.rope.theta,
                "mrope_section": list(text.rope.sections),
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": vision.depth,
            "hidden_size": vision.hidden_size,
            "intermediate_size": vision.intermediate_size,
            "num_heads": vision.num_heads,
            "out_hidden_size": vision.out_hidden_size,
            "patch_size": vision.patch_size,
            "temporal_patch_size": vision.temporal_patch_size,
            "spatial_merge_size": vision.merge_size,
            "num_position_embeddings": vision.num_positions,
            "deepstack_visual_indexes": list(vision.deepstack_layers),
        },
        image_token_id=shape.image_token_id,
        video_token_id=shape.video_token_id,
        tie_word_embeddings=text.tied,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = Qwen3VLForConditionalGeneration(config)
    finally:
        torch.set_default_dtype(before)
    model.generation_config.eos_token_id = None
    return Reference.around(model)


def image_asks(
    shape: ModelConfig, count: int, grid: tuple[int, int, int], tokens: int, num_new: int
) -> list[Ask]:
    """Return requests with `tokens` random text tokens each. An image with random pixels follows the second
    text token.
    """
    rng = np.random.default_rng(11)
    embeds = grid[0] * grid[1] * grid[2] // shape.vision.merge_size**2
    asks = []
    for number in range(count):
        text = rng.integers(3, shape.text.vocab_size // 2, tokens, dtype=np.int32)
        ids = np.concatenate((text[:2], np.full(embeds, shape.image_token_id, np.int32), text[2:]))
        pixels = rng.integers(0, 256, (embeds * 4, shape.vision.patch_width), dtype=np.uint8)
        item = MediaItem(number.to_bytes(32, "big"), "image", ((2, embeds),), grid)
        asks.append(Ask(Prepared(ids, (MediaInput(item, pixels),), ""), num_new, "one image"))
    return asks


def generate_rate(rival: Reference, asks: Sequence[Ask], batch: int) -> float:
    """Return `generate`'s tokens per second over batches of `batch` requests, after a short warm-up.

    Pixels are converted before the clock starts.
    """
    dtype = next(rival.model.parameters()).dtype
    batches = [asks[first : first + batch] for first in range(0, len(asks), batch)]
    inputs = [make_inputs([ask.prepared for ask in some], dtype) for some in batches]
    rival.generate(inputs[0], 2)
    begin = time.perf_counter()
    made = sum(len(rival.generate(each, asks[0].num_new)) for each in inputs) * asks[0].num_new
    return made / (time.perf_counter() - begin)


def continuous_rates(rival: Reference, asks: Sequence[Ask]) -> Iterator[tuple[str, float | str]]:
    """Measure transformers' continuous batching (text only). Yield pairs (name of the options, tokens per
    second).

    The first run uses transformers' default options; on a GPU, two more runs set other options. If a run
    fails, the error text replaces the figure. Unless flash-attn or `kernels` is installed, transformers uses
    torch's SDPA with masks.
    """
    yield "as it chooses", _rate_or_why(rival, asks, {})
    if rival.model.device.type == "cuda":
        # cuDNN's attention would build a new execution plan for each sequence length.
        torch.backends.cuda.enable_cudnn_sdp(False)
        yield "without cuDNN", _rate_or_why(rival, asks, {})
        graphs = {"use_cuda_graph": True, "use_async_batching": True}
        yield "without cuDNN, CUDA graphs and asynchronous", _rate_or_why(rival, asks, graphs)


def _rate_or_why(rival: Reference, asks: Sequence[Ask], options: dict[str, object]) -> float | str:
    try:
        seconds, _ = answer_continuously(rival, asks, options)
    except Exception as error:  # the other methods may still run
        return in_one_line(error)
    return len(asks) * asks[0].num_new / seconds


def answer_continuously(
    rival: Reference, asks: Sequence[Ask], options: dict[str, object], runs: int = 2
) -> tuple[float, list[list[int]]]:
    """Run the requests `runs` times, and return the last run's seconds and answers.

    The earlier runs fill caches and record graphs. Raises RuntimeError if an answer is too short.
    """
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    num_new, model = asks[0].num_new, rival.model
    # With block sharing, all prompts in the last run would be prefix cache hits.
    options = {"allow_block_sharing": False} | options
    if model.device.type == "cpu":
        options |= {"num_blocks": 16, "max_batch_tokens": 64}
    config = GenerationConfig(max_new_tokens=num_new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    prompts = [ask.prepared.prompt_token_ids.tolist() for ask in asks]
    try:
        for _ in range(runs):
            begin = time.perf_counter()
            found = model.generate_batch(
                prompts,
                generation_config=config,
                continuous_batching_config=ContinuousBatchingConfig(**options),
                persistent_manager=True,
            )
            seconds = time.perf_counter() - begin
            answers = [list(output.generated_tokens) for output in found.values()]
            if [len(answer) for answer in answers] != [num_new] * len(asks):
                errors = {output.error for output in found.values()} - {None}
                made = sum(map(len, answers))
                raise RuntimeError(
                    f"{made} tokens for {len(asks)} requests; {'; '.join(sorted(errors))[:200]}"
                )
    finally:
        model.destroy_cached_continuous_batching_manager()
        if model.device.type == "cuda":
            torch.cuda.empty_cache()
    return seconds, answers


def attention_of(rival: Reference, asks: Sequence[Ask]) -> str:
    """Return the name of the attention implementation that continuous batching uses for this model."""
    seen: set[str] = set()
    layer = rival.model.model.language_model.layers[0]
    hook = layer.register_forward_pre_hook(lambda *_: seen.add(layer.self_attn.config._attn_implementation))
    try:
        answer_continuously(rival, [replace(ask, num_new=2) for ask in asks[:1]], {}, runs=1)
    finally:
        hook.remove()
    return ", ".join(sorted(seen))
