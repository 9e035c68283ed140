"""Tests that rotary positions equal those of transformers' get_rope_index, for random prompts with text,
images and videos.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qwen3_vl_reference import TINY, make_prompt, reference_inputs

from mmengine.errors import InvalidRequest
from mmengine.request import MediaItem
from mmengine_qwen3_vl.positions import rope_positions


@pytest.fixture(scope="module")
def reference():
    """Return a transformers model for each merge size."""
    from transformers import Qwen3VLConfig, Qwen3VLModel

    models = {}
    for merge in (1, 2, 3):
        vision = TINY["vision"] | {"spatial_merge_size": merge, "depth": 1, "deepstack_visual_indexes": []}
        with torch.device("meta"):
            models[merge] = Qwen3VLModel(Qwen3VLConfig(text_config=TINY["text"], vision_config=vision))
    return models


def parts(merge):
    side = st.integers(1, 9).map(lambda n: n * merge)
    image = st.tuples(st.just("image"), st.tuples(side, side))
    video = st.tuples(st.just("video"), st.tuples(st.integers(1, 5), side, side))
    return st.lists(st.integers(1, 20) | image | video, min_size=1, max_size=8)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), merge=st.sampled_from([1, 2, 3]), seed=st.integers(0, 2**20))
def test_equal_to_get_rope_index(reference, data, merge, seed):
    prompt = make_prompt(data.draw(parts(merge)), np.random.default_rng(seed), merge=merge, patch_width=1)
    inputs = reference_inputs(prompt)
    expected, deltas = reference[merge].get_rope_index(
        **{name: value for name, value in inputs.items() if not name.startswith("pixel")}
    )
    positions, delta = rope_positions(len(prompt.ids), prompt.media)
    assert positions.dtype == np.int32
    assert positions.tolist() == expected[:, 0].tolist()
    assert delta == deltas.item()


def test_text_and_the_empty_prompt():
    positions, delta = rope_positions(3, ())
    assert positions.tolist() == [[0, 1, 2]] * 3 and delta == 0
    positions, delta = rope_positions(0, ())
    assert positions.shape == (3, 0) and delta == 0


@pytest.mark.parametrize(
    "runs, grid",
    [
        (((1, 4), (3, 4)), (2, 4, 4)),  # Overlap.
        (((8, 4),), (1, 4, 4)),  # Past the end.
        (((1, 4),), (2, 4, 4)),  # A temporal patch without its run.
        (((1, 3),), (1, 4, 4)),  # The number of patches per embedding is not a square.
        (((1, 4), (6, 1)), (2, 4, 4)),  # Runs with two merge sizes.
        ((), (1, 4, 4)),
        (((1, 0),), (1, 4, 4)),
        (((1, 64),), (1, 4, 4)),  # More embeddings than patches.
        (((-3, 4),), (1, 4, 4)),
    ],
)
def test_media_that_contradict_the_prompt_are_refused(runs, grid):
    with pytest.raises(InvalidRequest):
        rope_positions(10, [MediaItem(mm_hash=b"x", modality="video", runs=runs, grid=grid)])
