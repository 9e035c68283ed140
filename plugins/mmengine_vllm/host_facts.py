"""Translates the configuration of vLLM's scheduler into STARTED, the first event of a log."""

from collections.abc import Callable

from msgspec.structs import replace

from mmengine.config import EngineConfig
from mmengine.core import first_events
from mmengine.events import vocabulary as ev
from mmengine_vllm.kv_groups import (
    KV_SPECS,
    block_groups_of,
    described_groups,
    full_attention_group,
    is_full_attention,
    specs_of,
)
from mmengine_vllm.vllm_object import VllmObject, read

NO_LIMIT = 2**20
VERSIONS = ("0.30", "0.31", "0.32", "0.33")  # The vLLM versions for which the recorder was written.
# SchedulerOutput's fields in these versions.
FIELDS = frozenset(
    (
        *("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "finished_req_ids"),
        *("total_num_scheduled_tokens", "scheduled_spec_decode_tokens", "scheduled_encoder_inputs"),
        *("free_encoder_mm_hashes", "encoder_input_updates", "scheduled_encoder_input_stats"),
        *("preempted_req_ids", "has_structured_output_requests", "pending_structured_output_tokens"),
        *("num_invalid_spec_tokens", "kv_connector_metadata", "has_sync_kv_loads"),
        *("aux_output_connector_metadata", "ec_connector_metadata", "ec_manager_metadata"),
        *("new_block_ids_to_zero", "kv_cache_block_copies", "kv_connector_block_state"),
        *("num_spec_tokens_to_schedule", "num_common_prefix_blocks", "skip_drafts"),
    )
)
# Attributes of the scheduler and its configuration that affect decisions and that EngineConfig lacks.
_OF_SCHEDULER = (
    *("hash_block_size", "max_num_active_reqs", "num_prefill_lookahead", "use_eagle", "use_eagle_block_drop"),
    *("use_v2_model_runner", "num_sampled_tokens_per_step", "prefix_replay_tokens"),
)
_OF_CONFIG = (
    *(
        "max_num_batched_tokens",
        "enable_chunked_prefill",
        "long_prefill_token_threshold_adaptive",
        "watermark",
    ),
    "async_scheduling",
)


def is_overlapping(scheduler: VllmObject) -> bool:
    """Return whether vLLM schedules a step before the previous step's output has arrived."""
    return bool(read(scheduler, "scheduler_config.async_scheduling")) or bool(read(scheduler, "use_pp"))


def engine_config(scheduler: VllmObject) -> EngineConfig:
    """Return the scheduler's settings as an EngineConfig with `compat` "vllm"."""
    limits = scheduler.scheduler_config
    threshold = int(read(limits, "long_prefill_token_threshold", 0))
    speculative = int(read(scheduler, "num_spec_tokens", 0))
    adapters = read(scheduler, "lora_config.max_loras", 0)
    return EngineConfig(
        max_num_seqs=scheduler.max_num_running_reqs,
        token_budget=scheduler.max_num_scheduled_tokens,
        max_model_len=scheduler.max_model_len,
        block_size=scheduler.block_size,
        num_blocks=scheduler.kv_cache_config.num_blocks,
        enable_prefix_caching=bool(read(scheduler, "cache_config.enable_prefix_caching")),
        policy=str(read(limits, "policy", "fcfs")),
        spec="none",
        num_draft_tokens=speculative,
        lookahead_tokens=int(read(scheduler, "num_lookahead_tokens", 0)),
        draft_policy="all",
        encoder_budget=max(1, int(read(scheduler, "max_num_encoder_input_tokens", 1))),
        encoder_cache_size=max(1, int(read(scheduler, "encoder_cache_manager.cache_size", 1))),
        long_prefill_token_threshold=threshold,
        split_media=not read(limits, "disable_chunked_mm_input", False),
        admission_reserve="prompt" if read(scheduler, "scheduler_reserve_full_isl") else "none",
        max_in_flight=2 if is_overlapping(scheduler) else 1,
        compat="vllm",
        preempt_mode="recompute",
        max_loras=int(adapters),
        max_waiting=NO_LIMIT,
        thrash_limit=NO_LIMIT,
        block_groups=block_groups_of(scheduler),
        max_media_per_request=4096,
        log_sync="never",
    )


def not_derived(scheduler: VllmObject) -> list[str]:
    """Return the names of features in use that mmengine's rules do not model."""
    specs = specs_of(scheduler)
    tests: tuple[tuple[str, Callable[[], bool]], ...] = (
        ("KV connector", lambda: read(scheduler, "connector") is not None),
        ("encoder connector", lambda: read(scheduler, "ec_connector") is not None),
        ("KV groups without full attention", lambda: len(specs) == 1 and not is_full_attention(specs[0])),
        ("hybrid KV groups", lambda: len(specs) != 1 and not block_groups_of(scheduler)),
        ("pipeline parallel", lambda: bool(read(scheduler, "use_pp"))),
        ("encoder-decoder model", lambda: bool(read(scheduler, "is_encoder_decoder"))),
        ("pooling model", lambda: read(scheduler, "vllm_config.model_config.runner_type") == "pooling"),
        ("dynamic speculation", lambda: read(scheduler, "dynamic_sd_lookup") is not None),
        ("encoder cache manager", lambda: read(scheduler, "vllm_config.ec_manager_config.cls") is not None),
    )
    return [name for name, is_used in tests if is_used()]


def fingerprints(scheduler: VllmObject, version: str, content: str) -> dict[str, str]:
    """Return the fingerprints for STARTED: the model, the features from `not_derived`, and the settings that
    EngineConfig lacks.
    """
    facts = {
        "executor": f"vllm {version}, recorded",
        "weights": str(read(scheduler, "vllm_config.model_config.model", "")),
        "content": content,
        "not_derived": "; ".join(not_derived(scheduler)),
    }
    groups = read(scheduler, "kv_cache_config.kv_cache_groups", ())
    kinds = [type(read(group, "kv_cache_spec")).__name__ for group in groups]
    facts["kv_groups"] = "; ".join(kinds)
    if kinds not in ([], ["FullAttentionSpec"]):
        facts[KV_SPECS] = described_groups(groups)
    facts["recorded_kv_group"] = str(full_attention_group(scheduler))
    for owner, names in ((scheduler, _OF_SCHEDULER), (scheduler.scheduler_config, _OF_CONFIG)):
        facts.update(
            (f"vllm.{name}", str(value)) for name in names if (value := read(owner, name)) is not None
        )
    return {name: value for name, value in facts.items() if value}


def is_known(version: str) -> bool:
    """Return whether the recorder was written for this version of vLLM."""
    return ".".join(version.split(".")[:2]) in VERSIONS


def unknown_fields(output: VllmObject) -> list[str]:
    """Return the fields of a SchedulerOutput that no known version has."""
    return sorted(getattr(output, "__dict__", {}).keys() - FIELDS)


def started_of(scheduler: VllmObject, version: str, content: str) -> ev.Started:
    """Return STARTED for this scheduler's log. Raises ConfigError if EngineConfig cannot express the
    scheduler's settings.
    """
    config = engine_config(scheduler)
    config.check_foldable()
    facts = fingerprints(scheduler, version, content)
    started = first_events.started_of(config, facts, host=f"vllm {version}")
    return started if read(scheduler, "connector") is None else without_contents(started)


def begun_midway(started: ev.Started, facts: dict[str, str]) -> ev.Started:
    """Return STARTED for a log that begins while requests run. `facts`: further fingerprints."""
    missing = [started.fingerprints.get("not_derived", ""), "a beginning while requests run"]
    facts = {**started.fingerprints, **facts, "not_derived": "; ".join(filter(None, missing))}
    return without_contents(replace(started, fingerprints=facts))


def without_contents(started: ev.Started) -> ev.Started:
    """Return STARTED for a log that lacks the contents of some KV blocks."""
    return replace(started, constants=replace(started.constants, knows_contents=False))
