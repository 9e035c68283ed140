"""Tests videos with Qwen3.5. Greedy tokens equal transformers' tokens. The prompt is prefilled in a
single step, in chunks, or from states that were cached inside or after a video.
"""

import random

import numpy as np
import pytest
import torch

from mmengine.config import EngineConfig
from mmengine.replay import verify
from mmengine.serve.engine.engine import Engine
from mmengine.serve.prompt.prompt import Prompt
from mmengine_shapes.scenes import random_clip, random_scene
from tests.parity.parity_cases import reference_inputs
from tests.qwen3_5.tiny import make_whole

NUM_NEW = 12
SETTINGS = {
    "whole": {"enable_prefix_caching": False},
    "in chunks": {"enable_prefix_caching": False, "token_budget": 16, "max_num_seqs": 2},
    "from kept states": {"snapshot_every": 16, "token_budget": 32, "max_num_seqs": 8},
}


def prompts():
    rng = random.Random(4)
    first, second = ([np.asarray(frame) for frame in random_clip(rng).frames()] for _ in range(2))
    picture = random_scene(rng, side=64).draw()
    asked = (
        ([first], [], "What happens in the video?"),
        ([first], [], "What happens in the video? And what else, and how often?"),
        ([second, first], [], "Which of them?"),
        ([second], [picture], "Is it in there?"),
    )
    for videos, images, question in asked:
        parts = [{"type": "video"}] * len(videos) + [{"type": "image"}] * len(images)
        content = [*parts, {"type": "text", "text": question}]
        yield Prompt([{"role": "user", "content": content}], images=images, videos=videos)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("video")
    return folder, make_whole(folder)


@pytest.fixture(scope="module")
def wanted(made):
    folder, model = made
    with engine_of(folder) as engine:
        prepared = [prompt.prepare(engine.processor) for prompt in prompts()]
    found = []
    for each in prepared:
        assert any(len(media.item.runs) > 1 for media in each.media), "one run per temporal patch"
        inputs = reference_inputs(each)
        with torch.inference_mode():
            out = model.generate(
                **inputs, max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        found.append(out[0, inputs["input_ids"].shape[1] :].tolist())
    assert len({token for tokens in found for token in tokens}) > NUM_NEW
    return found


def engine_of(folder, log=None, **settings):
    sizes = {"num_blocks": 513, "block_size": 4, "max_model_len": 512, "spec": "none", "num_threads": 1}
    config = EngineConfig.from_dict(sizes | settings)
    return Engine(folder, device="cpu", dtype="float32", config=config, log=log)


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_transformers(made, wanted, tmp_path, name):
    with engine_of(made[0], tmp_path / "log", **SETTINGS[name]) as engine:
        for _ in range(2):
            found = engine.generate(prompts(), max_tokens=NUM_NEW, ignore_eos=True)
            assert [each.token_ids for each in found] == wanted
        assert (engine.stats().num_cached_tokens > 0) is (name == "from kept states")
    report = verify(tmp_path / "log", invariants=True)
    assert report.ok and report.rederived and not report.unfinished
