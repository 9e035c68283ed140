"""Tests a simulation's settings: their names in scenarios and in the engine, and their defaults."""

import pytest

from mmengine.errors import ConfigError
from mmengine.simulation import SimRequest, Workload, read_settings
from mmengine.simulation.workload import image_item

WORK = Workload("w", [SimRequest("a", 90, lambda: None, 10)], timed=False)
SCENARIO = {
    "policy": "priority",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 100,
    "block_size": 8,
    "num_blocks": 20,
    "enable_prefix_caching": False,
    "encoder_compute_budget": 48,
    "encoder_cache_size": 96,
    "max_tokens_per_mm_item": 64,
    "long_prefill_token_threshold": 32,
    "disable_chunked_mm_input": True,
    "num_spec_tokens": 3,
    "spec_method": "eagle3",
    "reserve_full_prompt": False,
    "scheduler": "sync",
}


def test_all_words_of_a_scenario():
    # Each setting in SCENARIO sets a field of EngineConfig, whose name may differ.
    config = read_settings(SCENARIO, WORK, "vllm").config
    assert (config.policy, config.max_num_seqs, config.token_budget) == ("priority", 8, 64)
    # num_blocks includes block 0, which holds no KV
    assert (config.max_model_len, config.block_size, config.num_blocks) == (100, 8, 21)
    assert (config.encoder_budget, config.encoder_cache_size) == (64, 96)  # raised to an item's size
    assert not config.enable_prefix_caching and config.long_prefill_token_threshold == 32
    assert not config.split_media and config.admission_reserve == "none"
    assert (config.num_draft_tokens, config.lookahead_tokens, config.compat) == (3, 3, "vllm")


def test_ngram_needs_no_blocks_ahead():
    assert read_settings({**SCENARIO, "spec_method": "ngram"}, WORK, "vllm").config.lookahead_tokens == 0


def test_items_that_are_not_split_must_fit_a_chunk():
    with pytest.raises(
        ConfigError, match="long_prefill_token_threshold 32 .* 64 embeddings that split_media"
    ):
        read_settings(SCENARIO, WORK)
    small = {**SCENARIO, "max_tokens_per_mm_item": 0}
    assert read_settings(small, WORK).config.max_item_embeds == 1
    item = image_item(0, 33, "large")
    work = Workload("w", [SimRequest("a", 90, lambda: None, 10, media=(item,))], timed=False)
    with pytest.raises(ConfigError, match="smaller than an item of 33 embeddings"):
        read_settings(small, work)


def test_defaults_fit_the_workload_and_a_large_gpu():
    config = read_settings({}, WORK).config
    assert config.max_model_len == 100 and config.num_blocks * config.block_size > 300_000
    assert config.compat == "" and config.max_num_seqs == 256


def test_a_length_that_the_pool_cannot_hold_is_cut_to_it():
    # A pool of four blocks with 16 tokens each lowers max_model_len to 64.
    assert read_settings({"num_blocks": 4, "max_model_len": 500}, WORK).config.max_model_len == 64


def test_prices_are_settings():
    # The cost model's prices can be set.
    assert read_settings({"cost": {"step_ns": 5}}, WORK).cost.step_ns == 5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_foo": 1}, "max_foo"),
        ({"num_blocks": "many"}, "num_blocks"),
        ({"block_size": "x"}, "block_size"),
        ({"block_size": 12}, "power of two"),
        ({"num_blocks": 0}, "at least 2"),
        ({"spec_method": "magic"}, "spec_method"),
        ({"scheduler": "async"}, "scheduler"),
        ({"max_num_batched_tokens": 64, "token_budget": 64}, "the same thing"),
        ({"cost": {"coffee_ns": 1}}, "coffee_ns"),
        ({"cost": {"step_ns": -1}}, "cost.step_ns"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 9}, "token_budget 8"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 8}, "token_budget 8 is smaller than block_size 16"),
        ({"policy": "lifo"}, "no policy is called 'lifo'"),
        ({"preempt_mode": "swap"}, "set swap_blocks"),
    ],
)
def test_contradictions_and_strangers_are_refused(given, message):
    # Unknown, invalid and contradictory settings are refused.
    with pytest.raises(ConfigError, match=message):
        read_settings(given, WORK)
