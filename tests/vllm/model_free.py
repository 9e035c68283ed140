"""vLLM's own scheduler without a model: a small configuration, requests, and what a model runner returns.

Requires vLLM, and HF_HUB_OFFLINE=1 without a network.
"""

import json
import tempfile
from pathlib import Path

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "torch_dtype": "float32",
}


def engine_config(*, block_size=32, num_blocks=1000, **settings):
    """Return a VllmConfig for a text model. `settings`: arguments of EngineArgs."""
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(_LLAMA))
    defaults = {"max_model_len": 2048, "skip_tokenizer_init": True, "enforce_eager": True}
    args = EngineArgs(model=str(folder), block_size=block_size, **{**defaults, **settings})
    config = args.create_engine_config()
    config.cache_config.num_gpu_blocks = num_blocks
    return config


def make_scheduler(cls, config, **more):
    """Return a scheduler of class `cls` with one group of full attention."""
    block_size = config.cache_config.block_size
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=4, head_size=16, dtype=torch.float32)
    kv = KVCacheConfig(
        num_blocks=config.cache_config.num_gpu_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    return cls(
        vllm_config=config,
        kv_cache_config=kv,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        hash_block_size=block_size,
        log_stats=True,
        **more,
    )


def block_hasher(config):
    hashes = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hashes)
    return get_request_block_hasher(config.cache_config.block_size, hashes)


def make_request(name, prompt, max_tokens, hasher, **more):
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return Request(name, prompt, sampling, None, block_hasher=hasher, **more)


class Runner:
    """Returns one token for each row whose prompt is computed, in the order of a persistent batch: a request
    that left gives its place to the last one.
    """

    def __init__(self, scheduler):
        self._requests, self._order, self._places, self._at = scheduler.requests, [], {}, 0

    def run(self, output):
        for name in output.finished_req_ids:
            place = self._places.pop(name, None)
            if place is not None:
                last = self._order.pop()
                if last != name:
                    self._order[place], self._places[last] = last, place
        for name in output.num_scheduled_tokens:
            if name not in self._places:
                self._places[name] = len(self._order)
                self._order.append(name)
        names = [name for name in self._order if name in output.num_scheduled_tokens]
        self._at += 1
        sampled = []
        for place, name in enumerate(names):
            request = self._requests.get(name)
            is_due = request is None or not request.is_prefill_chunk
            sampled.append([(self._at * 131 + place) % 32000] if is_due else [])
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
