"""Replaces the zeros in a config with sizes that fit the model and the available memory."""

import dataclasses
import math

import msgspec
import torch

from mmengine.config import ENCODER_CACHE, EngineConfig
from mmengine.errors import ConfigError
from mmengine.models.layer_groups import block_groups, block_spec
from mmengine.models.plugin import ModelSpec, VisionLanguageModel
from mmengine.runtime.device.placement import Placement
from mmengine.runtime.device.port import Device, Meter
from mmengine.runtime.drafting.head.network import HeadFiles, kv_spec
from mmengine.runtime.kv.memory import Memory, cached_embeds
from mmengine.runtime.kv.pool import FP8, MIN_BLOCKS, blocks_for_memory, bytes_per_block
from mmengine.runtime.kv.states import slots_for, state_bytes
from mmengine.runtime.startup.profile import measure

RESERVE_SHARE = 0.1  # share of a GPU's memory that stays reserved (kv/memory.py)
CPU_MEMORY_SHARE = 0.25  # maximum share of free memory for a CPU's default KV pool
# A CPU's default KV pool fits this many full-length requests, but has at least CPU_MIN_BYTES.
CPU_FULL_REQUESTS = 4
CPU_MIN_BYTES = 256 * 2**20
STATE_SHARE = 0.125  # maximum share of free memory for the default number of state slots
GROWTH = 1.5  # a growing CPU encoder cache needs its new buffer and the old buffer, which is half as large


def resolve(
    config: EngineConfig,
    model: VisionLanguageModel,
    head: HeadFiles | None,
    placement: Placement,
    eos_token_ids: tuple[int, ...],
) -> EngineConfig:
    """Return `config` with all zeros replaced. For example, num_blocks follows from the memory, and
    max_model_len from the model and the pool. Raises ConfigError for sizes that do not fit. A block contains
    KV for the model and the draft head.
    """
    spec, size, dtype = model.spec, config.block_size, placement.dtype
    if config.max_model_len > spec.max_model_len:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is more than the model's maximum {spec.max_model_len}"
        )
    if spec.state is not None:
        _check_states(config)
    wanted_len = config.max_model_len or spec.max_model_len
    config = _with_groups(config, spec, head, wanted_len)
    blocks_each = config.most_blocks(wanted_len)
    block_bytes = block_bytes_of(config, spec, head, dtype)
    needed = config.most_blocks(config.max_model_len) + 1  # for one request of max_model_len
    embed_bytes = (1 + spec.num_deepstack) * spec.hidden_size * dtype.itemsize if spec.has_encoder else 0
    meter = placement.device.meter()
    if meter is not None:
        memory = _with_adapters(config, _measured(model, config, head, placement, meter))
        config, memory = _with_slots(config, spec, dtype, memory)
        kv_bytes = (config.num_blocks or max(needed, MIN_BLOCKS)) * block_bytes
        cached, memory = _with_cache(config, memory, embed_bytes, kv_bytes, wanted_len)
        num_blocks = config.num_blocks or memory.blocks(block_bytes, needed)
    else:
        cached = config.encoder_cache_size or max(ENCODER_CACHE, config.max_item_embeds)
        memory = Memory(placement.device.memory()[0], 0, features=int(GROWTH * cached * embed_bytes))
        memory = _with_adapters(config, memory)
        config, memory = _with_slots(config, spec, dtype, memory)
        num_blocks = config.num_blocks
        if not num_blocks:
            room = _kv_bytes_of_cpu(memory.left, blocks_each * block_bytes)
            num_blocks = blocks_for_memory(block_bytes, size, room)
    if config.num_blocks:
        memory.check(num_blocks, block_bytes)
    else:
        num_blocks = min(num_blocks, config.max_num_seqs * blocks_each + 1)
    room = config.longest_row(num_blocks)
    if room < 2 or config.max_model_len > room:
        raise ConfigError(
            f"num_blocks {num_blocks} of {size} tokens store {max(0, room)} tokens (one block is the dummy), "
            f"less than max_model_len {config.max_model_len or 2}; raise num_blocks or lower max_model_len"
        )
    chooses = config.draft_policy == "auto" and config.num_draft_tokens and not config.compat
    return msgspec.structs.replace(
        config,
        draft_policy="goodput" if chooses else config.draft_policy,
        max_in_flight=config.max_in_flight or steps_in_flight(config, placement.device),
        num_blocks=num_blocks,
        encoder_cache_size=cached,
        max_model_len=min(wanted_len, room),
        eos_token_ids=config.eos_token_ids or eos_token_ids,
        atomic_runs=config.atomic_runs or spec.atomic_runs,
        whole_prompt=config.whole_prompt or spec.whole_prompt,
    )


def _check_states(config: EngineConfig) -> None:
    """Raise ConfigError for settings that cannot be combined with recurrent states."""
    if config.compat:
        raise ConfigError(f"compat {config.compat} does not support recurrent states, which this model has")
    if config.swap_blocks:
        raise ConfigError(
            "swap_blocks is not supported for this model: a preempted request with a recurrent state is "
            "computed again from its last kept state; remove swap_blocks"
        )


def _with_groups(config: EngineConfig, spec: ModelSpec, head: HeadFiles | None, longest: int) -> EngineConfig:
    """Return the config with the model's block groups. If the settings exclude groups, or groups do not
    reduce the memory for a request of `longest` tokens, return the config unchanged.
    """
    excluded = (config.compat, config.lookahead_tokens, config.swap_blocks, config.block_store)
    if config.block_groups or head is not None or any(excluded) or config.tensor_parallel > 1:
        return config
    grouped = msgspec.structs.replace(config, block_groups=block_groups(spec, longest))
    if not grouped.block_groups:
        return config
    layers_before = config.most_blocks(longest) * spec.num_kv_layers
    layers = grouped.most_blocks(longest) * len(grouped.block_groups[0].layers)
    return grouped if layers < layers_before else config


def _with_slots(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, memory: Memory
) -> tuple[EngineConfig, Memory]:
    """Return the config with num_state_slots set, and the memory including the state pool."""
    if spec.state is None:
        return msgspec.structs.replace(config, num_state_slots=0), memory
    slots = config.num_state_slots or slots_for(spec, config, dtype, int(max(0, memory.left) * STATE_SHARE))
    config = msgspec.structs.replace(config, num_state_slots=slots)
    return config, dataclasses.replace(memory, states=state_bytes(spec, config, dtype))


def _with_adapters(config: EngineConfig, memory: Memory) -> Memory:
    return dataclasses.replace(memory, adapters=config.lora_bytes if config.max_loras else 0)


def block_bytes_of(config: EngineConfig, spec: ModelSpec, head: HeadFiles | None, dtype: torch.dtype) -> int:
    """Return a KV block's size in bytes, including the draft head's KV."""
    spec = block_spec(spec, config.block_groups)
    specs = [spec] if head is None else [spec, kv_spec(head.config)]
    return bytes_per_block(specs, FP8 if config.kv_dtype == "fp8" else dtype, config.block_size)


def steps_in_flight(config: EngineConfig, device: Device) -> int:
    """Return the default for `max_in_flight`. A CPU does not compute steps in the background, so its default
    is 1.
    """
    return 2 if device.is_async and not config.compat else 1


def _measured(
    model: VisionLanguageModel,
    config: EngineConfig,
    head: HeadFiles | None,
    placement: Placement,
    meter: Meter,
) -> Memory:
    """Return the measured memory of a device, with the model's weights already loaded. The draft head's
    weights, which are loaded later, are added. The encoder cache is not included. This function was not yet
    run on a GPU.
    """
    device = placement.device
    aux_hidden_states = () if head is None else head.config.aux_layers
    peaks = measure(
        model,
        config,
        device.torch_device,
        meter,
        aux_hidden_states=aux_hidden_states,
        captures=config.cuda_graphs,
    )
    device.release_unused()
    free, total = device.memory()
    values = 0 if head is None else sum(math.prod(entry.shape) for entry in head.entries.values())
    return Memory(
        total=total,
        taken=total - free + values * placement.dtype.itemsize,
        layers=peaks.layers,
        encoder=peaks.encoder,
        reserve=int(total * RESERVE_SHARE),
        graphs=peaks.graphs,
    )


def _with_cache(
    config: EngineConfig, memory: Memory, embed_bytes: int, kv_bytes: int, longest: int
) -> tuple[int, Memory]:
    """Return a GPU's encoder cache size in embeddings, and the memory including the cache.

    By default, the cache fits the largest item and a step's encoder budget, because other items are encoded
    while a row reads the largest item in chunks. Without an encoder (`embed_bytes` 0) no memory is reserved.
    """
    cached = config.encoder_cache_size or (0 if embed_bytes else ENCODER_CACHE)
    if cached:
        return cached, dataclasses.replace(memory, features=cached * embed_bytes)
    item = max(1, min(config.largest_item, longest - 1))
    wanted = item + config.encoder_budget
    cached = cached_embeds(memory.left, embed_bytes, kv_bytes, least=item, wanted=wanted)
    features = cached * embed_bytes
    return cached, dataclasses.replace(memory, features=features, cache_setting="encoder_budget")


def _kv_bytes_of_cpu(left: int, full_request: int) -> int:
    """Return a CPU's default KV pool size in bytes. `full_request`: bytes of a full-length request. `left`:
    the memory that remains free with the weights and a full encoder cache. The pool gets at most
    CPU_MEMORY_SHARE of `left`. Steps and other programs use the rest.
    """
    wanted = max(CPU_MIN_BYTES, CPU_FULL_REQUESTS * full_request)
    return min(wanted, int(max(0, left) * CPU_MEMORY_SHARE))
