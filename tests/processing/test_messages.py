"""Tests chat messages in three dialects, placeholders, media passed as separate arguments, and invalid
messages.
"""

import base64
import importlib
import importlib.util
import io
import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mmengine.errors import InvalidMedia, InvalidRequest


def png(width=64, height=48, colour="red"):
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(buffer, "PNG")
    return buffer.getvalue()


def ask(*parts):
    return [{"role": "user", "content": list(parts)}]


TEXT = {"type": "text", "text": "What is it?"}


@pytest.fixture
def image_file(tmp_path):
    (tmp_path / "red.png").write_bytes(png())
    return tmp_path / "red.png"


def test_every_dialect_gives_the_same_request(processor, image_file):
    data = base64.b64encode(png()).decode()
    url = f"data:image/png;base64,{data}"
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": {"url": url, "detail": "high"}},
        {"type": "image_url", "image_url": url},
        {"type": "image_url", "image_url": str(image_file)},
        {"type": "image_url", "image_url": {"url": "red.png"}},
        {"type": "image", "image": str(image_file)},
        {"type": "image", "image": f"file://{image_file}"},
        {"type": "image", "image": url},
        {"type": "image", "image": png()},
        {"type": "image", "image": Image.open(image_file)},
        {"type": "image", "image": np.asarray(Image.open(image_file))},
        {"image": "red.png"},
        {"type": "image", "url": "red.png"},
        {"type": "image", "path": image_file},
        {"type": "image", "base64": data},
        {"type": "image", "url": None, "path": "red.png"},
    ]
    results = [processor.prepare(ask(part, TEXT), base_folder=image_file.parent) for part in parts]
    results.append(processor.prepare(ask({"type": "image"}, TEXT), images=[image_file]))
    for result in results:
        assert result.text == results[0].text
        assert (result.prompt_token_ids == results[0].prompt_token_ids).all()
        assert result.media[0].item == results[0].media[0].item


def test_equal_to_transformers(processor, reference, image_file):
    other = Image.new("RGB", (150, 90), "blue")
    parts = [{"type": "text", "text": "First "}, {"type": "image", "image": Image.open(image_file)}, TEXT]
    messages = [
        {"role": "system", "content": "You are brief."},
        *ask(*parts),
        {"role": "assistant", "content": [{"type": "text", "text": "A red rectangle.\n\n"}]},
        *ask({"type": "image", "image": other}, {"type": "text", "text": "And now?  Ünïcödé 漢字 12345"}),
    ]
    text = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    expected = reference.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="np"
    )
    result = processor.prepare(messages)
    assert result.text == text
    assert result.prompt_token_ids.dtype == np.int32
    assert result.prompt_token_ids.tolist() == expected["input_ids"][0].tolist()
    assert [list(m.item.grid) for m in result.media] == expected["image_grid_thw"].tolist()


def test_part_options_win_over_request_options(processor):
    big = Image.new("RGB", (400, 300))
    part = {"type": "image", "image": big, "max_pixels": 8192}
    result = processor.prepare(
        ask(part, {"type": "image", "image": big}), media_options={"max_pixels": 16384}
    )
    first, second = (m.item.grid[1] * m.item.grid[2] * 256 for m in result.media)
    assert first <= 8192 < second <= 16384
    result = processor.prepare(
        ask({"type": "image", "image": big, "resized_height": 70, "resized_width": 130})
    )
    assert result.media[0].item.grid == (1, 4, 8)


def test_media_hash_depends_on_modality_and_pixels_not_on_text(processor):
    def hashes(*parts):
        return [m.item.mm_hash for m in processor.prepare(ask(*parts)).media]

    frame = np.zeros((128, 128, 3), np.uint8)
    image = {"type": "image", "image": frame}
    video = {"type": "video", "video": [frame, frame]}
    (a, b) = hashes(image, video)
    assert a != b and len(a) == 32
    assert hashes(TEXT, image) == [a]
    assert hashes({"type": "image", "image": frame + 1}) != [a]


@pytest.fixture
def qwen_vl_utils(monkeypatch):
    """Return qwen_vl_utils. Stubs replace the packages torchvision and requests, because images do not need
    them.
    """
    names = ("torchvision", "torchvision.io", "torchvision.transforms")
    for name in names if importlib.util.find_spec("requests") else (*names, "requests"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["torchvision"].io = sys.modules["torchvision.io"]
    sys.modules["torchvision"].transforms = sys.modules["torchvision.transforms"]
    sys.modules["torchvision.transforms"].InterpolationMode = None
    yield importlib.import_module("qwen_vl_utils")
    for name in [name for name in sys.modules if name.startswith("qwen_vl_utils")]:
        del sys.modules[name]


def test_process_vision_info_images(processor, reference, qwen_vl_utils, image_file):
    messages = ask({"type": "image", "image": str(image_file), "max_pixels": 32768}, TEXT)
    images, videos = qwen_vl_utils.process_vision_info(messages, image_patch_size=16)
    assert videos is None
    text = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    expected = reference(text=[text], images=images, return_tensors="np")
    result = processor.prepare_text(text, images=images, videos=videos)
    assert result.prompt_token_ids.tolist() == expected["input_ids"][0].tolist()
    emptied = ask({"type": "image"}, TEXT)
    again = processor.prepare(emptied, images=images, videos=videos)
    assert again.media[0].item == result.media[0].item


def test_process_vision_info_videos(processor):
    """process_vision_info returns videos as float tensors [t, c, h, w], with or without metadata."""
    frames = torch.randint(0, 256, (6, 3, 96, 128)).float()
    prompt = "<|vision_start|><|video_pad|><|vision_end|>"
    metadata = {"fps": 10.0, "frames_indices": torch.arange(0, 60, 10), "total_num_frames": 60.0}
    result = processor.prepare_text(
        prompt, videos=[(frames, metadata)], media_options={"do_sample_frames": False}
    )
    assert result.media[0].item.grid == (3, 6, 8)
    decoded = processor.tokenizer.decode(result.prompt_token_ids.tolist())
    assert decoded == "<0.5 seconds><2.5 seconds><4.5 seconds>"
    options = {"do_sample_frames": False, "fps": [2.0]}
    result = processor.prepare_text(prompt, videos=[frames], media_options=options)
    decoded = processor.tokenizer.decode(result.prompt_token_ids.tolist())
    assert decoded == "<0.2 seconds><1.2 seconds><2.2 seconds>"


def image_part():
    return {"type": "image", "image": png()}


BAD = {
    "string": ("hello", "messages must be a list"),
    "none": (None, "messages must be a list"),
    "empty": ([], "messages must be a list"),
    "object": ({"role": "user", "content": "a"}, "messages must be a list"),
    "strings": (["hi"], "message 0 must be an object"),
    "no role": ([{"content": "a"}], "message 0 has no role"),
    "role": ([{"role": 3, "content": "a"}], "message 0 has no role"),
    "no content": ([{"role": "user"}], "message 0 has no content"),
    "content": ([{"role": "user", "content": 3}], "content of message 0 must be text or a list"),
    "part": (ask("a"), "message 0, part 0 must be an object"),
    "type": (ask(TEXT, {"type": "audio", "audio": "a"}), "message 0, part 1 has the type 'audio'"),
    "no type": (ask({"x": 1}), "message 0, part 0 has the type None"),
    "odd type": (ask({"type": ["image"]}), "message 0, part 0 has the type a list"),
    "text": (ask({"type": "text", "text": 5}), "message 0, part 0 is a text part, but its text is 5"),
    "surrogate": (ask({"type": "text", "text": "a\udc00b"}), "unpaired surrogate at character 1"),
    "url": (
        ask({"type": "image_url", "image_url": {}}),
        "image 0 (message 0, part 0): its image_url has no url",
    ),
    "http": (ask(TEXT, {"type": "image_url", "image_url": {"url": "HTTPS://a/b"}}), "part 1) is a URL"),
    "not an image": (
        ask(image_part(), {"type": "image", "image": b"abc"}),
        "image 1 (message 0, part 1) is not a supported image",
    ),
    "options": (ask({**image_part(), "min_pixels": "a"}), "min_pixels must be a whole number"),
    "option range": (ask({**image_part(), "max_pixels": 0}), "max_pixels must be a whole number from 1"),
    "option order": (ask({**image_part(), "max_pixels": 9, "min_pixels": 10}), "min_pixels 10 is larger"),
    "sides": (ask({**image_part(), "resized_width": 9}), "give resized_height and resized_width together"),
    "deep": (
        [{"role": "user", "content": "a", "x": json.loads("[" * 40 + "]" * 40)}],
        "nested more than 32 deep",
    ),
    "tensor": ([{"role": "user", "content": "a", "x": object()}], "must be JSON data, not a object"),
    "places": (ask({"type": "image"}), "1 image placeholders without data, but 0 images were passed"),
    "long": (ask({"type": "text", "text": "a b " * 3000}), "4096 maximum of the model"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_messages_give_one_sentence(processor, name):
    messages, expected = BAD[name]
    with pytest.raises(InvalidRequest) as caught:
        processor.prepare(messages)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_counts_are_named_both_ways(processor):
    place = "<|vision_start|><|image_pad|><|vision_end|>"
    with pytest.raises(InvalidRequest, match="the prompt has 2 image placeholders, but 1 images were given"):
        processor.prepare_text(place * 2, images=[png()])
    with pytest.raises(InvalidRequest, match="the prompt has 1 image placeholders, but 2 images were given"):
        processor.prepare_text(place, images=[png()] * 2)
    with pytest.raises(InvalidRequest, match="0 video placeholders, but 1 videos were given"):
        processor.prepare_text("a", videos=[np.zeros((2, 32, 32, 3), np.uint8)])
    with pytest.raises(InvalidRequest, match="have 1 image placeholders without data, but 2 images"):
        processor.prepare(ask({"type": "image"}), images=[png()] * 2)
    with pytest.raises(InvalidRequest, match="have 0 image placeholders without data, but 1 images"):
        processor.prepare(ask({"type": "text", "text": place}), images=[png()])


def test_bad_arguments(processor):
    with pytest.raises(InvalidRequest, match="media_options has no 'max_pixel'"):
        processor.prepare(ask(TEXT), media_options={"max_pixel": 3})
    with pytest.raises(InvalidRequest, match="images must be a list"):
        processor.prepare(ask(TEXT), images=3)
    with pytest.raises(InvalidRequest, match="the prompt must be a string"):
        processor.prepare_text(b"abc")
    with pytest.raises(InvalidRequest, match="the prompt is empty"):
        processor.prepare_text("")
    with pytest.raises(InvalidRequest, match="unpaired surrogate"):
        processor.prepare_text("\ud800")


def test_files_can_be_refused(processor, image_file):
    named = str(image_file)
    parts = [{"type": "image", kind: named} for kind in ("image", "path", "url")]
    parts += [{"type": "image_url", "image_url": {"url": f"file://{named}"}}]
    parts += [{"type": "image", "image": image_file}, {"type": "video", "video": named}]
    parts += [{"type": "video", "video": [named, named]}]
    for part in parts:
        with pytest.raises(InvalidMedia, match="names a file, which is not allowed here"):
            processor.prepare(ask(part), media_options={"local_files": False})
    for given in ({"images": [named]}, {"images": named}, {"videos": [named]}, {"videos": [[named, named]]}):
        text = "<|vision_start|><|video_pad|><|vision_end|>".replace("video", next(iter(given))[:5])
        with pytest.raises(InvalidMedia, match="names a file, which is not allowed here"):
            processor.prepare_text(text, media_options={"local_files": False}, **given)
    processor.prepare(ask(image_part()), media_options={"local_files": False})
    for value in ("false", 0, []):
        with pytest.raises(InvalidRequest, match="local_files must be True or False"):
            processor.prepare(ask(image_part()), media_options={"local_files": value})


def test_the_callers_objects_are_not_modified(processor):
    part = {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{base64.b64encode(png()).decode()}"},
    }
    messages = [*ask(part, TEXT), {"role": "assistant", "content": "It is"}]
    before = repr(messages)
    processor.prepare(messages, continue_final_message=True)
    assert repr(messages) == before


def test_missing_base_folder_files_are_named(processor):
    with pytest.raises(InvalidMedia, match="there is no file 'a.png'"):
        processor.prepare(ask({"type": "image", "image": "a.png"}), base_folder=Path("/nowhere"))
