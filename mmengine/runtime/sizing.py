"""The sizes that a config leaves open, from the model and from what memory is there."""

import msgspec
import torch

from mmengine.config import EngineConfig
from mmengine.errors import ConfigError
from mmengine.models.plugin import VisionLanguageModel
from mmengine.runtime.eagle3.drafter import kv_spec
from mmengine.runtime.kv import FP8, blocks_for_memory, bytes_per_block
from mmengine.runtime.memory import Memory
from mmengine.runtime.profile import CudaMeter, measure
from mmengine.spec_decode.eagle3.loading import HeadFolder

CUDA_RESERVE_SHARE = 0.1  # of a GPU's memory
CPU_MEMORY_SHARE = 0.25
CPU_FULL_REQUESTS = 4  # requests of full length that the CPU's pool is sized for, at least 256 MiB
CPU_MIN_BYTES = 256 * 2**20
GROWTH = 1.5  # the encoder cache is copied when it doubles: the old half beside the new whole


def resolve(
    config: EngineConfig,
    model: VisionLanguageModel,
    head: HeadFolder | None,
    dtype: torch.dtype,
    device: torch.device,
    eos_token_ids: tuple[int, ...],
) -> EngineConfig:
    """Fill in what is 0: the pool from memory, the length from the model and the pool. Blocks hold the KV of
    the model and of the draft head. Raises ConfigError for what does not fit."""
    spec, size = model.spec, config.block_size
    if config.max_model_len > spec.max_model_len:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is more than the model's own {spec.max_model_len}"
        )
    wanted_len = config.max_model_len or spec.max_model_len
    blocks_each = -(-wanted_len // size)
    specs = [spec] if head is None else [spec, kv_spec(head.config)]
    stored = FP8 if config.kv_dtype == "fp8" else dtype
    block_bytes = bytes_per_block(specs, stored, size)
    needed = -(-config.max_model_len // size) + 1  # for one request, where a length was asked for
    if device.type == "cuda":
        memory = _of_gpu(model, config, head, dtype, device)
        num_blocks = config.num_blocks or memory.blocks(block_bytes, needed)
    else:
        memory = Memory(available_memory(), 0, features=_features(model, config, dtype))
        num_blocks = config.num_blocks
        if not num_blocks:
            room = _kv_bytes_of_cpu(memory.total, blocks_each * block_bytes)
            num_blocks = blocks_for_memory(specs, stored, size, room)
    if config.num_blocks:
        memory.check(num_blocks, block_bytes)
    else:
        num_blocks = min(num_blocks, config.max_num_seqs * blocks_each + 1)
    room = (num_blocks - 1) * size
    if room < 2 or config.max_model_len > room:
        raise ConfigError(
            f"num_blocks {num_blocks} of {size} tokens hold {max(0, room)} tokens (one block is the dummy), "
            f"less than max_model_len {config.max_model_len or 2}; raise num_blocks or lower max_model_len"
        )
    chooses = config.draft_policy == "auto" and config.num_draft_tokens and not config.compat
    return msgspec.structs.replace(
        config,
        draft_policy="goodput" if chooses else config.draft_policy,
        max_in_flight=config.max_in_flight or steps_in_flight(config, device),
        num_blocks=num_blocks,
        max_model_len=min(wanted_len, room),
        eos_token_ids=config.eos_token_ids or eos_token_ids,
    )


def steps_in_flight(config: EngineConfig, device: torch.device) -> int:
    """What `max_in_flight` is where it is left open: a CPU computes a step where its result is awaited."""
    return 2 if device.type == "cuda" and not config.compat else 1


def _of_gpu(
    model: VisionLanguageModel,
    config: EngineConfig,
    head: HeadFolder | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Memory:
    """With the weights of the model loaded, and those of the draft head not (not yet run on a GPU)."""
    peaks = measure(model, config, device, CudaMeter(device))
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    head_bytes = 0 if head is None else sum(entry.num_bytes for entry in head.entries.values())
    return Memory(
        total=total,
        taken=total - free + head_bytes,
        layers=peaks.layers,
        encoder=peaks.encoder,
        features=_features(model, config, dtype),
        reserve=int(total * CUDA_RESERVE_SHARE),
    )


def _features(model: VisionLanguageModel, config: EngineConfig, dtype: torch.dtype) -> int:
    """Bytes of the encoder cache when it is full, and grows to that."""
    width = (1 + model.spec.num_deepstack) * model.spec.hidden_size
    return int(GROWTH * config.encoder_cache_size * width * dtype.itemsize)


def _kv_bytes_of_cpu(available: int, full_request: int) -> int:
    """For the pool of a CPU: what some requests need, and no more than a share of the memory."""
    wanted = max(CPU_MIN_BYTES, CPU_FULL_REQUESTS * full_request)
    return min(wanted, int(available * CPU_MEMORY_SHARE))


def available_memory() -> int:
    """Bytes of the host that can be had without swapping; half of 4 GiB where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 2 * 2**30
