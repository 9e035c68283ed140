"""Tests how transformers' models choose and read a video's frames, and runs a small model with videos. `make
soak` runs the video checks for all models (test_contract_whole.py).
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mmengine.errors import InvalidMedia, InvalidRequest, ModelError
from mmengine.processing.media.options import video_options
from mmengine.processing.media.sources import Access
from mmengine.processing.media.video import FrameArray
from mmengine.request import MediaItem
from mmengine_transformers import plugin
from mmengine_transformers.media import opening, settings, videos
from mmengine_transformers.media.positions import GridPositions
from mmengine_transformers.media.processors import refuse_videos, video_refusal
from mmengine_transformers.media.videos import HostedSampling, read_frames
from tests.any_model.catalogue import write
from tests.any_model.factories_grid import QWEN_IDS

ROOT = Path(__file__).resolve().parents[2]


class Uniform:
    """A fake video processor that chooses frames as transformers' base class does."""

    class valid_kwargs:
        __annotations__ = dict.fromkeys(("num_frames", "fps", "do_sample_frames", "device"))

    def __init__(self, num_frames=None, fps=None, do_sample_frames=True):
        self.num_frames, self.fps, self.do_sample_frames = num_frames, fps, do_sample_frames

    def sample_frames(self, metadata, num_frames=None, fps=None):
        count = num_frames or int(metadata.total_num_frames / metadata.fps * fps)
        if count > metadata.total_num_frames:
            raise ValueError("more frames than the video has")
        return np.arange(count) * metadata.total_num_frames // count


def chosen(processor, count, rate, **options):
    given = video_options(options, "video 0")
    return HostedSampling(processor).sample(count, rate, given, "video 0").tolist()


def test_the_model_s_sampling_chooses_the_frames():
    assert chosen(Uniform(num_frames=4), 16, 8.0) == [0, 4, 8, 12]
    assert chosen(Uniform(fps=2), 16, 8.0) == [0, 4, 8, 12]
    assert chosen(Uniform(fps=2), 16, 8.0, fps=4) == [0, 2, 4, 6, 8, 10, 12, 14]
    assert chosen(Uniform(num_frames=4), 16, 8.0, fps=1) == [0, 8]
    assert chosen(Uniform(fps=2), 16, 8.0, num_frames=2) == [0, 8]


def test_a_short_video_gives_all_its_frames():
    assert chosen(Uniform(num_frames=32), 3, 8.0) == [0, 1, 2]
    assert chosen(Uniform(), 3, 8.0) == [0, 1, 2]
    assert chosen(Uniform(fps=2), 12, 30.0) == [0], "less than one frame"


def test_a_number_of_frames_holds_where_the_model_s_sampling_ignores_or_refuses_it():
    class ByRate(Uniform):
        def sample_frames(self, metadata, fps=None, **_):
            return np.arange(0, metadata.total_num_frames, int(metadata.fps / (fps or self.fps)))

    class Even(Uniform):
        def sample_frames(self, metadata, num_frames=None, fps=None):
            return super().sample_frames(metadata, num_frames + num_frames % 2, fps)

    assert chosen(ByRate(fps=2), 16, 8.0) == [0, 4, 8, 12]
    assert chosen(ByRate(fps=2), 16, 8.0, num_frames=2) == [0, 15]
    assert chosen(Even(), 7, 8.0, num_frames=8) == [0, 1, 2, 3, 4, 5, 6]


def test_a_processor_without_a_rate_gets_two_frames_per_second():
    assert chosen(Uniform(do_sample_frames=False), 16, 8.0) == [0, 4, 8, 12]
    assert len(chosen(Uniform(do_sample_frames=False), 1000, 8.0)) == videos.DEFAULT_FRAMES


def test_frames_are_chosen_between_start_and_end():
    assert chosen(Uniform(num_frames=2), 16, 8.0, video_start=1.0) == [8, 12]


def test_an_unusable_choice_is_refused():
    class Outside(Uniform):
        def sample_frames(self, metadata, **_):
            return [0, metadata.total_num_frames]

    with pytest.raises(InvalidMedia, match="outside the video"):
        chosen(Outside(), 16, 8.0)
    with pytest.raises(InvalidMedia, match="the model's own sampling refuses the video"):
        chosen(Uniform(), 16, 8.0)
    with pytest.raises(InvalidRequest, match="does not take min_frames"):
        chosen(Uniform(fps=2), 16, 8.0, min_frames=4)


def read(source, **options):
    given = video_options(options, "video 0")
    return read_frames(source, given, Access(), Uniform(fps=2), lambda *_: None, "video 0")


def test_metadata_tell_times_and_the_sampled_rate():
    """Frames with given indices are all used, and a missing `total_num_frames` is estimated from the indices.
    Without indices, the processor chooses frames.
    """
    frames = np.zeros((4, 6, 8, 3), np.uint8)
    metadata = read((frames, {"fps": 30, "frames_indices": [0, 15, 30, 45]})).metadata
    assert metadata["frames_indices"] == [0, 15, 30, 45] and metadata["fps"] == 30
    assert metadata["total_num_frames"] == 60, "two frames per second"
    stated = read((frames, {"fps": 30, "frames_indices": [0, 15, 30, 45], "total_num_frames": 75}))
    assert stated.metadata["total_num_frames"] == 75
    found = read((np.zeros((16, 6, 8, 3), np.uint8), {"fps": 8}))
    assert found.pixels.shape == (4, 3, 6, 8) and found.metadata["frames_indices"] == [0, 4, 8, 12]
    assert found.metadata["total_num_frames"] == 16 and found.metadata["duration"] == 2.0


@pytest.mark.parametrize("total", [45, 2**31, True, "60"])
def test_a_number_of_frames_that_cannot_be_is_refused_before_frames_are_decoded(total, monkeypatch):
    monkeypatch.setattr(FrameArray, "frames", None)
    metadata = {"fps": 30, "frames_indices": [0, 15, 30, 45], "total_num_frames": total}
    with pytest.raises(InvalidMedia, match="total_num_frames of its metadata"):
        read((np.zeros((4, 6, 8, 3), np.uint8), metadata))


def test_frames_have_at_most_max_pixels():
    frames = np.zeros((2, 40, 80, 3), np.uint8)
    assert read((frames, {"fps": 1, "frames_indices": [0, 1]}), max_pixels=800).pixels.shape == (2, 3, 20, 40)


def test_frames_with_too_many_pixels_are_refused_before_they_are_decoded(monkeypatch):
    monkeypatch.setattr(videos, "MAX_SOURCE_PIXELS", 100)
    with pytest.raises(InvalidMedia, match="2 frames of 8 x 7 pixels have more than 100 pixels"):
        read((np.zeros((2, 7, 8, 3), np.uint8), {"fps": 1, "frames_indices": [0, 1]}))


def test_positions_depend_on_the_interval_and_on_the_run_s_modality():
    """The positions for a video and an image equal transformers' positions."""
    import torch
    import transformers

    config = transformers.Qwen2_5_VLConfig(**dict(zip(QWEN_IDS, range(4), strict=True)))
    config.vision_config.tokens_per_second = 4

    class Core:
        get_rope_index = transformers.Qwen2_5_VLModel.get_rope_index
        get_vision_position_ids = transformers.Qwen2_5_VLModel.get_vision_position_ids

        def __init__(self):
            self.config = config

    ids = np.array([9, *[1] * 8, 9, *[0] * 4, 9], np.int32)
    video = MediaItem(b"v", "video", ((1, 8),), (2, 4, 4), 0.4)
    image = MediaItem(b"i", "image", ((10, 4),), (1, 4, 4))
    rows, delta = GridPositions(Core())(ids, (video, image))
    kinds = torch.tensor([[0, *[2] * 8, 0, *[1] * 4, 0]])
    wanted, wanted_delta = Core().get_rope_index(
        torch.from_numpy(ids).long()[None],
        mm_token_type_ids=kinds,
        image_grid_thw=torch.tensor([[1, 4, 4]]),
        video_grid_thw=torch.tensor([[2, 4, 4]]),
        second_per_grid_ts=torch.tensor([0.4]),
    )
    assert rows.tolist() == wanted[:, 0].tolist() and delta == wanted_delta
    assert rows[0, 5] == 2, "0.4 seconds are 1.6 positions, rounded down, after position 1"


def test_a_model_without_a_video_processor_refuses_videos_with_the_reason(tmp_path):
    write("paddleocr_vl", tmp_path / "model")
    processor = plugin.load_processor(tmp_path / "model")
    with pytest.raises(InvalidRequest, match="the model's processor takes no videos; send frames as images"):
        processor.prepare([{"role": "user", "content": [{"type": "video", "video": np.zeros((2, 8, 8, 3))}]}])


def test_an_item_with_too_many_bytes_is_refused(monkeypatch):
    tensors = {"pixel_values_videos": ("float32", np.zeros((4, 8), np.float32))}
    monkeypatch.setattr(settings, "process", lambda *_: ("<v>", tensors))
    monkeypatch.setattr(settings, "MAX_PACKED_BYTES", 127)
    media = settings.HostedMedia("", "<i>", "<i>", "<v>", "<v>", "", "", 0, 0, ("<v>",), (), "", 1)
    monkeypatch.setattr(settings.HostedMedia, "_processor", None)
    with pytest.raises(
        InvalidMedia, match="video 0 has 128 bytes after the model's processor; the limit is 127"
    ):
        media._packed("video", {}, lambda _: None, "video 0")


def test_a_refusal_at_load_reaches_the_processor(tmp_path):
    """The reason is found for the same folder, although its path was written differently."""
    folder = tmp_path / "model"
    assert video_refusal(folder) == ""
    refuse_videos(tmp_path / "other" / ".." / "model", "it cannot encode one")
    assert video_refusal(folder) == "it cannot encode one"


@pytest.mark.parametrize("raised", [InvalidMedia, ModelError])
def test_a_failed_check_of_the_video_keeps_images(tmp_path, monkeypatch, raised):
    folder = tmp_path / "model"
    model = write("gemma3", folder)
    found = replace(opening.open_media(folder, model.config), video="<v>", no_video="")

    def fail(*_):
        raise raised("the probe cannot be processed")

    monkeypatch.setattr(opening, "open_media", lambda *_: found)
    monkeypatch.setattr(settings.HostedMedia, "prepare_video", fail)
    assert opening.open_encoder(model, folder) is not None
    assert video_refusal(folder) == "the probe cannot be processed"


def test_a_model_answers_about_videos_as_transformers_does():
    if not (ROOT / "build" / "torchvision" / ".ready").exists():
        pytest.skip("needs build/torchvision (make fetch-torchvision)")
    checks = ["video log-probabilities in chunks", "videos killed"]
    command = [sys.executable, "-W", "ignore", "-m", "tests.any_model.table", "--only", "qwen2_5_vl"]
    done = subprocess.run([*command, "--checks", *checks], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0 and str(dict.fromkeys(checks, "equal")) in done.stdout, done.stdout
