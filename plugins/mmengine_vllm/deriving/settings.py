"""Reads the settings for vLLM's scheduler from a recorded log, for `scheduler_alone.py`."""

from mmengine.block_groups import log_order
from mmengine.config import EngineConfig
from mmengine.errors import LogError
from mmengine.events import vocabulary as ev
from mmengine_vllm.kv_groups import KV_SPECS, groups_of
from mmengine_vllm.vllm_object import VllmObject


def settings_of(config: EngineConfig, facts: dict[str, str]) -> dict[str, VllmObject]:
    """Return the settings for `scheduler_alone.py`. `config`, `facts`: the log's settings and
    fingerprints.
    """
    settings: dict[str, VllmObject] = {
        "block_size": config.block_size,
        "hash_block_size": _number(facts, "hash_block_size", config.block_size),
        "num_blocks": config.num_blocks,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": _number(facts, "max_num_batched_tokens", config.token_budget),
        "max_num_scheduled_tokens": config.token_budget,
        "max_model_len": config.max_model_len,
        "enable_prefix_caching": config.enable_prefix_caching,
        "scheduling_policy": config.policy,
        "long_prefill_token_threshold": config.long_prefill_token_threshold,
        "disable_chunked_mm_input": not config.split_media,
        "scheduler_reserve_full_isl": config.admission_reserve == "prompt",
        "async_scheduling": config.max_in_flight > 1,
        "encoder_budget": config.encoder_budget,
        "encoder_cache_size": config.encoder_cache_size,
        "second_runner": facts.get("vllm.use_v2_model_runner") == "True",
    }
    if config.num_draft_tokens:
        settings["num_draft_tokens"] = config.num_draft_tokens
        settings["draft_method"] = _draft_method(config, facts)
    if config.max_loras:
        settings |= {"enable_lora": True, "max_loras": config.max_loras}
    if KV_SPECS in facts:
        settings["kv_groups"] = groups_of(facts[KV_SPECS])
        first = _number(facts, "recorded_kv_group", 0, prefix="")
        settings["recorded_groups"] = log_order(config.block_groups) or (first,)
    return settings


def _draft_method(config: EngineConfig, facts: dict[str, str]) -> str:
    """Return a speculative method with which vLLM schedules as in the log. The method determines the number
    of lookahead slots, and which blocks vLLM drops from a prefix cache hit.
    """
    if not config.lookahead_tokens:
        return "ngram"
    if facts.get("vllm.use_eagle") != "True":
        return "draft_model"
    return "eagle3"


def _number(facts: dict[str, str], name: str, default: int, prefix: str = "vllm.") -> int:
    value = facts.get(prefix + name, "")
    return int(value) if value.isdigit() and len(value) < 10 else default


def check_version(started: ev.Started, installed: str) -> None:
    """Raise LogError unless the installed version of vLLM wrote the log."""
    if started.host != f"vllm {installed}":
        raise LogError(
            f"the log is of {started.host or 'mmengine'}, and vllm {installed} is installed: install the "
            "log's version beside mmengine, or leave out --with"
        )
