"""Helpers for tests of the networks: random Qwen3-VL checkpoints with transformers' models, random prompts,
and attention backends.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn import functional as F

from mmengine.request import MediaItem
from mmengine.runtime.attention.base import AttentionMeta
from mmengine.runtime.device.cpu import CpuDevice
from mmengine.runtime.kv.pool import KVPool
from mmengine_qwen3_vl import plugin

IMAGE, VIDEO, START, END = 90, 91, 92, 93  # Special ids of the random checkpoints.
FIRST_SPECIAL = 90
TINY = {
    "text": {
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    },
    "vision": {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_heads": 4,
        "out_hidden_size": 48,
        "num_position_embeddings": 25,
        "deepstack_visual_indexes": [0, 2],
        "patch_size": 4,
    },
}


# Test name -> arguments for make_reference. Each entry sets other options for the text decoder.
DECODER_KINDS = {
    "tied": {},
    "untied, biases": {"tied": False, "text": {"attention_bias": True}},
    "odd sizes, one key-value head": {
        "text": {
            "hidden_size": 40,
            "intermediate_size": 72,
            "head_dim": 24,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 4, 4]},
        },
        "vision": {"out_hidden_size": 40},
    },
}


def make_reference(folder, seed=0, *, tied=True, text=None, vision=None):
    """Write a random checkpoint to `folder`, and return transformers' float32 model.

    All parameters are random, and matrices have larger values than transformers' initial values. With
    transformers' values, greedy text would repeat a token, and norms of 1 and biases of 0 would hide a wrong
    tensor name.
    """
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    config = Qwen3VLConfig(
        text_config=TINY["text"] | (text or {}),
        vision_config=TINY["vision"] | (vision or {}),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                weight.copy_(1 + 0.3 * torch.randn_like(weight))
                if "q_norm" in name or "k_norm" in name:
                    weight.mul_(2)
            elif name.endswith("bias"):
                weight.copy_(0.1 * torch.randn_like(weight))
            elif "embed_tokens" in name:
                # With tied embeddings, the logits are about +-10, as in real models. At +-40, the reference's
                # float32 rounding errors reach the tolerance of 1e-4 (measured against float64).
                weight.copy_(0.25 * torch.randn_like(weight))
            elif "pos_embed" in name:
                weight.copy_(torch.randn_like(weight))
            else:
                weight.copy_(torch.randn_like(weight) / weight[0].numel() ** 0.5)
    model.save_pretrained(folder)
    return model


@dataclass
class Prompt:
    """A prompt's token ids and media, for our model and for transformers.

    make_prompt builds a prompt from parts: an int (number of text tokens), ("image", (h, w)) or ("video", (t,
    h, w)), in patches.
    """

    ids: np.ndarray
    types: np.ndarray  # transformers' mm_token_type_ids: 0 text, 1 image, 2 video.
    media: list[MediaItem]
    patches: list[np.ndarray] = field(default_factory=list)


def make_prompt(parts, rng, *, merge=2, patch_width=96, tokens=FIRST_SPECIAL):
    ids, types, media, patches = [], [], [], []

    def text(count):
        ids.extend(rng.integers(0, tokens, count).tolist())
        types.extend([0] * count)

    for part in parts:
        if isinstance(part, int):
            text(part)
            continue
        kind, grid = part
        t, h, w = grid if kind == "video" else (1, *grid)
        runs = []
        for _ in range(t):
            if kind == "video":
                text(int(rng.integers(1, 5)))  # The timestamp.
            ids.append(START)
            length = h * w // merge**2
            runs.append((len(ids), length))
            ids.extend([IMAGE if kind == "image" else VIDEO] * length)
            ids.append(END)
            types.extend([0, *[1 if kind == "image" else 2] * length, 0])
        pixels = rng.integers(0, 256, (t * h * w, patch_width), dtype=np.uint8)
        patches.append(pixels)
        media.append(MediaItem(mm_hash=pixels[:1].tobytes(), modality=kind, runs=tuple(runs), grid=(t, h, w)))
    return Prompt(np.array(ids, np.int32), np.array(types), media, patches)


def reference_inputs(prompt):
    """Return the keyword arguments for transformers' forward with a single prompt."""
    inputs = {
        "input_ids": torch.from_numpy(prompt.ids).long()[None],
        "mm_token_type_ids": torch.from_numpy(prompt.types).int()[None],
        "attention_mask": torch.ones(1, len(prompt.ids), dtype=torch.long),
    }
    for kind, pixels, grid in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        items = [i for i, item in enumerate(prompt.media) if item.modality == kind]
        if items:
            inputs[pixels] = reference_pixels(np.concatenate([prompt.patches[i] for i in items]))
            inputs[grid] = torch.tensor([prompt.media[i].grid for i in items])
    return inputs


def reference_pixels(patches):
    """Normalise uint8 patches as transformers' Pillow backend does: multiply in float64, then subtract and
    divide in float32.
    """
    scaled = (patches.astype(np.float64) * 0.00392156862745098).astype(np.float32)
    return torch.from_numpy((scaled - np.float32(0.5)) / np.float32(0.5))


def reference_logits(model, prompt):
    with torch.inference_mode():
        return model(**reference_inputs(prompt), use_cache=False).logits[0].float()


class DenseAttention:
    """An attention backend without paging: a K and a V tensor for each row and layer."""

    def __init__(self):
        self.kept = {}
        self.rows = []

    def begin(self, rows):
        """Begin a step. `rows`: (row, query tokens), in batch order."""
        self.rows = rows

    def append(self, layer, k, v):
        lengths = [count for _, count in self.rows]
        for (row, _), new_k, new_v in zip(self.rows, k.split(lengths), v.split(lengths), strict=True):
            old_k, old_v = self.kept.get((layer, row), (new_k[:0], new_v[:0]))
            self.kept[layer, row] = torch.cat((old_k, new_k)), torch.cat((old_v, new_v))

    def run(self, layer, q):
        outputs = []
        for (row, count), queries in zip(self.rows, q.split([n for _, n in self.rows]), strict=True):
            k, v = (x.transpose(0, 1) for x in self.kept[layer, row])
            total = k.shape[1]
            mask = torch.ones(count, total, dtype=torch.bool).tril(total - count)
            out = F.scaled_dot_product_attention(
                queries.transpose(0, 1)[None], k[None], v[None], attn_mask=mask, enable_gqa=True
            )
            outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs)


def encode(model, prompt):
    """Return the encoder outputs for a prompt's media, [n, (1 + deepstack) * hidden]."""
    patches = torch.from_numpy(np.concatenate(prompt.patches))
    return model.encode(patches, [item.grid for item in prompt.media])


class PagedRows:
    """Wraps an attention backend with its own KV pool. `begin` has the same parameter as in DenseAttention.
    All other attributes come from the backend, except the names in `hide`.
    """

    def __init__(self, make, spec, dtype, num_rows, *, longest=128, block_size=4, hide=()):
        self._per_row, self._size, self._hidden = -(-longest // block_size), block_size, hide
        num_blocks = 1 + num_rows * self._per_row
        pool = KVPool(spec, num_blocks, block_size, dtype, CpuDevice(), 0)
        blocks = 1 + np.random.default_rng(0).permutation(num_blocks - 1)
        self._table = blocks.astype(np.int32).reshape(num_rows, self._per_row)
        self._lengths = np.zeros(num_rows, np.int32)
        self._backend = make(spec, pool)

    def __getattr__(self, name):
        if name in self._hidden:
            raise AttributeError(name)
        return getattr(self._backend, name)

    def begin(self, rows):
        slots, counts, order = [], [], []
        for row, count in rows:
            places = self._lengths[row] + np.arange(count)
            slots.append(self._table[row][places // self._size] * np.int64(self._size) + places % self._size)
            self._lengths[row] += count
            counts.append(count)
            order.append(row)
        self._backend.begin(
            AttentionMeta(
                np.array(counts, np.int32), self._lengths[order], np.concatenate(slots), self._table[order]
            )
        )


def run_rows(model, prompts, steps, attention=None):
    """Return the logits [n, vocab] of each prompt's n tokens.

    `steps`: a list of (row, number of tokens) for each step. `attention`: a PagedRows, or None for a
    DenseAttention.
    """
    hidden_size, num_deepstack = model.spec.hidden_size, model.spec.num_deepstack
    embeds, deepstack, positions = [], [], []
    for prompt in prompts:
        x = model.embed(torch.from_numpy(prompt.ids).long())
        deep = x.new_zeros(num_deepstack, *x.shape)
        if prompt.media:
            features = encode(model, prompt).split(hidden_size, -1)
            mask = torch.from_numpy(prompt.types > 0)
            x[mask] = features[0]
            for i in range(num_deepstack):
                deep[i, mask] = features[1 + i]
        embeds.append(x)
        deepstack.append(deep)
        rope, _ = plugin.positions(prompt.ids, prompt.media)
        positions.append(torch.from_numpy(rope).long())
    attention = attention or DenseAttention()
    done = [0] * len(prompts)
    logits = [[] for _ in prompts]
    for rows in steps:
        cuts = [(row, slice(done[row], done[row] + count)) for row, count in rows]
        attention.begin(rows)
        has_media = any(deepstack[row][:, cut].any() for row, cut in cuts)
        hidden = model.forward(
            torch.cat([embeds[row][cut] for row, cut in cuts]),
            torch.cat([deepstack[row][:, cut] for row, cut in cuts], 1) if has_media else None,
            torch.cat([positions[row][:, cut] for row, cut in cuts], 1),
            attention,
        )
        for (row, count), part in zip(rows, model.logits(hidden).split([n for _, n in rows]), strict=True):
            logits[row].append(part)
            done[row] += count
    return [torch.cat(parts) for parts in logits]


def whole_steps(prompts):
    """Return a single step that computes all prompts."""
    return [[(row, len(prompt.ids)) for row, prompt in enumerate(prompts)]]


def ragged_steps(prompts, rng, largest):
    """Return steps that compute random chunks with 1 to `largest` tokens of random rows."""
    left = [len(prompt.ids) for prompt in prompts]
    steps = []
    while any(left):
        rows = [row for row in rng.permutation(len(left)).tolist() if left[row] and rng.random() < 0.7]
        step = [(row, min(left[row], int(rng.integers(1, largest + 1)))) for row in rows]
        for row, count in step:
            left[row] -= count
        if step:
            steps.append(step)
    return steps
