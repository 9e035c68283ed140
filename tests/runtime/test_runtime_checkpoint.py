"""Tests that TorchExecutor gives the tokens of transformers' `generate` for the included checkpoint. The
tests plan the steps without a scheduler.
"""

import random

import numpy as np
import pytest
import torch
from runtime_toy import Driver

from mmengine.config import EngineConfig
from mmengine.request import Request, SamplingParams
from mmengine.runtime.device.cpu import CpuDevice
from mmengine.runtime.device.placement import Placement
from mmengine.runtime.executor import TorchExecutor
from mmengine_qwen3_vl import plugin
from mmengine_shapes import checkpoint_path
from mmengine_shapes.scenes import random_clip, random_scene
from tests.parity.parity_cases import Case, load_reference, reference_tokens

MAX_TOKENS = 40


@pytest.fixture(scope="module")
def model():
    return plugin.load_model(checkpoint_path(), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def prompts():
    """Return nine prompts with up to two images or a video; some share an image."""
    rng = random.Random(5)
    scenes = [random_scene(rng).draw() for _ in range(6)]
    clip = [np.asarray(frame) for frame in random_clip(rng).frames()]
    asked = [
        ([scenes[0]], [], "Describe the image."),
        ([scenes[1]], [], "Describe the image as JSON."),
        ([], [], "What do you see?"),
        (scenes[2:4], [], "Which image has more shapes?"),
        ([], [clip], "What happens in the video?"),
        ([scenes[0]], [], "How many shapes are there?"),
        ([scenes[4]], [], "List the objects as JSON."),
        (scenes[4:6], [], "Describe the second image."),
        ([scenes[5]], [], "What colour is the background?"),
    ]
    processor = plugin.load_processor(checkpoint_path())
    prepared = []
    for images, videos, question in asked:
        parts = [{"type": "image"}] * len(images) + [{"type": "video"}] * len(videos)
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]
        prepared.append(processor.prepare(messages, images=images, videos=videos))
    return prepared, processor.eos_token_ids


@pytest.fixture(scope="module")
def wanted(prompts):
    """Return transformers' greedy tokens for each prompt alone, including the end-of-sequence token."""
    reference = load_reference()
    return [reference_tokens(reference, Case(one, MAX_TOKENS)) for one in prompts[0]]


def drive(model, prepared, eos_token_ids, choose, *, preempt_every=0, **settings):
    """Generate all answers and return their tokens. `choose(driver, names of live requests, step)` returns
    the arguments for Driver.plan.
    """
    config = EngineConfig(
        max_num_seqs=16, num_blocks=400, encoder_cache_size=1024, eos_token_ids=eos_token_ids
    )
    driver = Driver(TorchExecutor(model, plugin.positions, config, **settings), config)
    for i, one in enumerate(prepared):
        media = tuple(media.item for media in one.media)
        driver.add(Request(str(i), one.prompt_token_ids, SamplingParams(), media), one.media)
    alive = {str(i) for i in range(len(prepared))}
    for step in range(2000):
        if not alive:
            break
        if preempt_every and step % preempt_every == preempt_every - 1 and driver.rows:
            driver.preempt(next(reversed([name for name in driver.rows if name in alive])))
        work = choose(driver, sorted(alive), step)
        plan = driver.plan(*work)
        driver.executor.dispatch(plan)
        result = driver.executor.collect()
        assert not result.errors
        stopped = dict(result.stops)
        for index, token in enumerate(result.token_ids.tolist()):
            name = work[plan.sample[index]][0]
            driver.known[name].append(token)
            if index in stopped or len(driver.outputs(name)) == MAX_TOKENS:
                alive.discard(name)
                driver.preempt(name)
    return [driver.outputs(str(i)) for i in range(len(prepared))]


def everything(driver, alive, step):
    return [(name, None) for name in alive]


def chunks_of_eleven(driver, alive, step):
    """Start a prompt every third step. Prompts are split into chunks with eleven tokens, so images and videos
    are split, too.
    """
    work = []
    for name in alive[: 1 + step // 3]:
        left = len(driver.known[name]) - driver.computed.get(name, 0)
        work.append((name, None if left <= 11 else 11))
    return work


def test_one_batch_gives_the_tokens_of_generate(model, prompts, wanted):
    assert drive(model, *prompts, everything) == wanted
    assert len({token for tokens in wanted for token in tokens}) > 20


def test_cut_prompts_and_preemption_give_the_tokens_of_generate(model, prompts, wanted):
    assert drive(model, *prompts, chunks_of_eleven, preempt_every=9) == wanted


def test_bfloat16_runs_close_to_float32(prompts, wanted):
    """Rounding may change tokens, but more than 60 % must stay the same."""
    model = plugin.load_model(checkpoint_path(), device="cpu", dtype="bfloat16")
    got = drive(model, *prompts, everything, placement=Placement(CpuDevice(), torch.bfloat16))
    equal = [a == b for tokens, other in zip(got, wanted, strict=True) for a, b in zip(tokens, other)]
    assert sum(equal) / len(equal) > 0.6
