"""Compares processed videos with the recorded output of transformers' video processor (make_goldens.py)."""

import dataclasses
import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from video_cases import CASES, PROMPT, draw

from mmengine.processing.media.loader import MediaLoader
from mmengine.processing.processor import ChatProcessor

GOLDENS = json.loads((Path(__file__).parent / "video_goldens.json").read_text())


def configured(processor: ChatProcessor, case) -> ChatProcessor:
    settings = processor.media.settings
    video = dataclasses.replace(settings.video, cap_pixels_per_frame=case.cap)
    if case.size:
        video = dataclasses.replace(video, min_pixels=case.size[0], max_pixels=case.size[1])
    own = object.__new__(ChatProcessor)
    own.__dict__.update(processor.__dict__)
    own.media = dataclasses.replace(processor.media, settings=dataclasses.replace(settings, video=video))
    own.max_positions = 10**6
    own._loader = MediaLoader(own.media.settings, b"", own._check_length)
    return own


def prepared(processor, case, video):
    options = dict(case.options)
    if case.fps is not None:
        entry = {"fps": case.fps}
        if case.indices:
            entry["frames_indices"] = case.indices
        options["video_metadata"] = [entry]
    return configured(processor, case).prepare_text(PROMPT, videos=[video], media_options=options)


def forms(video):
    return {
        "array": video,
        "channels first": np.ascontiguousarray(video.transpose(0, 3, 1, 2)),
        "float tensor": torch.from_numpy(video).permute(0, 3, 1, 2).float(),
        "PIL frames": [Image.fromarray(frame) for frame in video],
    }


@pytest.mark.parametrize("index", range(len(CASES)))
def test_pixels_grid_and_timestamps(processor, reference_tokenizer, index):
    case, golden = CASES[index], GOLDENS[index]
    assert golden["shape"] == list(case.shape)
    for name, video in forms(draw(case)).items():
        result = prepared(processor, case, video)
        media = result.media[0]
        assert list(media.item.grid) == golden["grid"], name
        assert media.patches[0, :32].tolist() == golden["first_row"], name
        assert hashlib.sha256(media.patches).hexdigest() == golden["sha256"], name
        text = re.sub(r"\[(\d+)\]", lambda m: "<|video_pad|>" * int(m[1]), golden["text"])
        assert result.prompt_token_ids.tolist() == reference_tokenizer(text).input_ids, name
        pad = processor.tokenizer.special["<|video_pad|>"]
        covered = np.concatenate([np.arange(s, s + n) for s, n in media.item.runs])
        assert (covered == np.flatnonzero(result.prompt_token_ids == pad)).all(), name
        assert len(media.item.runs) == media.item.grid[0]
