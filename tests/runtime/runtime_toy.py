"""A tiny model that implements the model interface, a dense reference without a KV cache, and hand-made
plans.
"""

import numpy as np
import torch

from mmengine.core.executor import Admission, EncodeItem, MediaSpan, StepPlan
from mmengine.models.plugin import MediaInput, ModelSpec
from mmengine.request import MediaItem, Request, SamplingParams

VOCAB = 61
PAD = 60
EOS = 59


class DenseAttention:
    """Attention for one whole request at a time, without a cache. Implements AttentionPort."""

    def append(self, layer, k, v):
        self.k, self.v = k, v

    def run(self, layer, q):
        q, k, v = (x.transpose(0, 1) for x in (q, self.k, self.v))
        repeat = q.shape[0] // k.shape[0]
        scores = q @ k.repeat_interleave(repeat, 0).transpose(1, 2) * q.shape[-1] ** -0.5
        ahead = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(ahead, float("-inf")).softmax(-1)
        return (weights @ v.repeat_interleave(repeat, 0)).transpose(0, 1)


class ToyModel:
    """A model with two attention layers.

    Positions are added to the embeddings as sine waves. Image features replace embeddings and are also added
    after each layer.
    """

    def __init__(self, seed=0, layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, dtype=torch.float32):
        self.spec = ModelSpec(layers, heads, kv_heads, head_dim, hidden, VOCAB, 512, 2, 6)
        self.encoded = []  # number of items in each encode call
        self.poisoned = None  # token id whose embedding is NaN
        random = torch.Generator().manual_seed(seed)

        def draw(*shape):
            return (torch.randn(*shape, generator=random) * 1.5 * shape[-1] ** -0.5).to(dtype)

        self.embedding = draw(VOCAB, hidden) * 2
        self.qkv = [draw((heads + 2 * kv_heads) * head_dim, hidden) * 1.5 for _ in range(layers)]
        self.out = [draw(hidden, heads * head_dim) for _ in range(layers)]
        self.head = draw(VOCAB, hidden) * 2
        self.vision = draw(3 * hidden, 6) * 2
        self.waves = draw(3, hidden) * 4
        self.embeds_dtype = dtype

    def encode(self, patches, grids):
        assert patches.dtype == torch.uint8
        self.encoded.append(len(grids))
        features = (patches.float() / 64 - 2).to(self.embeds_dtype) @ self.vision.T
        return features.view(-1, 4, features.shape[-1]).mean(1)

    def embed(self, input_ids):
        embeds = self.embedding[input_ids]
        if self.poisoned is not None:
            embeds[input_ids == self.poisoned] = float("nan")
        return embeds

    def forward(self, embeds, deepstack, positions, attention):
        spec = self.spec
        x = embeds + torch.sin(positions.T.to(embeds.dtype) @ self.waves)
        for layer in range(spec.num_layers):
            fused = (x / x.pow(2).mean(-1, keepdim=True).sqrt()) @ self.qkv[layer].T
            sizes = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
            q, k, v = fused.view(len(x), -1, spec.head_dim).split(sizes, dim=1)
            attention.append(layer, k, v)
            x = x + attention.run(layer, q).reshape(len(x), -1) @ self.out[layer].T * 2
            if deepstack is not None and layer < len(deepstack):
                x = x + deepstack[layer]
        return x / x.pow(2).mean(-1, keepdim=True).sqrt()

    def logits(self, hidden):
        return (hidden @ self.head.T).float()


def positions_of(prompt_token_ids, media):
    """Return (positions, delta). Positions are int32 [3, n]. An answer token's position is its index plus
    delta.

    A text token takes one position. A media run takes three positions.
    """
    columns, at, next_position = [], 0, 0
    for start, length in sorted(run for item in media for run in item.runs):
        columns.append(np.tile(np.arange(next_position, next_position + start - at), (3, 1)))
        next_position += start - at
        i = np.arange(length)
        columns.append(next_position + np.stack((0 * i, i // 2 % 3, i % 3)))
        next_position, at = next_position + 3, start + length
    columns.append(np.tile(np.arange(next_position, next_position + len(prompt_token_ids) - at), (3, 1)))
    positions = np.concatenate(columns, axis=1).astype(np.int32)
    return positions, next_position - at


def toy_request(name, seed, num_text=11, media_runs=(), sampling=None, **columns):
    """Return a request and its media. `media_runs`: for each item its (start, length) runs in the prompt.

    The encoder makes one embedding from every four patches.
    """
    random = np.random.default_rng(seed)
    size = max([num_text, *(start + length + 2 for runs in media_runs for start, length in runs)])
    prompt = random.integers(0, EOS, size).astype(np.int32)
    items = []
    for runs in media_runs:
        for start, length in runs:
            prompt[start : start + length] = PAD
        total = sum(length for _, length in runs)
        patches = random.integers(0, 256, (total * 4, 6), dtype=np.uint8)
        item = MediaItem(patches.tobytes()[:32], "image", tuple(runs), (1, 2, 2 * total))
        items.append(MediaInput(item, patches))
    request = Request(
        name, prompt, sampling or SamplingParams(ignore_eos=True), tuple(one.item for one in items), **columns
    )
    return request, items


def dense_logits(model, request, media, token_ids):
    """Return logits [n, VOCAB] for all n known tokens, from one pass over the whole row."""
    positions, delta = positions_of(request.prompt_token_ids, request.media)
    outputs = np.arange(len(request.prompt_token_ids), len(token_ids)) + delta
    positions = np.concatenate((positions, np.tile(outputs, (3, 1))), axis=1)
    embeds = model.embed(torch.tensor(token_ids, dtype=torch.int64))
    hidden = embeds.shape[1]
    deepstack = torch.zeros(model.spec.num_deepstack, *embeds.shape, dtype=embeds.dtype)
    for one in media:
        features = model.encode(torch.from_numpy(one.patches), [one.item.grid])
        at = 0
        for start, length in one.item.runs:
            part = features[at : at + length]
            embeds[start : start + length] = part[:, :hidden]
            for layer in range(model.spec.num_deepstack):
                deepstack[layer, start : start + length] = part[
                    :, hidden * (layer + 1) : hidden * (layer + 2)
                ]
            at += length
    out = model.forward(embeds, deepstack, torch.from_numpy(positions).long(), DenseAttention())
    return model.logits(out)


def dense_greedy(model, request, media, count):
    """Return `count` greedy tokens. Each comes from a pass over all earlier tokens, without a cache."""
    known = request.prompt_token_ids.tolist()
    for _ in range(count):
        known.append(int(dense_logits(model, request, media, known)[-1].argmax()))
    return known[len(request.prompt_token_ids) :]


class Driver:
    """Replaces the scheduler: makes plans for an executor, and tracks tokens, rows, blocks and encoded
    items.
    """

    def __init__(self, executor, config, seed=0):
        self.executor, self.config = executor, config
        self.random = np.random.default_rng(seed)
        self.free_blocks = self.random.permutation(np.arange(1, config.num_blocks)).tolist()
        self.free_rows = self.random.permutation(config.max_num_seqs).tolist()
        self.requests, self.known, self.computed, self.blocks, self.rows = {}, {}, {}, {}, {}
        self.encoded, self.evict = set(), []
        self.step_number = 0

    def add(self, request, media=()):
        name = request.request_id
        self.requests[name], self.known[name] = request, request.prompt_token_ids.tolist()
        if media:
            self.executor.attach(name, media)

    def outputs(self, name):
        return self.known[name][len(self.requests[name].prompt_token_ids) :]

    def preempt(self, name):
        self.free_blocks.extend(self.blocks.pop(name))
        self.free_rows.append(self.rows.pop(name))
        self.random.shuffle(self.free_rows)
        del self.computed[name]

    def drop_features(self, key):
        self.encoded.discard(key)
        self.evict.append(key)

    def plan(self, *work):
        """Plan a step. `work`: (request name, number of tokens to compute) for each scheduled row. The number
        None means all uncomputed tokens.
        """
        parts, admitted, encode, media, sample = [], [], [], [], []
        start = 0
        for n, (name, count) in enumerate(work):
            if name not in self.rows:
                self.rows[name], self.blocks[name], self.computed[name] = self.free_rows.pop(), [], 0
                tokens = np.array(self.known[name], np.int32)
                admitted.append(Admission(self.rows[name], self.requests[name], tokens))
            computed, known = self.computed[name], self.known[name]
            end = len(known) if count is None else computed + count
            while len(self.blocks[name]) * self.config.block_size < end:
                self.blocks[name].append(self.free_blocks.pop())
            index = np.arange(computed, end)
            blocks, size = np.array(self.blocks[name]), self.config.block_size
            slots = blocks[index // size] * size + index % size
            parts.append(
                (self.rows[name], end - computed, computed, known[computed:end], index, slots, blocks)
            )
            self._media(name, computed, end, start, encode, media)
            start += end - computed
            if end == len(known):
                sample.append(n)
            self.computed[name] = end
        width = max(len(part[6]) for part in parts)
        table = np.zeros((len(parts), width), np.int32)
        for n, part in enumerate(parts):
            table[n, : len(part[6])] = part[6]
        self.step_number += 1
        evict, self.evict = tuple(self.evict), []
        flat = [np.concatenate([part[i] for part in parts]) for i in (3, 4, 5)]
        return StepPlan(
            self.step_number,
            *(np.array([part[i] for part in parts], np.int32) for i in range(3)),
            flat[0].astype(np.int32),
            flat[1].astype(np.int32),
            flat[2].astype(np.int64),
            table,
            np.array(sample, np.int32),
            tuple(admitted),
            evict,
            tuple(encode),
            tuple(media),
        )

    def _media(self, name, computed, end, start, encode, media):
        for i, item in enumerate(self.requests[name].media):
            offset = 0
            for run_start, length in item.runs:
                low, high = max(run_start, computed), min(run_start + length, end)
                if low < high:
                    if item.mm_hash not in self.encoded:
                        self.encoded.add(item.mm_hash)
                        encode.append(EncodeItem(item.mm_hash, self.requests[name], i))
                    place = start + low - computed
                    media.append(MediaSpan(item.mm_hash, place, offset + low - run_start, high - low))
                offset += length

    def step(self, *work):
        plan = self.plan(*work)
        self.executor.dispatch(plan)
        result = self.executor.collect()
        for index, token in zip(plan.sample.tolist(), result.token_ids.tolist()):
            self.known[work[index][0]].append(token)
        return result
