"""Tests that invalid and contradictory settings are refused."""

import msgspec
import numpy as np
import pytest

from mmengine.config import EngineConfig
from mmengine.core.engine import EngineCore
from mmengine.errors import ConfigError
from mmengine.simulation.simulated_executor import SimulatedExecutor
from tests.core.small_engine import Bench, request, settings_of

WRONG = {
    "max_num_seqs": [0, 65537],
    "token_budget": [0, 2**20 + 1],
    "max_model_len": [-1, 2**24 + 1],
    "block_size": [0, 3, 24, 2048],
    "num_blocks": [-1, 2**22 + 1],
    "encoder_budget": [0],
    "encoder_cache_size": [-1, 2**26 + 1],
    "max_waiting": [0],
    "max_retries": [-1],
    "checkpoint_interval": [0],
    "long_prefill_token_threshold": [-1],
    "max_media_per_request": [-1],
    "max_item_embeds": [-1, 2**24 + 1],
    "eos_token_ids": [(-1,), (2**31,)],
}


@pytest.mark.parametrize("name, value", [(name, value) for name, values in WRONG.items() for value in values])
def test_settings_out_of_range(name, value):
    with pytest.raises(ConfigError, match=name):
        msgspec.structs.replace(settings_of(), **{name: value}).check()


@pytest.mark.parametrize(
    "wrong",
    [
        {"token_budget": 64.0},
        {"token_budget": float("nan")},
        {"token_budget": True},
        {"token_budget": "64"},
        {"token_budget": None},
        {"token_budget": np.int64(64)},
        {"token_budget": 10**30},
        {"split_media": 1},
        {"preempt_mode": "swop"},
        {"compat": "sglang"},
        {"eos_token_ids": (1.5,)},
    ],
    ids=str,
)
def test_settings_of_another_type(wrong):
    (name,) = wrong
    with pytest.raises(ConfigError, match=f"{name}|invalid settings"):
        msgspec.structs.replace(settings_of(), **wrong).check()


OPPOSED = {  # by error message: (contradictory settings, changes that make them valid)
    "token_budget 7 is smaller than max_num_seqs 8": (
        {"max_num_seqs": 8, "token_budget": 7},
        {"token_budget": 8},
    ),
    "token_budget 3 is smaller than block_size 4": (
        {"max_num_seqs": 2, "token_budget": 3},
        {"block_size": 2},
    ),
    "num_draft_tokens 4 .* never fit token_budget 4": (
        {"num_draft_tokens": 4, "token_budget": 4},
        {"token_budget": 5},
    ),
    "lookahead_tokens 2 .* num_draft_tokens is 0": ({"lookahead_tokens": 2}, {"num_draft_tokens": 2}),
    "max_in_flight 2 cannot go with .* compat": ({"max_in_flight": 2, "compat": "vllm"}, {"compat": ""}),
    "preempt_mode swap .* set swap_blocks": ({"preempt_mode": "swap"}, {"swap_blocks": 9}),
    "swap_blocks 9 .* preempt_mode recompute": (
        {"preempt_mode": "recompute", "swap_blocks": 9},
        {"preempt_mode": "auto"},
    ),
    "max_item_embeds 65 is larger than encoder_budget 64": (
        {"max_item_embeds": 65, "encoder_cache_size": 99},
        {"encoder_budget": 65},
    ),
    "max_item_embeds 65 is larger than encoder_cache_size 64": (
        {"max_item_embeds": 65, "encoder_budget": 99},
        {"encoder_cache_size": 65},
    ),
    "token_budget 32 is smaller than an item of 63 embeddings that split_media=false": (
        {"split_media": False, "token_budget": 32},
        {"max_item_embeds": 32},
    ),
    "long_prefill_token_threshold 8 is smaller than an item of 63 embeddings that split_media=false": (
        {"split_media": False, "long_prefill_token_threshold": 8},
        {"encoder_budget": 8},
    ),
    "compat vllm knows the policies fcfs and priority, not prefill_first": (
        {"compat": "vllm", "policy": "prefill_first"},
        {"policy": "priority"},
    ),
    "compat vllm has no host pool, but swap_blocks is 9": (
        {"compat": "vllm", "swap_blocks": 9},
        {"compat": ""},
    ),
    "compat vllm does not know atomic_runs": ({"compat": "vllm", "atomic_runs": True}, {"compat": ""}),
    "whole_prompt cannot go with recurrent states .num_state_slots 3": (
        {"whole_prompt": True, "num_state_slots": 3},
        {"num_state_slots": 0},
    ),
    "lookahead_tokens 1 reads tokens of the next chunk, which atomic_runs does": (
        {"atomic_runs": True, "num_draft_tokens": 1, "lookahead_tokens": 1},
        {"lookahead_tokens": 0},
    ),
    "block_store stores blocks of any prefix, which atomic_runs does not allow": (
        {"atomic_runs": True, "block_store": "folder", "block_store_path": "/nowhere"},
        {"block_store": ""},
    ),
    "encoder_piece 5 encodes images over several steps, and whole_prompt": (
        {"whole_prompt": True, "encoder_piece": 5},
        {"encoder_piece": 0},
    ),
    "compat vllm has no admission_reserve output": (
        {"compat": "vllm", "admission_reserve": "output"},
        {"admission_reserve": "prompt"},
    ),
}


@pytest.mark.parametrize("words", OPPOSED)
def test_settings_that_contradict_each_other(words):
    opposed, mended = OPPOSED[words]
    with pytest.raises(ConfigError, match=words) as error:
        settings_of(**opposed).check()
    assert "\n" not in str(error.value)
    settings_of(**{**opposed, **mended}).check()


def test_a_log_folds_though_its_settings_are_refused_today():
    config = settings_of(preempt_mode="recompute", swap_blocks=9)
    config.check_foldable()
    with pytest.raises(ConfigError):
        config.check_resolved()


CONTRADICTIONS = {
    "max_model_len 0 and num_blocks 65": {"max_model_len": 0},
    "max_model_len 64 and num_blocks 0": {"num_blocks": 0},
    "must both be at least 2": {"max_model_len": 1},
    "hold 60 tokens .* less than max_model_len 64": {"num_blocks": 16},
    "no policy is called 'lifo'; there are fcfs, prefill_first, priority": {"policy": "lifo"},
}


@pytest.mark.parametrize("words", CONTRADICTIONS)
def test_an_engine_is_not_made_of_contradictions(words):
    config = settings_of(**CONTRADICTIONS[words])
    with pytest.raises(ConfigError, match=words):
        EngineCore(config, SimulatedExecutor(settings_of()))


def test_the_smallest_engine_there_is():
    bench = Bench(max_num_seqs=1, token_budget=1, max_model_len=2, block_size=1, num_blocks=3)
    bench.submit(request("a", 1))
    bench.run()
    assert bench.ends == {"a": ("length", "")} and len(bench.tokens["a"]) == 1


def test_settings_survive_a_log_and_strangers_are_refused():
    config = settings_of(eos_token_ids=(1, 2))
    assert EngineConfig.from_dict(config.as_dict()) == config
    for settings in ({"no_such": 1}, {"num_blocks": "9"}, {"num_blocks": True}, {"log_sync": "maybe"}):
        with pytest.raises(ConfigError, match="invalid settings"):
            EngineConfig.from_dict(config.as_dict() | settings)
