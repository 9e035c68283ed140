"""Runs a log's requests through a vLLM scheduler class, without a model. Requires vLLM."""

import itertools
import os
import random
from functools import cache

import numpy as np
from vllm.v1.request import RequestStatus

from examples.vllm_faults.recorded_run import recording_class
from mmengine import EngineConfig
from mmengine.events import vocabulary as ev
from mmengine.replay.rerun.script import Answer, Observation, Script
from mmengine.request import MediaItem, SamplingParams
from tests.vllm.model_free import (
    Runner,
    block_hasher,
    engine_config,
    image,
    make_request,
    make_scheduler,
    with_encoder,
)


@cache
def _config(**settings):
    config = engine_config(**settings)
    return config, block_hasher(config)


def serve(script, fault, folder, max_steps=2**62):
    """Run a script's requests, and write the run's log to `folder`. `fault`: the scheduler class that serves
    the requests.

    The run ends when nothing is scheduled and no request is left to arrive, or after step `max_steps`.
    Steps are counted from 0.
    """
    os.environ |= {"MMENGINE_LOG": str(folder), "MMENGINE_LOG_CONTENT": "tokens"}
    settings = script.config
    config, hasher = _config(
        block_size=settings.block_size,
        num_blocks=settings.num_blocks,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.token_budget,
        max_model_len=settings.max_model_len,
        enable_prefix_caching=settings.enable_prefix_caching,
        scheduling_policy=settings.policy,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        disable_chunked_mm_input=not settings.split_media,
    )
    encoder = with_encoder(fault, settings.encoder_budget, settings.encoder_cache_size)
    scheduler = make_scheduler(recording_class(encoder), config)
    runner, left, number = Runner(scheduler), list(script.observations), itertools.count()
    step = 0
    while step <= max_steps:
        while left and left[0].step <= step:
            _observe(scheduler, left.pop(0).event, next(number), hasher)
        output = scheduler.schedule()
        if output.total_num_scheduled_tokens:
            scheduler.update_from_output(output, runner.run(output))
            step += 1
        elif left:
            step = left[0].step
        else:
            break
    scheduler.shutdown()


def _observe(scheduler, event, number, hasher):
    match event:
        case ev.Queued(request_id=name, prompt=prompt, sampling=sampling, media=media, priority=priority):
            features = [image(item.mm_hash.hex(), *item.runs[0]) for item in media]
            more = {"mm_features": features, "priority": priority, "arrival_time": number}
            tokens = np.frombuffer(prompt, np.int32).tolist()
            scheduler.add_request(make_request(name, tokens, sampling.max_tokens, hasher, **more))
        case ev.Cancelled(request_id=name):
            scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)


def random_images(seed, *, num_requests=60, **settings):
    """Return a script of random requests, each with at most two images. A quarter of the requests are
    cancelled.
    """
    rng, observations = random.Random(seed), []
    sizes = {"max_num_seqs": 8, "token_budget": 32, "max_model_len": 512, "block_size": 16, "num_blocks": 40}
    config = EngineConfig(**{**sizes, "encoder_budget": 64, "encoder_cache_size": 64, **settings})
    for number in range(num_requests):
        prompt, media = [rng.randrange(3)] * rng.randint(1, 40), []
        for key in rng.sample(range(8), rng.randint(0, 2)):
            size = 24 + 8 * (key % 4)
            item = MediaItem(bytes([key]) * 32, "image", ((len(prompt), size),), (1, 1, size))
            media.append(item)
            prompt += [1000 + key] * size + [rng.randrange(1000)] * rng.randint(1, 20)
        sampling = SamplingParams(max_tokens=rng.randint(2, 60), temperature=0, ignore_eos=True)
        tokens = np.array(prompt, np.int32).tobytes()
        queued = ev.Queued(f"r{number}", tokens, sampling, tuple(media))
        step = rng.randrange(2 * num_requests)
        observations.append(Observation(step, step, 0, queued))
        if rng.random() < 0.25:
            end = step + rng.randrange(40)
            observations.append(Observation(end, end, 0, ev.Cancelled(f"r{number}", "cancelled")))
    observations.sort(key=lambda each: each.step)
    answers = {f"r{number}": Answer(np.zeros(0, np.int32)) for number in range(num_requests)}
    return Script(config, observations, answers)
