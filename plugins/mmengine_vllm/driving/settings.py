"""Translates vLLM's configuration into mmengine's settings, and refuses unsupported options."""

import os
from collections.abc import Iterator

from mmengine.config import EngineConfig
from mmengine.errors import ConfigError
from mmengine_vllm.vllm_object import VllmObject

MAX_WAITING = 2**20
MAX_LORA_BYTES = 2**50
COMPAT = "MMENGINE_COMPAT"


def engine_config(
    vllm_config: VllmObject, kv_cache_config: VllmObject, block_size: int, encoder_sizes: tuple[int, int]
) -> EngineConfig:
    """Return the settings with which the core schedules requests for vLLM's workers.

    `encoder_sizes`: the encoder's compute budget and the encoder cache's size, in embeddings. With the
    environment variable MMENGINE_COMPAT=vllm, vLLM's scheduling rules replace mmengine's. Raises ConfigError
    with a list of the unsupported options.
    """
    unsupported = list(unsupported_options(vllm_config, kv_cache_config))
    if unsupported:
        raise ConfigError(
            f"mmengine_vllm.Scheduler does not support {'; '.join(unsupported)}. Remove these options, or "
            "use mmengine_vllm.RecordingScheduler, which records vLLM's own scheduler"
        )
    scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
    rules = os.environ.get(COMPAT, "")
    if rules not in ("", "vllm"):
        raise ConfigError(f'{COMPAT} must be "" or "vllm", not {rules!r}')
    budget, cache_size = encoder_sizes
    lora = vllm_config.lora_config
    config = EngineConfig(
        max_num_seqs=scheduler.max_num_seqs,
        token_budget=_token_budget(scheduler),
        max_model_len=model.max_model_len,
        block_size=block_size,
        num_blocks=kv_cache_config.num_blocks,
        enable_prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
        policy=scheduler.policy,
        spec="none",
        num_draft_tokens=vllm_config.num_speculative_tokens,
        lookahead_tokens=vllm_config.num_lookahead_tokens,
        draft_policy="all",
        encoder_budget=max(1, budget),
        encoder_cache_size=max(1, cache_size),
        long_prefill_token_threshold=scheduler.long_prefill_token_threshold,
        split_media=not scheduler.disable_chunked_mm_input,
        max_in_flight=2 if scheduler.async_scheduling else 1,
        max_waiting=MAX_WAITING,
        max_loras=lora.max_loras if lora is not None else 0,
        lora_bytes=MAX_LORA_BYTES,
        compat="vllm" if rules else "",
        log_sync="never",
    )
    config.check_resolved()
    return config


def _token_budget(scheduler: VllmObject) -> int:
    limit = getattr(scheduler, "max_num_scheduled_tokens", None)
    return int(scheduler.max_num_batched_tokens if limit is None else limit)


def unsupported_options(vllm_config: VllmObject, kv_cache_config: VllmObject) -> Iterator[str]:
    """Yield a phrase for each option in use that the core does not support."""
    parallel, scheduler, model = (
        vllm_config.parallel_config,
        vllm_config.scheduler_config,
        vllm_config.model_config,
    )
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        yield f"{len(groups)} KV cache groups (hybrid models)"
    elif type(groups[0].kv_cache_spec).__name__ not in ("FullAttentionSpec", "MLAAttentionSpec"):
        yield f"KV caches of type {type(groups[0].kv_cache_spec).__name__}"
    if vllm_config.kv_transfer_config is not None:
        yield "KV connectors (--kv-transfer-config)"
    if getattr(vllm_config, "ec_transfer_config", None) is not None:
        yield "encoder cache connectors (--ec-transfer-config)"
    if parallel.pipeline_parallel_size > 1:
        yield f"pipeline parallelism (--pipeline-parallel-size {parallel.pipeline_parallel_size})"
    if getattr(parallel, "decode_context_parallel_size", 1) > 1:
        yield "decode context parallelism (--decode-context-parallel-size)"
    if model.runner_type != "generate":
        yield f"the runner {model.runner_type} (pooling models)"
    if model.is_encoder_decoder:
        yield "encoder-decoder models"
    if not scheduler.enable_chunked_prefill:
        yield "prompts that are never chunked (--no-enable-chunked-prefill)"
    if vllm_config.kv_events_config is not None and vllm_config.kv_events_config.enable_kv_cache_events:
        yield "KV events (--kv-events-config)"
    if scheduler.async_scheduling and vllm_config.num_speculative_tokens:
        yield "drafts with asynchronous scheduling (add --no-async-scheduling)"
    lengths = getattr(vllm_config.speculative_config, "num_speculative_tokens_per_batch_size", None)
    if lengths:
        yield "a number of drafts that depends on the batch"
