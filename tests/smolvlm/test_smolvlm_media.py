"""Tests images and videos for SmolVLM2: tiles and tokens are the same as in transformers, options apply, and
invalid input is refused.
"""

import hashlib
import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

from mmengine.config import EngineConfig
from mmengine.errors import InvalidRequest, ModelError
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from mmengine.processing.workers.decoders import Decoders
from mmengine.replay import verify
from mmengine.request import MediaItem
from mmengine.serve.engine.engine import Engine
from mmengine.server.chat.parsed_request import clamp_pixels
from mmengine_smolvlm import plugin
from mmengine_smolvlm.processing import in_words
from tests.processing.video_cases import draw
from tests.smolvlm.make_goldens import GOLDENS, MAX_NUMBER
from tests.smolvlm.tiny import SIDE, images_only, make_tiny, patches_of
from tests.smolvlm.video_cases import CASES, PROMPT

SIZES = [(34, 34), (35, 34), (10, 10), (1, 1), (64, 96), (500, 31), (3, 400), (137, 136), (271, 97), (20, 63)]
ASKED = [{}, {"longest_edge": 70}, {"do_image_splitting": False}, {"do_resize": False}]


def picture(height, width, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def asked(*parts):
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is in it?"}]}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smolvlm")
    make_tiny(folder)
    return folder


@pytest.fixture(scope="module")
def processor(folder):
    return plugin.load_processor(folder)


@pytest.fixture(scope="module")
def theirs(folder):
    return images_only(folder)


@pytest.mark.parametrize("options", ASKED, ids=str)
def test_tiles_are_transformers(processor, theirs, options):
    given = dict(options)
    if "longest_edge" in given:
        given = {"size": {"longest_edge": given["longest_edge"]}}
    for size in SIZES:
        image = picture(*size)
        out = theirs(text="a<image>b", images=[image], return_tensors="pt", **given)
        mine = processor.prepare_text("a<image>b", images=[image], media_options=options)
        assert mine.prompt_token_ids.tolist() == out["input_ids"][0].tolist(), size
        assert np.array_equal(mine.media[0].patches, patches_of(out["pixel_values"][0])), size


@pytest.mark.parametrize("index", range(len(CASES)))
def test_videos_are_transformers(processor, theirs, index):
    case, golden = CASES[index], json.loads(GOLDENS.read_text())["videos"][index]
    entry = {"fps": case.fps} | ({"frames_indices": case.indices} if case.indices else {})
    mine = processor.prepare_text(
        PROMPT, videos=[draw(case)], media_options={**case.options, "video_metadata": [entry]}
    )
    text = PROMPT.replace("<video>", golden["text"])
    assert mine.prompt_token_ids.tolist() == theirs.tokenizer(text).input_ids
    media, side = mine.media[0], 30
    assert media.item.grid == (golden["frames"], 6, 6)
    frames = media.patches.reshape(-1, 2, 2, 3, 3, 3, 5, 5).transpose(0, 5, 1, 3, 6, 2, 4, 7)
    pixels = np.ascontiguousarray(frames.reshape(-1, 3, side, side))
    assert hashlib.sha256(pixels).hexdigest() == golden["sha256"]


def test_numbers_are_written_as_num2words_writes_them():
    words = " ".join(map(in_words, range(MAX_NUMBER + 1)))
    assert hashlib.sha256(words.encode()).hexdigest() == json.loads(GOLDENS.read_text())["words"]


def test_a_chat_with_a_video_uses_the_video_template(processor, theirs):
    from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

    parts = [
        {"type": "image"},
        {"type": "text", "text": "a"},
        {"type": "video"},
        {"type": "text", "text": "b"},
    ]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": parts[1:2]}]
    wanted = theirs.tokenizer.apply_chat_template(
        messages, chat_template=DEFAULT_CHAT_TEMPLATE, tokenize=False, add_generation_prompt=True
    )
    video = {"images": [picture(20, 20)], "videos": [draw(CASES[2])]}
    assert processor.prepare(messages, **video).text == wanted


def test_texts_are_read_where_the_template_reads_parts_alone(processor):
    """A string and a text part give the same prompt. Placeholder names in a user's text stay text."""
    as_text, as_part = (
        processor.prepare([{"role": "user", "content": content}])
        for content in ("a <video> b <image>", [{"type": "text", "text": "a <video> b <image>"}])
    )
    assert as_text.prompt_token_ids.tolist() == as_part.prompt_token_ids.tolist()
    assert as_text.text.startswith("<|im_start|>User: a <video> b <image><end_of_utterance>")
    assert as_text.media == () and as_text.prompt_token_ids.min() >= 0


@pytest.mark.parametrize("tiles, grid", [(100, 17), (15, 10), (4, 5), (3, 1), (0.5, 1)])
def test_max_pixels_takes_whole_tiles_and_never_less_than_one(processor, tiles, grid):
    """`tiles`: the number of tiles that max_pixels allows. `grid`: the resulting number of tiles, including
    the overview tile.
    """
    image = picture(90, 100)
    options = {"max_pixels": int(tiles * SIDE**2)}
    assert (
        processor.prepare(asked({"type": "image", "image": image, **options})).media[0].item.grid[0] == grid
    )


def test_a_server_bounds_the_longest_edge_by_its_pixels():
    assert clamp_pixels("here", {"longest_edge": 4096}, 96 * 96) == {"longest_edge": 96}
    assert clamp_pixels("here", {"longest_edge": 90.0}, 96 * 96) == {"longest_edge": 90.0}


@pytest.mark.parametrize(
    "options, words",
    [
        (
            {"min_pixels": 100},
            "image 0: this model does not support min_pixels",
        ),
        ({"longest_edge": 5000}, "image 0: longest_edge is 5000; the limit is 4096"),
        ({"longest_edge": 0}, "longest_edge must be a whole number from 1"),
        ({"do_image_splitting": 1}, "do_image_splitting must be true or false"),
    ],
)
def test_unsupported_options_are_refused(processor, options, words):
    with pytest.raises(InvalidRequest, match=words):
        processor.prepare_text("<image>", images=[picture(50, 50)], media_options=options)


def test_a_video_has_frames_of_one_size(processor):
    # Options that would give the frames other sizes are refused.
    for options, name in (({"longest_edge": 50}, "longest_edge"), ({"do_resize": False}, "do_resize")):
        with pytest.raises(InvalidRequest, match=f"video 0: {name} is not supported for a video"):
            processor.prepare_text("<video>", videos=[draw(CASES[0])], media_options=options)


def test_too_many_tiles_are_refused_before_they_are_made(folder, monkeypatch):
    processor = plugin.load_processor(folder)
    processor.max_prompt_tokens = 30
    monkeypatch.setattr(Image.Image, "resize", None)
    with pytest.raises(InvalidRequest, match="prompt is too long: 52 tokens > 30 maximum of this engine"):
        processor.prepare(asked({"type": "image", "image": picture(64, 96)}))


def test_another_process_decodes_the_same(processor, folder):
    buffer = io.BytesIO()
    picture(64, 96).save(buffer, "PNG")
    own = processor.prepare(asked({"type": "image", "image": buffer.getvalue()}))
    other = plugin.load_processor(folder)
    with_process = Decoders(other.decoder_recipe, 1, 2**29, 60.0)
    try:
        other.media_decoder = with_process
        found = other.prepare(asked({"type": "image", "image": buffer.getvalue()}))
    finally:
        with_process.close()
    assert found.prompt_token_ids.tolist() == own.prompt_token_ids.tolist()
    assert found.media[0].item == own.media[0].item
    assert np.array_equal(found.media[0].patches, own.media[0].patches)
    restored = other.restore(found.media[0].item, found.media[0].source)
    assert np.array_equal(restored.patches, own.media[0].patches)


@pytest.mark.parametrize(
    "name, field, value, words",
    [
        ("preprocessor_config.json", "resample", 3, "resample is 3; only 1"),
        ("preprocessor_config.json", "image_mean", [0.4, 0.5, 0.5], "image_mean is"),
        ("preprocessor_config.json", "max_image_size", {"longest_edge": 17}, "max_image_size is 17, but"),
        (
            "preprocessor_config.json",
            "size",
            {"height": 4, "width": 4},
            "size is .*; it must be an object with longest",
        ),
        (
            "processor_config.json",
            "image_seq_len",
            64,
            "image_seq_len is 64; the model makes 4 embeddings of a tile",
        ),
        ("config.json", "image_token_id", 3, "image_token_id is 3, but <image> is token"),
    ],
)
def test_files_that_contradict_the_model_are_refused(folder, tmp_path, name, field, value, words):
    for path in folder.iterdir():
        if path.name != name:
            (tmp_path / path.name).symlink_to(path)
    values = {**json.loads((folder / name).read_text()), field: value}
    (tmp_path / name).write_text(json.dumps(values))
    with pytest.raises(ModelError, match=words):
        plugin.load_processor(tmp_path)


def test_runs_that_do_not_match_the_tiles_are_refused():
    ids = np.zeros(9, np.int32)
    for runs in (((0, 4),), ((0, 4), (4, 5))):
        with pytest.raises(InvalidRequest, match="of 2 tiles cannot have embedding runs"):
            plugin.positions(ids, [MediaItem(b"a" * 32, "image", runs, (2, 6, 6))])
    positions, delta = plugin.positions(ids, [MediaItem(b"a" * 32, "image", ((0, 4), (5, 4)), (2, 6, 6))])
    assert (positions == np.arange(9)).all() and delta == 0


def test_an_image_in_parts_gives_the_same_answer_and_the_same_features(folder, processor, tmp_path):
    """Encoding less than a tile per step gives the same tokens and features as encoding whole items."""
    prompts = [
        asked({"type": "image", "image": picture(64, 96)}),
        asked({"type": "video", "video": list(draw(CASES[0]))}),
    ]
    answers = []
    for piece in (2**40, 20):
        sizes = {"num_blocks": 257, "max_model_len": 512, "spec": "none", "num_threads": 1}
        config = EngineConfig.from_dict({**sizes, "encoder_piece": piece, "encoder_even_patches": 64})
        log = tmp_path / str(piece)
        with Engine(folder, device="cpu", dtype="float32", config=config, log=log) as engine:
            found = engine.generate(prompts, max_tokens=6, ignore_eos=True)
        answers.append([answer.token_ids for answer in found])
        parts = [record for record in LogReader(log) if isinstance(record.event, ev.Encoded)]
        assert verify(log).ok and (len(parts) > 20) is (piece == 20)
    assert answers[0] == answers[1]
    model = plugin.load_model(folder, device="cpu", dtype="float32")
    media = processor.prepare(prompts[0]).media[0]
    pixels, grid = torch.from_numpy(media.patches), media.item.grid
    with torch.inference_mode():
        parts = model.encode_in_parts(pixels, grid, 64)
        assert parts.advance(7, 100) is None
        assert torch.equal(parts.advance(100, 100), model.encode(pixels, [grid]))
