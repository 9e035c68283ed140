"""Runs vLLM's own scheduler without a model: makes a configuration, requests and a model runner's outputs.

Requires vLLM. On a machine without a network, set HF_HUB_OFFLINE=1.
"""

import random
from concurrent.futures import Future

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from mmengine_vllm.deriving.scheduler_alone import model_folder


def engine_config(*, block_size=32, num_blocks=1000, method="", **settings):
    """Return a VllmConfig for a text model. `settings`: arguments of EngineArgs. `method`: a drafting method
    that normally needs a draft model. No draft model is loaded here.
    """
    defaults = {"max_model_len": 2048, "skip_tokenizer_init": True, "enforce_eager": True}
    args = EngineArgs(model=model_folder(8192), block_size=block_size, **{**defaults, **settings})
    config = args.create_engine_config()
    config.cache_config.num_gpu_blocks = num_blocks
    if method:
        object.__setattr__(config.speculative_config, "method", method)
    return config


def make_scheduler(cls, config, *, window=0, manager=None, hash_block_size=0, **more):
    """Return a scheduler of class `cls` with KV groups.

    `window`: a tuple with each KV group's sliding window, where 0 means full attention. Instead of a tuple, a
    number w > 0 means (0, w), and the number 0 means (0,).
    """
    block_size = config.cache_config.block_size
    plain = {"block_size": block_size, "num_kv_heads": 4, "head_size": 16, "dtype": torch.float32}
    windows = window if isinstance(window, tuple) else (0, window) if window else (0,)
    specs = [
        SlidingWindowSpec(**plain, sliding_window=each) if each else FullAttentionSpec(**plain)
        for each in windows
    ]
    kv = KVCacheConfig(
        num_blocks=config.cache_config.num_gpu_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layer {number}"], spec) for number, spec in enumerate(specs)],
    )
    return cls(
        vllm_config=config,
        kv_cache_config=kv,
        structured_output_manager=manager or StructuredOutputManager(config),
        block_size=block_size,
        hash_block_size=hash_block_size or block_size,
        log_stats=True,
        **more,
    )


def block_hasher(config, size=0, lookahead=0):
    """Return the function that hashes a request's tokens in blocks. `size`: tokens per block; 0 for a KV
    block's size. `lookahead`: the number of tokens after a block that the block's hash also covers (vLLM 0.33
    and later).
    """
    hashes = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hashes)
    more = (lookahead,) if lookahead else ()
    return get_request_block_hasher(size or config.cache_config.block_size, hashes, *more)


def make_request(name, prompt, max_tokens, hasher, *, grammar=False, **more):
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    if grammar:
        sampling.structured_outputs = StructuredOutputsParams(regex=".*")
    return Request(name, prompt, sampling, None, block_hasher=hasher, **more)


def with_encoder(cls, budget, cache_size):
    """Return a subclass of `cls` with an encoder budget and cache, although the text model has no encoder.

    `budget`: embeddings per step. `cache_size`: embeddings in the cache.
    """

    class WithEncoder(cls):
        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            self.max_num_encoder_input_tokens = budget
            self.encoder_cache_manager = EncoderCacheManager(cache_size)

    return WithEncoder


def image(identifier, start, length):
    """Return an image with `length` embeddings at the prompt's position `start`, without its pixels."""
    place = PlaceholderRange(offset=start, length=length)
    return MultiModalFeatureSpec(data=None, modality="image", identifier=identifier, mm_position=place)


class Runner:
    """Returns a token for each row whose prompt is computed. Rows have the order of vLLM's persistent batch:
    the last request takes a finished request's place.
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


class RandomGrammars:
    """Replaces vLLM's StructuredOutputManager. After some steps, a grammar is compiled or its compilation
    fails. A compiled grammar refuses some drafts, and rarely a sampled token, which ends the request.
    """

    def __init__(self, rng):
        self._rng, self._compiling = rng, []

    def begin(self, request):
        """Begin to compile the grammar of a request that the scheduler got."""
        request.structured_output_request.grammar = compiling = Future()
        self._compiling.append(compiling)

    def compile(self):
        """Complete some compilations. A tenth fails."""
        done = [each for each in self._compiling if self._rng.random() < 0.3]
        self._compiling = [each for each in self._compiling if each not in done]
        for each in done:
            is_broken = self._rng.random() < 0.1
            each.set_exception(ValueError("no such grammar")) if is_broken else each.set_result(True)

    def accept_tokens(self, request, tokens):
        return not request.use_structured_output or self._rng.random() < 0.98

    def validate_tokens(self, request, tokens):
        kept = self._rng.randint(0, len(tokens)) if request.use_structured_output else len(tokens)
        return list(tokens)[:kept]

    def should_advance(self, request):
        return False


def drive(
    cls, seed, *, steps=300, overlaps=False, drafts=0, method="", window=0, images=False, grammars=False,
    loras=0, hash_block_size=0, **settings,
):  # fmt: skip
    """Run a scheduler of class `cls` on random requests. Requests share prefixes, some requests are aborted,
    and the pool has too few blocks for all requests.

    `drafts`: the maximum number of drafts per row, from n-grams or from `method`. `window`,
    `hash_block_size`: as in `make_scheduler`. `images`: whether requests have up to two of eight images.
    `grammars`: whether a third of the requests has a grammar. `loras`: the maximum number of adapters per
    step. There are twice as many adapters, and each request has a random adapter or none. Returns the numbers
    of requests and of preemptions.
    """
    if loras:
        settings |= {"enable_lora": True, "max_loras": loras}
    if drafts:
        ngram = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
        settings["speculative_config"] = {**ngram, "num_speculative_tokens": drafts}
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 128, "max_model_len": 512}
    config = engine_config(block_size=16, method=method, **{"num_blocks": 40, **limits, **settings})
    config.scheduler_config.async_scheduling = overlaps
    rng = random.Random(seed)
    manager = RandomGrammars(random.Random(seed)) if grammars else None
    more = {"manager": manager, "hash_block_size": hash_block_size}
    scheduler = make_scheduler(cls, config, window=window, **more)
    lookahead = getattr(scheduler, "num_hash_lookahead_tokens", 0)
    hasher = block_hasher(config, hash_block_size, lookahead)
    runner = DraftingRunner(scheduler, rng, drafts)
    number = preempted = 0
    flying = []

    def update():
        output, result = flying.pop(0)
        scheduler.update_from_output(output, result)
        if drafts and not overlaps and output.total_num_scheduled_tokens:
            scheduler.update_draft_token_ids(runner.drafts(result))

    for step in range(steps):
        for _ in range(rng.randrange(3) if step < steps * 2 // 3 else 0):
            prompt = [rng.randrange(3)] * rng.randint(1, 60) + rng.choices(range(1000), k=rng.randint(1, 60))
            more = {"priority": rng.randrange(3)} if "scheduling_policy" in settings else {}
            if images:
                more["mm_features"] = random_features(rng, prompt)
            if loras and (adapter := rng.randint(0, 2 * loras)):
                more["lora_request"] = LoRARequest(f"adapter {adapter}", adapter, "/no/such/adapter")
            if grammars:
                more["grammar"] = rng.random() < 0.3
            request = make_request(f"r{number}", prompt, rng.randint(2, 80), hasher, **more)
            if request.use_structured_output:
                manager.begin(request)
            scheduler.add_request(request)
            number += 1
        if grammars:
            manager.compile()
        if rng.random() < 0.05 and scheduler.requests:
            names = rng.sample(sorted(scheduler.requests), min(2, len(scheduler.requests)))
            scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
        output = scheduler.schedule()
        preempted += len(output.preempted_req_ids or ())
        flying.append((output, runner.run(output)))
        if len(flying) > overlaps:
            update()
    while flying:
        update()
    scheduler.shutdown()
    return number, preempted


def random_features(rng, prompt):
    """Append up to two of eight images to a prompt, with text after each image, and return the images."""
    features = []
    for key in rng.sample(range(8), rng.randint(0, 2)):
        size = 24 + 8 * (key % 4)
        features.append(image(f"{key:064x}", len(prompt), size))
        prompt += [1000 + key] * size + rng.choices(range(1000), k=rng.randint(1, 20))
    return features


class DraftingRunner(Runner):
    """Accepts a random number of each row's drafts, and proposes up to `most` random drafts."""

    def __init__(self, scheduler, rng, most):
        super().__init__(scheduler)
        self._rng, self._most = rng, most

    def run(self, output):
        result = super().run(output)
        for place, name in enumerate(result.req_ids):
            drafts = output.scheduled_spec_decode_tokens.get(name, ())
            if drafts and result.sampled_token_ids[place]:
                accepted = self._rng.randint(0, len(drafts))
                result.sampled_token_ids[place] += self._rng.choices(range(100), k=accepted)
        return result

    def drafts(self, result):
        most, rng = self._most, self._rng
        proposed = [rng.choices(range(100), k=rng.randint(0, most)) for _ in result.req_ids]
        return DraftTokenIds(result.req_ids, proposed)
