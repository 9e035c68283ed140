"""Advice for unknown setting names: other libraries' names, and misspelt names.

`with_settings` gives this advice for unknown keyword arguments.
"""

from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches

from mmengine.config import EngineConfig
from mmengine.errors import ConfigError

_NO_CODE = "no code from a checkpoint is executed; leave it out"
_REVISION = "name the revision in the model, such as owner/name@revision"
_TOKEN = "set the variable HF_TOKEN, or log in with the hub's client"
_MEMORY = "the KV pool takes the free memory; use {set}num_blocks=N for N blocks of 16 tokens"
_DEVICE = "use {option}device, and {set}tensor_parallel=N for N devices"
_QUANTIZE = "use {set}quantize=int8 or fp8, or a checkpoint that is quantised"
_MEDIA = "use {set}max_media_per_request=N"
_PROCESSOR = "the model's own processor is used; leave it out"
# Maps foreign names to advice. vLLM, transformers and llama.cpp have these names, but mmengine does not.
# {set} and {option} are replaced by "--set " and "--" on the command line, and by "" in Python.
FOREIGN = {
    "attn_implementation": "attention is chosen for the device; leave it out",
    "cache_dir": "set the variable HF_HOME",
    "code_revision": _NO_CODE,
    "cpu_offload_gb": "weights are not offloaded; use {set}quantize=int8, or a smaller model",
    "data_parallel_size": "start one server per device",
    "device_map": _DEVICE,
    "download_dir": "set the variable HF_HOME",
    "enable_chunked_prefill": "prompts are always cut into chunks; see {set}token_budget=N",
    "enable_lora": "use {set}max_loras=N",
    "enforce_eager": "use {set}cuda_graphs=false",
    "feature_extractor": _PROCESSOR,
    "framework": "the framework is torch; leave it out",
    "gpu_memory_utilization": _MEMORY,
    "guided_decoding_backend": "use {set}grammar_backend=NAME",
    "hf_token": _TOKEN,
    "image_processor": _PROCESSOR,
    "kv_cache_dtype": "use {set}kv_dtype=fp8",
    "kv_cache_memory_bytes": _MEMORY,
    "limit_mm_per_prompt": _MEDIA,
    "load_format": "the format is recognised; leave it out",
    "load_in_4bit": _QUANTIZE,
    "load_in_8bit": _QUANTIZE,
    "local_files_only": "set the variable HF_HUB_OFFLINE=1",
    "low_cpu_mem_usage": "weights are mapped, never copied twice; leave it out",
    "max_lora_rank": "use {set}lora_bytes=N",
    "max_memory": _MEMORY,
    "max_num_batched_tokens": "use {set}token_budget=N",
    "max_tokens": "an answer's length is a request's option, not the engine's",
    "mm_processor_cache_gb": "use {set}media_cache_bytes=N",
    "mm_processor_kwargs": "limits on pixels belong to a prompt's media_options",
    "n_batch": "use {set}token_budget=N",
    "n_ctx": "use {set}max_model_len=N",
    "n_gpu_layers": _DEVICE,
    "n_threads": "use {set}num_threads=N",
    "num_gpu_blocks_override": "use {set}num_blocks=N",
    "num_speculative_tokens": "use {set}num_draft_tokens=N",
    "offload_folder": "weights are not offloaded; use {set}quantize=int8, or a smaller model",
    "pipeline_parallel_size": "use {set}tensor_parallel=N",
    "processor": _PROCESSOR,
    "quantization": _QUANTIZE,
    "quantization_config": _QUANTIZE,
    "revision": _REVISION,
    "scheduling_policy": "use {set}policy=fcfs or priority",
    "seed": "the seed is a request's option, not the engine's",
    "speculative_config": "use {set}spec=NAME",
    "speculative_model": "use {set}spec=eagle3=FOLDER",
    "subfolder": "give the folder as the model",
    "swap_space": "use {set}swap_blocks=N",
    "temperature": "the temperature is a request's option, not the engine's",
    "tensor_parallel_size": "use {set}tensor_parallel=N",
    "token": _TOKEN,
    "tokenizer": "the model's own tokenizer is used; leave it out",
    "tokenizer_mode": "the model's own tokenizer is used; leave it out",
    "tokenizer_revision": _REVISION,
    "torch_dtype": "use {option}dtype",
    "trust_remote_code": _NO_CODE,
    "use_auth_token": _TOKEN,
    "use_fast": _PROCESSOR,
    "variant": _REVISION,
    "video_processor": _PROCESSOR,
}


def advice_for(name: str, known: Iterable[str] = (), *, is_command_line: bool = False) -> str:
    """Return advice for the unknown setting `name`, or "" if there is none.

    For a misspelt name, the advice is the nearest name in EngineConfig and `known`.
    """
    if name in FOREIGN:
        marks = {"set": "--set ", "option": "--"} if is_command_line else {"set": "", "option": ""}
        return FOREIGN[name].format(**marks)
    near = get_close_matches(name[:64], [*EngineConfig.__struct_fields__, *known], 1, 0.7)
    return f"did you mean {near[0]}?" if near else ""


def with_settings(
    config: EngineConfig | None, settings: Mapping[str, object], arguments: Collection[str]
) -> EngineConfig:
    """Return `config` (None: the defaults) with `settings`, which a caller passed as keyword arguments.

    `arguments`: further names that the advice on a misspelt name may suggest. Raises ConfigError for an
    unknown name.
    """
    unknown = [name for name in settings if name not in EngineConfig.__struct_fields__]
    if unknown:
        advice = advice_for(unknown[0], arguments)
        advice = advice or "docs/reference/settings.md lists the settings"
        raise ConfigError(f"unknown setting {unknown[0]!r:.80}: {advice}")
    return EngineConfig.from_dict({**(config or EngineConfig()).as_dict(), **settings})
