# mypy: allow-untyped-defs, allow-untyped-calls
"""Creates the objects for running vLLM's scheduler without a model: a small configuration, requests, and a
model runner's results. Must not import mmengine, because `mmengine log minimize --with` writes pytest files
with a copy of this module.
"""

import copy
import json
import tempfile
from functools import cache, lru_cache
from pathlib import Path

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1 import kv_cache_interface
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "torch_dtype": "float32",
}
# Settings that `make_scheduler` and other callers read. EngineArgs has no such arguments.
_OF_SCHEDULER = (
    *("encoder_budget", "encoder_cache_size", "hash_block_size", "kv_groups", "second_runner"),
    "recorded_groups",
)


@cache
def model_folder(max_model_len):
    """Return a folder with a text model's configuration, without weights."""
    folder = Path(tempfile.mkdtemp())
    model = {**MODEL, "max_position_embeddings": max_model_len}
    (folder / "config.json").write_text(json.dumps(model))
    return str(folder)


def engine_config(settings):
    """Return a new VllmConfig for a text model. `settings`: arguments for EngineArgs, and the settings
    that `_engine_config` pops. Settings in _OF_SCHEDULER are ignored.
    """
    names = sorted(settings.keys() - {*_OF_SCHEDULER})
    return copy.deepcopy(_engine_config(tuple((name, settings[name]) for name in names)))


@lru_cache(64)
def _engine_config(items):
    settings = dict(items)
    drafts, method = settings.pop("num_draft_tokens", 0), settings.pop("draft_method", "ngram")
    num_blocks, overlaps = settings.pop("num_blocks"), settings.pop("async_scheduling", False)
    limit = settings.pop("max_num_scheduled_tokens", None)
    if drafts:
        lengths = {"prompt_lookup_max": 3, "prompt_lookup_min": 1, "num_speculative_tokens": drafts}
        settings["speculative_config"] = {"method": "ngram", **lengths}
    args = EngineArgs(
        model=model_folder(settings["max_model_len"]),
        skip_tokenizer_init=True,
        enforce_eager=True,
        **settings,
    )
    config = args.create_engine_config()
    config.cache_config.num_gpu_blocks = num_blocks
    config.scheduler_config.async_scheduling = overlaps
    if limit is not None:
        config.scheduler_config.max_num_scheduled_tokens = limit
    if drafts:
        object.__setattr__(config.speculative_config, "method", method)
    return config


def kv_group(number, kind, fields):
    """Return a KVCacheGroupSpec with vLLM's class `kind`. Names of dtypes in `fields` are converted to
    dtypes.
    """
    cls = getattr(kv_cache_interface, kind)
    values = {
        name: getattr(torch, value.removeprefix("torch.")) if "dtype" in name and value else value
        for name, value in fields.items()
    }
    return kv_cache_interface.KVCacheGroupSpec([f"layer {number}"], cls(**values))


class AnyGrammar:
    """Replaces vLLM's StructuredOutputManager. `refused`: ids of requests whose tokens break their
    grammar.
    """

    def __init__(self):
        self.refused = set()

    def accept_tokens(self, request, tokens):
        return request.request_id not in self.refused

    def validate_tokens(self, request, tokens):
        return list(tokens)

    def should_advance(self, request):
        return False

    def __getattr__(self, name):
        return lambda *args, **more: None


def make_scheduler(cls, settings):
    """Return a scheduler of class `cls`, with the KV groups, encoder budget and encoder cache in
    `settings`.
    """
    config, block_size = engine_config(settings), settings["block_size"]
    plain = {"block_size": block_size, "num_kv_heads": 4, "head_size": 16, "dtype": "float32"}
    groups = settings.get("kv_groups") or [("FullAttentionSpec", plain)]
    kv = kv_cache_interface.KVCacheConfig(
        num_blocks=settings["num_blocks"],
        kv_cache_tensors=[],
        kv_cache_groups=[kv_group(number, *group) for number, group in enumerate(groups)],
    )
    scheduler = cls(
        vllm_config=config,
        kv_cache_config=kv,
        structured_output_manager=AnyGrammar(),
        block_size=block_size,
        hash_block_size=settings.get("hash_block_size", block_size),
        log_stats=False,
    )
    scheduler.max_num_encoder_input_tokens = settings.get("encoder_budget", 0)
    scheduler.encoder_cache_manager = EncoderCacheManager(settings.get("encoder_cache_size", 0))
    if settings.get("second_runner") is not None:
        scheduler.use_v2_model_runner = settings["second_runner"]
    return scheduler


def block_hasher(scheduler):
    """Return the function that hashes a request's KV blocks, or None without a prefix cache."""
    if not scheduler.cache_config.enable_prefix_caching:
        return None
    hashes = get_hash_fn_by_name(scheduler.cache_config.prefix_caching_hash_algo)
    init_none_hash(hashes)
    lookahead = getattr(scheduler, "num_hash_lookahead_tokens", 0)  # for vLLM 0.33 and later
    return get_request_block_hasher(scheduler.hash_block_size, hashes, *([lookahead] if lookahead else []))


def make_request(name, prompt, max_tokens, hasher, images=(), lora=None, grammar=False, **more):
    """Return a greedy Request that ignores an end of sequence.

    `images`: (identifier, modality, start, length, mask). `start` and `length`: the placeholders in the
    prompt. `mask`: None, or whether each placeholder has an embedding.
    """
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    if grammar:
        sampling.structured_outputs = StructuredOutputsParams(regex=".*")
    features = [
        MultiModalFeatureSpec(
            data=None,
            modality=modality,
            identifier=identifier,
            mm_position=PlaceholderRange(start, length, None if mask is None else torch.tensor(mask)),
        )
        for identifier, modality, start, length, mask in images
    ]
    adapter = None if lora is None else LoRARequest(*lora, "/no/such/adapter")
    return Request(
        name, prompt, sampling, None, block_hasher=hasher, mm_features=features, lora_request=adapter, **more
    )


def could_run(scheduler):
    """Return whether the scheduler is not paused and has a request that may run."""
    if scheduler.pause_state.name != "UNPAUSED":
        return False
    return any(
        request.status.name in ("WAITING", "RUNNING", "PREEMPTED") for request in scheduler.requests.values()
    )


def sampling_requests(scheduler, output):
    """Return the requests that get a token in the scheduled step. A request whose prompt continues in a later
    step gets no token.
    """
    return [name for name in output.num_scheduled_tokens if not scheduler.requests[name].is_prefill_chunk]


def runner_output(output, tokens):
    """Return a model runner's result for a step. `tokens`: request id -> sampled tokens."""
    names = list(output.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: place for place, name in enumerate(names)},
        sampled_token_ids=[list(tokens.get(name, ())) for name in names],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )
