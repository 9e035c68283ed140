"""Tests the division of a device's memory between weights, encoder cache and KV pool."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmengine.config import ENCODER_CACHE, EngineConfig
from mmengine.errors import ConfigError, ModelError
from mmengine.models.plugin import ModelSpec
from mmengine.runtime.device import cpu
from mmengine.runtime.device.cuda import CudaDevice
from mmengine.runtime.device.placement import Placement
from mmengine.runtime.executor import ON_CPU
from mmengine.runtime.graphs.encoder_sizes import MOST_EMBEDS
from mmengine.runtime.kv.memory import CACHE_PART, GIB, MOST_CACHED, Memory, cached_embeds
from mmengine.runtime.kv.pool import bytes_per_block
from mmengine.runtime.startup import profile, sizing
from mmengine.serve.engine.engine import Engine
from mmengine_qwen3_vl import plugin
from mmengine_shapes import checkpoint_path

SPEC = ModelSpec(2, 4, 2, 16, 64, 1600, 4096, 1, 1536)
bytes_of = st.integers(0, 2**38)


@given(
    bytes_of, bytes_of, bytes_of, bytes_of, bytes_of, bytes_of, st.integers(1, 2**24), st.integers(2, 4096)
)
def test_blocks_fill_the_remaining_memory(total, taken, layers, encoder, features, reserve, block, least):
    memory = Memory(total, taken, layers, encoder, features, reserve)
    used = taken + max(layers, encoder) + features + reserve
    try:
        count = memory.blocks(block, least)
    except ConfigError as error:
        assert (total - used) // block < least and f"{least} blocks" in str(error)
        with pytest.raises(ConfigError):
            memory.check(least, block)
    else:
        assert used + count * block <= total < used + (count + 1) * block and count >= least
        memory.check(count, block)
        with pytest.raises(ConfigError):
            memory.check(count + 1, block)


sizes = st.integers(1, 2**24)


@given(bytes_of, bytes_of, sizes, sizes, st.integers(2, 2**20), st.integers(1, 2**18), st.integers(0, 2**18))
def test_the_remaining_memory_is_divided_between_encoder_cache_and_pool(
    total, taken, embed, block, least_blocks, item, budget
):
    """The encoder cache and the KV pool fit into the memory, and both have at least the minimum size. An
    error is raised only if the minimum sizes do not fit.
    """
    left, kv, wanted = total - taken, least_blocks * block, item + budget
    cached = cached_embeds(left, embed, kv, least=item, wanted=wanted)
    memory = Memory(total, taken, features=cached * embed)
    assert cached >= item
    if left < item * embed + kv:
        with pytest.raises(ConfigError):
            memory.blocks(block, least_blocks)
        return
    count = memory.blocks(block, least_blocks)
    assert taken + cached * embed + count * block <= total and count >= least_blocks
    assert cached <= max(item, wanted, MOST_CACHED)
    assert cached == item or cached * embed <= left // 2, (
        "the pool gets half, unless the largest item needs more"
    )
    if cached < wanted:  # the cache is limited by half the memory or by the pool's minimum
        assert (cached + 1) * embed > min(left // 2, left - kv)
    assert cached >= min(left // CACHE_PART // embed, MOST_CACHED, (left - kv) // embed)


def test_a_share_of_a_gpu():
    """Check encoder cache sizes for Qwen3-VL 8B, for several sizes of the remaining memory."""
    embed, kv = 4 * 4096 * 2, 2 * 36 * 16 * 8 * 128 * 2
    for left, cached in ((52 * GIB, 85_196), (300 * GIB, 2**17), (3 * GIB, 32_768), (GIB, 16_384)):
        assert cached_embeds(left, embed, 2 * kv, least=16_384, wanted=32_768) == cached
    assert cached_embeds(GIB, embed, GIB, least=16_384, wanted=32_768) == 16_384


def test_a_refusal_shows_the_sum_and_the_setting_to_lower():
    memory = Memory(80 * GIB, 62 * GIB, layers=3 * GIB, encoder=5 * GIB, features=GIB, reserve=8 * GIB)
    with pytest.raises(ConfigError) as refused:
        memory.blocks(2 * 2**20, 4097)
    assert str(refused.value) == (
        "the KV cache does not fit: 4097 blocks of 2,097,152 bytes are 8.00 GiB, and 80.00 - 62.00 (taken, "
        "with the weights) - 5.00 (the peak of a step) - 1.00 (the encoder cache) - 8.00 (reserve) = 4.00 "
        "GiB are left for them; lower num_blocks or max_model_len, or encoder_budget, or use more GPUs "
        "(tensor_parallel)"
    )


class Counting:
    """A fake that is both a memory meter with given peaks and a model that records its calls."""

    spec = SPEC

    def __init__(self, peaks=(), out_of_memory=""):
        self.peaks, self.asked, self.out_of_memory = list(peaks), {}, out_of_memory

    def reset(self):
        self.asked["resets"] = self.asked.get("resets", 0) + 1

    def peak(self):
        return self.peaks.pop(0)

    def encode(self, patches, grids):
        assert len(patches) == sum(t * h * w for t, h, w in grids)
        encoded = len(patches) // SPEC.merge_size**2
        self.asked["encoded"] = max(encoded, self.asked.get("encoded", 0))
        self.asked["encoded_last"] = encoded
        if self.out_of_memory == "encoder":
            raise torch.OutOfMemoryError("CUDA out of memory")

    def embed(self, ids):
        return torch.zeros(len(ids), SPEC.hidden_size)

    def forward(self, embeds, deepstack, positions, attention, aux_hidden_states=None):
        self.asked["computed"] = max(len(embeds), self.asked.get("computed", 0))
        self.asked["tapped"] = None if aux_hidden_states is None else tuple(aux_hidden_states.rows.shape)
        attention.append(0, None, None)
        assert attention.run(0, torch.ones(2, 4, 16)).shape == (2, 4, 16)
        if self.out_of_memory == "layers":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return embeds

    def logits(self, hidden):
        self.asked["sampled"] = len(hidden)


def test_the_largest_step_is_run_once():
    counting = Counting(peaks=(700, 300))
    config = EngineConfig(token_budget=256, encoder_budget=1000, max_num_seqs=8, num_draft_tokens=3)
    peaks = profile.measure(counting, config, torch.device("cpu"), counting)
    assert counting.asked["computed"] == 256 and counting.asked["sampled"] == 8 * 4
    assert 0.95 * 1000 <= counting.asked["encoded"] <= 1000 and counting.asked["resets"] == 2
    assert peaks.encoder == 700
    assert peaks.layers == 300 + profile.SAMPLING_COPIES * 4 * 32 * SPEC.vocab_size
    assert peaks.graphs == 0 and counting.asked["tapped"] is None


def test_captured_sizes_are_run_once_too():
    counting = Counting(peaks=(700, 300, 20, 4))
    config = EngineConfig(token_budget=256, encoder_budget=1000, max_num_seqs=8, num_draft_tokens=3)
    here = torch.device("cpu")
    peaks = profile.measure(counting, config, here, counting, aux_hidden_states=(0, 1), captures=True)
    assert peaks.graphs == 24 and 0.9 * MOST_EMBEDS <= counting.asked["encoded_last"] <= MOST_EMBEDS
    assert counting.asked["tapped"] == (8 * 4, 2 * SPEC.hidden_size)


class WithoutEncoder(Counting):
    spec = replace(SPEC, num_deepstack=0, patch_width=0)

    def encode(self, patches, grids):
        raise AssertionError("a text-only model must not be asked to encode")


def test_a_model_of_text_is_measured_without_an_encoder():
    counting = WithoutEncoder(peaks=(300, 20))
    config = EngineConfig(token_budget=256, max_num_seqs=8)
    peaks = profile.measure(counting, config, torch.device("cpu"), counting, captures=True)
    assert (peaks.encoder, peaks.graphs) == (0, 20) and counting.asked["computed"] == 256


@pytest.mark.parametrize(
    ("where", "setting"), [("encoder", "encoder_budget 512"), ("layers", "token_budget 128")]
)
def test_a_step_that_does_not_fit_by_itself_is_refused(where, setting):
    counting = Counting(peaks=(1, 1), out_of_memory=where)
    config = EngineConfig(token_budget=128, encoder_budget=512)
    with pytest.raises(ConfigError, match=f"{setting} needs more memory than is free; lower"):
        profile.measure(counting, config, torch.device("cpu"), counting)


@given(st.integers(1, 20000), st.integers(1, 20000))
def test_images_of_a_budget_are_few_and_large(budget, largest):
    grids = profile.grids_of(budget, largest, SPEC)
    sizes = [t * h * w // SPEC.merge_size**2 for t, h, w in grids]
    assert len(grids) == -(-budget // largest) and max(sizes) <= largest and sum(sizes) <= budget
    assert all(h % SPEC.merge_size == w % SPEC.merge_size == 0 for _, h, w in grids)


def test_the_embedded_model_runs_its_largest_step():
    model = plugin.load_model(checkpoint_path(), device="cpu", dtype="float32")
    config = EngineConfig(token_budget=70, encoder_budget=40)
    peaks = profile.measure(model, config, torch.device("cpu"), Counting(peaks=(5, 5)))
    assert peaks.encoder == 5


CUDA = Placement(CudaDevice(0), torch.bfloat16)


def a_gpu(patch, peaks, *, free=30 * GIB, total=80 * GIB):
    patch.setattr(torch.cuda, "empty_cache", lambda: None)
    patch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    patch.setattr(sizing, "measure", lambda *_, **__: peaks)


def test_a_gpus_memory_is_divided_by_measurement(monkeypatch):
    model, gib = Counting(), GIB
    a_gpu(monkeypatch, profile.Peaks(gib, 2 * gib, graphs=gib))
    resolve = partial(sizing.resolve, model=model, head=None, placement=CUDA)
    resolved = resolve(EngineConfig(max_num_seqs=4096, token_budget=8192), eos_token_ids=(1,))
    block = 2 * 2 * 16 * 2 * 16 * 2  # layers, K and V, tokens, KV heads, head_dim, bytes
    assert resolved.encoder_cache_size == MOST_CACHED  # a twentieth of 19 GiB is more than this maximum
    left = 30 * gib - 2 * gib - gib - 8 * gib - MOST_CACHED * 2 * 64 * 2
    assert resolved.num_blocks == min(left // block, 4096 * 256 + 1)
    asked = EngineConfig(encoder_cache_size=999, max_num_seqs=4096, token_budget=8192)
    assert resolve(asked, eos_token_ids=(1,)).encoder_cache_size == 999
    shown = (
        r"80\.00 - 50\.00 \(taken, with the weights\) - 2\.00 .* - 1\.00 \(graphs\) - 0\.\d\d \(the encoder"
    )
    with pytest.raises(ConfigError, match=shown):
        resolve(EngineConfig(num_blocks=20 * gib // block), eos_token_ids=(1,))


@pytest.mark.parametrize("asked", [0, 7])
def test_nothing_is_set_aside_for_the_features_of_a_model_of_text(monkeypatch, asked):
    a_gpu(monkeypatch, profile.Peaks(GIB, 0), free=10 * GIB)
    config = EngineConfig(max_num_seqs=4096, token_budget=8192, encoder_cache_size=asked)
    resolved = sizing.resolve(config, WithoutEncoder(), None, CUDA, (1,))
    block = 2 * 2 * 16 * 2 * 16 * 2  # layers, K and V, tokens, KV heads, head_dim, bytes
    assert resolved.num_blocks == (10 - 1 - 8) * GIB // block
    resolved.check_resolved()
    on_cpu = sizing.resolve(config, WithoutEncoder(), None, ON_CPU, (1,))
    assert on_cpu.encoder_cache_size == resolved.encoder_cache_size == (asked or ENCODER_CACHE)


@settings(max_examples=60)
@given(
    st.integers(0, 2**31),
    st.integers(0, 2**30),
    st.sampled_from((0, 2, 100, 4000, 4096)),
    st.sampled_from((0, 1, 5000)),
    st.sampled_from((1, 300, 40_000)),
    st.sampled_from(("auto", "fp8")),
)
def test_a_gpu_is_never_given_more_than_it_has(free, peak, length, cached, budget, kv_dtype):
    """The resolved sizes fit into the free memory, or the error shows the sum."""
    config = EngineConfig(
        max_model_len=length, encoder_cache_size=cached, encoder_budget=budget, kv_dtype=kv_dtype
    )
    with pytest.MonkeyPatch.context() as patch:
        a_gpu(patch, profile.Peaks(peak, peak // 2, peak // 8), free=free, total=2**31)
        try:
            resolved = sizing.resolve(config, Counting(), None, CUDA, (1,))
        except ConfigError as error:
            assert "(the encoder cache) - " in str(error) and "blocks of" in str(error)
            return
    block = bytes_per_block([SPEC], torch.bfloat16 if kv_dtype == "auto" else torch.uint8, config.block_size)
    used = peak + peak // 8 + int(2**31 * sizing.RESERVE_SHARE)
    used += resolved.encoder_cache_size * 2 * 64 * 2 + resolved.num_blocks * block
    assert used <= free
    resolved.check_resolved()  # the pool holds the longest request
    assert resolved.max_model_len == (length or min(SPEC.max_model_len, (resolved.num_blocks - 1) * 16))
    assert resolved.largest_item == min(budget, resolved.encoder_cache_size, resolved.max_model_len - 1)
    assert cached or resolved.encoder_cache_size >= min(budget, (length or SPEC.max_model_len) - 1)


def test_on_a_cpu_the_encoder_cache_has_a_separate_size():
    resolve = partial(sizing.resolve, model=Counting(), head=None, placement=ON_CPU)
    for asked, cached in (({}, 32_768), ({"encoder_cache_size": 7}, 7)):
        assert resolve(EngineConfig(**asked), eos_token_ids=(1,)).encoder_cache_size == cached
    large = EngineConfig(max_item_embeds=40_000, encoder_budget=40_000)
    large.check()
    assert resolve(large, eos_token_ids=(1,)).encoder_cache_size == 40_000


def test_a_pool_that_the_host_cannot_hold_is_refused_with_the_sum(monkeypatch):
    monkeypatch.setattr(cpu, "available_memory", lambda: GIB)
    shown = r"bytes are \d\d\.\d\d GiB, and 1\.00 - 0\.\d\d \(the encoder cache\) = 0"
    with pytest.raises(ConfigError, match=shown):
        Engine(config=EngineConfig(num_blocks=400_000), dtype="float32")


def test_weights_that_do_not_fit_are_refused(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (GIB, 80 * GIB))
    monkeypatch.setattr("mmengine.models.network.text_decoder", full)
    with pytest.raises(
        ModelError, match=r"do not fit into the memory of cpu \(80\.0 GiB\); use a GPU with more free"
    ):
        plugin.load_model(checkpoint_path(), device="cpu", dtype="float32")
