"""Tests on a CPU that an fp8 KV pool gives the same tokens as a model that rounds K and V to fp8."""

import pytest
import torch
from runtime_toy import EOS, Driver, ToyModel, dense_greedy, positions_of, toy_request

from mmengine.config import EngineConfig
from mmengine.runtime.executor import TorchExecutor
from mmengine.runtime.kv.pool import FP8
from mmengine.serve.engine.engine import Engine
from tests.spec_decode.equality import answers, assert_same, mixed


class Rounding(ToyModel):
    """A model that rounds k and v to fp8, as an fp8 pool does."""

    def forward(self, embeds, deepstack, positions, attention):
        class Port:
            def append(self, layer, k, v):
                attention.append(layer, *(x.to(FP8).to(x.dtype) for x in (k, v)))

            def run(self, layer, q):
                return attention.run(layer, q)

        return super().forward(embeds, deepstack, positions, Port())


def test_tokens_equal_rounded_keys_and_values():
    sizes = {"max_num_seqs": 4, "num_blocks": 64, "block_size": 4, "encoder_cache_size": 64}
    config = EngineConfig(eos_token_ids=(EOS,), kv_dtype="fp8", **sizes)
    driver = Driver(TorchExecutor(ToyModel(), positions_of, config), config)
    requests = [toy_request("a", 1, 9), toy_request("b", 2, media_runs=[[(2, 4)]])]
    for request, media in requests:
        driver.add(request, media)
    for _ in range(8):
        driver.step(("a", None), ("b", None))
    for request, media in requests:
        assert driver.outputs(request.request_id) == dense_greedy(Rounding(), request, media, 8)
    plain = dense_greedy(ToyModel(), *requests[0], 8), dense_greedy(ToyModel(), *requests[1], 8)
    assert (driver.outputs("a"), driver.outputs("b")) != plain, "rounding that changes nothing proves nothing"


@pytest.mark.parametrize(
    "other", [{"num_blocks": 40, "swap_blocks": 30, "preempt_mode": "swap"}, {"spec": "eagle3"}]
)
def test_swapping_and_drafting_change_no_token(other):
    """With an fp8 pool, swapping and EAGLE-3 drafts change no answer."""
    asked = mixed(10, seed=3, most_tokens=20)
    common = {"kv_dtype": "fp8", "max_num_seqs": 6, "token_budget": 96, "max_model_len": 400, "spec": "none"}
    assert_same(answers(asked, **{**common, **other}), answers(asked, **common))


def test_a_block_takes_a_byte_for_a_value():
    sizes = []
    for kv_dtype in ("auto", "fp8"):
        config = EngineConfig(kv_dtype=kv_dtype, num_blocks=30, max_model_len=200)
        with Engine(dtype="bfloat16", config=config) as engine:
            blocks = engine.built.executor._runner._kv.blocks
            sizes.append(blocks.numel() * blocks.element_size())
            assert torch.is_floating_point(engine.built.executor._runner._kv.layers[0])
    assert sizes[0] == 2 * sizes[1]
