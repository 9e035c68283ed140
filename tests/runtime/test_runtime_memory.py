"""What a device has room for: the sums, the pass that measures them, and the refusals that show them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmengine.config import EngineConfig
from mmengine.errors import ConfigError, ModelError
from mmengine.models.plugin import ModelSpec
from mmengine.runtime import profile, sizing
from mmengine.runtime.memory import GIB, Memory
from mmengine.serve.engine import Engine
from mmengine_qwen3_vl import plugin
from mmengine_shapes import checkpoint_path

SPEC = ModelSpec(2, 4, 2, 16, 64, 1600, 4096, 1, 1536)
bytes_of = st.integers(0, 2**38)


@given(
    bytes_of, bytes_of, bytes_of, bytes_of, bytes_of, bytes_of, st.integers(1, 2**24), st.integers(2, 4096)
)
def test_blocks_fill_what_is_left_and_no_more(total, taken, layers, encoder, features, reserve, block, least):
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


def test_a_refusal_shows_the_sum_and_what_to_lower():
    memory = Memory(80 * GIB, 62 * GIB, layers=3 * GIB, encoder=5 * GIB, features=GIB, reserve=8 * GIB)
    with pytest.raises(ConfigError) as refused:
        memory.blocks(2 * 2**20, 4097)
    assert str(refused.value) == (
        "the KV cache does not fit: 4097 blocks of 2,097,152 bytes are 8.00 GiB, and 80.00 - 62.00 (taken, "
        "with the weights) - 5.00 (the peak of a step) - 1.00 (the encoder cache) - 8.00 (reserve) = 4.00 "
        "GiB are left for them; lower num_blocks or max_model_len, or encoder_budget, or cut the model over "
        "more GPUs (tensor_parallel)"
    )


class Counting:
    """A meter that gives what it is told, and a model that counts what it is asked."""

    spec = SPEC

    def __init__(self, peaks=(), out_of_memory=""):
        self.peaks, self.asked, self.out_of_memory = list(peaks), {}, out_of_memory

    def reset(self):
        self.asked["resets"] = self.asked.get("resets", 0) + 1

    def peak(self):
        return self.peaks.pop(0)

    def encode(self, patches, grids):
        assert len(patches) == sum(t * h * w for t, h, w in grids)
        self.asked["encoded"] = len(patches) // SPEC.merge_size**2
        if self.out_of_memory == "encoder":
            raise torch.OutOfMemoryError("CUDA out of memory")

    def embed(self, ids):
        return torch.zeros(len(ids), SPEC.hidden_size)

    def forward(self, embeds, deepstack, positions, attention):
        self.asked["computed"] = len(embeds)
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


def test_a_gpu_is_shared_out_by_what_was_measured(monkeypatch):
    model, gib = Counting(), GIB
    monkeypatch.setattr(sizing, "CudaMeter", lambda device: Counting(peaks=(2 * gib, gib)))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 * gib, 80 * gib))
    monkeypatch.setattr(sizing, "measure", lambda *_: profile.Peaks(gib, 2 * gib))
    cuda = torch.device("cuda:0")
    config = EngineConfig(max_num_seqs=4096, token_budget=8192)
    resolved = sizing.resolve(config, model, None, torch.bfloat16, cuda, (1,))
    block = 2 * 2 * 16 * 2 * 16 * 2  # layers, K and V, tokens, KV heads, head_dim, bytes
    features = int(1.5 * config.encoder_cache_size * 2 * 64 * 2)
    left = 30 * gib - 2 * gib - features - 8 * gib
    assert resolved.num_blocks == min(left // block, 4096 * 256 + 1)
    with pytest.raises(ConfigError, match=r"80\.00 - 50\.00 \(taken, with the weights\) - 2\.00"):
        tight = EngineConfig(num_blocks=left // block + 1)
        sizing.resolve(tight, model, None, torch.bfloat16, cuda, (1,))


def test_a_pool_that_the_host_cannot_hold_is_refused_with_the_sum(monkeypatch):
    monkeypatch.setattr(sizing, "available_memory", lambda: GIB)
    shown = r"bytes are \d\d\.\d\d GiB, and 1\.00 - 0\.\d\d \(the encoder cache\) = 0"
    with pytest.raises(ConfigError, match=shown):
        Engine(config=EngineConfig(num_blocks=400_000), dtype="float32")


def test_weights_that_do_not_fit_are_refused(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 80 * GIB))
    monkeypatch.setattr("mmengine_qwen3_vl.model.text_decoder", full)
    with pytest.raises(ModelError, match=r"do not fit cpu of 80\.0 GiB; take a GPU with more memory"):
        plugin.load_model(checkpoint_path(), device="cpu", dtype="float32")
