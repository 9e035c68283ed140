"""Tests that image patches equal the patches from transformers' Pillow backend. Also tests unusual and
invalid images.
"""

import base64
import io
from inspect import signature

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from mmengine.errors import InvalidMedia
from mmengine.processing.media import images as images_module
from mmengine.processing.media.images import load_rgb
from mmengine.processing.media.sources import Access

SIZES = np.random.default_rng(7).integers(1, 700, (46, 2)).tolist()
SIZES += [[1, 1], [2, 300], [199, 1], [1024, 768]]
PLACE = "<|vision_start|><|image_pad|><|vision_end|>what?"


def picture(width, height, seed=0, mode="RGB"):
    rng = np.random.default_rng([width, height, seed])
    y, x = np.mgrid[:height, :width]
    pixels = rng.integers(0, 256, (height, width, len(mode)), dtype=np.uint8)
    pixels[: height // 2, :, 0] = ((x * 5 + y * 3) % 256)[: height // 2]
    return Image.fromarray(pixels if len(mode) > 1 else pixels[..., 0], mode)


def encoded(image, form, **options):
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def load(source):
    return load_rgb(source, Access(), "image 0")


@pytest.mark.parametrize("start", range(0, 50, 10))
def test_equal_to_transformers(processor, reference, start):
    ratio = 200
    for index, (width, height) in enumerate(SIZES[start : start + 10]):
        if max(width, height) > ratio * min(width, height):
            width = height = 33
        image = picture(width, height)
        expected = reference(text=[PLACE], images=[image], return_tensors="np")
        result = processor.prepare_text(PLACE, images=[image])
        media = result.media[0]
        assert media.item.grid == tuple(expected["image_grid_thw"][0]), (width, height)
        assert media.patches.dtype == np.uint8
        ours = (media.patches.astype(np.float64) / 255 - 0.5) / 0.5
        theirs = expected["pixel_values"]
        assert np.abs(ours - theirs).max() < 1e-6, (width, height, start + index)
        assert result.prompt_token_ids.tolist() == expected["input_ids"][0].tolist()
        (run,) = media.item.runs
        pad = processor.tokenizer.special["<|image_pad|>"]
        assert np.flatnonzero(result.prompt_token_ids == pad).tolist() == list(range(run[0], sum(run)))


def test_positions_equal_transformers(processor, folder):
    from transformers import AutoConfig, Qwen3VLModel

    from mmengine_qwen3_vl import plugin

    clip = PLACE.replace("image", "video")
    pictures = [picture(97, 53), picture(300, 200), picture(40, 400)]
    video = np.zeros((6, 90, 120, 3), np.uint8)
    options = {"do_sample_frames": False}
    text = f"a {PLACE} b {PLACE}{clip}{PLACE} c {clip}"
    result = processor.prepare_text(text, images=pictures, videos=[video, video[:3]], media_options=options)
    ids = torch.from_numpy(result.prompt_token_ids).long()[None]
    pads = processor.tokenizer.special
    kinds = (ids == pads["<|image_pad|>"]).int() + 2 * (ids == pads["<|video_pad|>"]).int()
    grids = {
        f"{kind}_grid_thw": torch.tensor([m.item.grid for m in result.media if m.item.modality == kind])
        for kind in ("image", "video")
    }
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        model = Qwen3VLModel(config)
    rope, delta = model.get_rope_index(ids, mm_token_type_ids=kinds, **grids)
    ours, our_delta = plugin.positions(result.prompt_token_ids, [m.item for m in result.media])
    assert (rope[:, 0].numpy() == ours).all()
    assert int(delta[0, 0]) == our_delta


@pytest.mark.parametrize(
    "options", [{"min_pixels": 65536}, {"max_pixels": 8192}, {"max_pixels": 8192, "min_pixels": 4096}]
)
def test_pixel_limits_equal_transformers(processor, reference, options):
    image = picture(230, 171)
    size = dict(reference.image_processor.size)
    size.update(longest_edge=options.get("max_pixels", 65536), shortest_edge=options.get("min_pixels", 4096))
    expected = reference.image_processor(image, size=size, return_tensors="np")
    result = processor.prepare_text(PLACE, images=[image], media_options=options)
    assert result.media[0].item.grid == tuple(expected["image_grid_thw"][0])


def test_forms_of_one_image_are_equal(processor, tmp_path):
    image = picture(90, 70)
    png = encoded(image, "PNG")
    (tmp_path / "a b.png").write_bytes(png)
    array = np.asarray(image)
    text = base64.b64encode(png).decode()
    forms = [
        image,
        png,
        bytearray(png),
        tmp_path / "a b.png",
        str(tmp_path / "a b.png"),
        f"file://{tmp_path}/a b.png",
        f"file://{tmp_path}/a%20b.png",
        f"data:image/png;base64,{text}",
        array,
        array.transpose(2, 0, 1),
        array.astype(np.float32),
        array.astype(np.float64) / 255,
        torch.from_numpy(array.copy()),
        torch.from_numpy(array.transpose(2, 0, 1).copy()).float() / 255,
    ]
    hashes = {processor.prepare_text(PLACE, images=[form]).media[0].item.mm_hash for form in forms}
    assert len(hashes) == 1
    other = processor.prepare_text(PLACE, images=[ImageOps.mirror(image)]).media[0].item.mm_hash
    assert other not in hashes


def test_transparency_is_laid_on_white_as_in_transformers(reference):
    from transformers.image_transforms import convert_to_rgb

    rgba = picture(40, 30, mode="RGBA")
    grey_alpha = rgba.convert("LA")
    palette = rgba.convert("RGB").quantize(16)
    palette.info["transparency"] = bytes(range(0, 256, 16))
    palette = Image.open(io.BytesIO(encoded(palette, "PNG", transparency=bytes(range(0, 256, 16)))))
    for image in (rgba, grey_alpha, palette):
        white = Image.new("RGBA", image.size, "white")
        laid = np.asarray(Image.alpha_composite(white, image.convert("RGBA")).convert("RGB"))
        assert (np.asarray(load(image)) == laid).all(), image.mode
        if "return_numpy" in signature(convert_to_rgb).parameters:  # Older versions drop the alpha channel.
            assert (laid == convert_to_rgb(image, return_numpy=True)).all(), image.mode
    clear = Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    assert np.asarray(load(encoded(clear, "PNG"))).min() == 255


def test_cmyk_and_grey(processor):
    image = picture(48, 32)
    for mode in ("CMYK", "L", "1", "P", "YCbCr", "HSV"):
        converted = image.convert(mode)
        assert (np.asarray(load(converted)) == np.asarray(converted.convert("RGB"))).all()
    assert load(encoded(image.convert("CMYK"), "JPEG")).mode == "RGB"


def test_sixteen_bits_are_scaled_not_clipped():
    values = np.linspace(0, 65535, 64 * 8).astype(np.uint16).reshape(8, 64)
    expected = np.rint(values / 257).astype(np.uint8)
    for form in ("PNG", "TIFF"):
        assert (np.asarray(load(encoded(Image.fromarray(values), form)))[..., 1] == expected).all()
    assert (np.asarray(load(values))[..., 0] == expected).all()


def test_exif_rotation_is_applied():
    image = picture(40, 20)
    exif = Image.Exif()
    exif[0x0112] = 6  # The camera was rotated by 90 degrees.
    upright = load(encoded(image, "PNG", exif=exif))
    assert upright.size == (20, 40)
    assert (np.asarray(upright) == np.asarray(ImageOps.exif_transpose(image.rotate(-90, expand=True)))).all()
    assert load(encoded(image, "JPEG", exif=b"Exif\0\0broken")).size == (40, 20)


def animation(form):
    frames = [picture(20, 20, seed) for seed in range(3)]
    return encoded(frames[0], form, save_all=True, append_images=frames[1:])


BAD = {
    "text": (b"hello, I am no image at all", "image 0 is not a supported image"),
    "empty": (b"", "image 0 is empty"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is not a supported image"),
    "truncated png": (encoded(picture(200, 200), "PNG")[:5000], "image 0 is damaged or cut short"),
    "truncated jpeg": (encoded(picture(200, 200), "JPEG")[:3000], "image 0 is damaged or cut short"),
    "header only": (encoded(picture(200, 200), "PNG")[:20], "image 0 is"),
    "thin": (encoded(Image.new("RGB", (100_000, 2)), "PNG"), "image 0 is 100000 x 2 pixels; the longer side"),
    "bomb": (encoded(Image.new("1", (20_000, 20_000)), "PNG"), "image 0 has more than 67108864 pixels"),
    "large": (encoded(Image.new("1", (9000, 9000)), "PNG"), "image 0 of 9000 x 9000 has more than"),
    "gif": (animation("GIF"), "image 0 is an animation; pass it as a video"),
    "webp": (animation("WEBP"), "image 0 is an animation; pass it as a video"),
    "apng": (animation("PNG"), "image 0 is an animation; pass it as a video"),
    "pages": (animation("TIFF"), "image 0 is a TIFF of several pages"),
    "format": (encoded(picture(9, 9), "PPM"), "is not a supported image"),
    "url": ("https://example.com/a.png", "image 0 is a URL; fetching URLs needs"),
    "missing": ("/nowhere/at all.png", "image 0: there is no file '/nowhere/at all.png'"),
    "device": ("/dev/zero", "there is no file"),
    "folder": ("/", "there is no file"),
    "base64": ("data:image/png;base64,!!!!", "image 0 is not valid base64"),
    "data": ("data:image/png", "image 0 is a data: URL without data"),
    "nul": ("a\0b", "neither a path nor a data: URL"),
    "surrogate": ("\ud800.png", "image 0"),
    "long": ("x" * 10_000, "neither a path nor a data: URL"),
    "object": (object(), "image 0 has the type object"),
    "shape": (np.zeros((5, 6, 7), np.uint8), "image 0 has the shape (5, 6, 7)"),
    "no pixels": (np.zeros((0, 4, 3), np.uint8), "which holds no pixels"),
    "range": (np.full((4, 4, 3), 300.0), "image 0 has values from 300.0 to 300.0"),
    "nan": (np.full((4, 4, 3), np.nan), "image 0 has values from nan"),
    "strings": (np.array([["a"]]), "image 0 is an array of <U1"),
    "bfloat16": (torch.zeros(4, 4, 3, dtype=torch.bfloat16), "image 0 is a tensor that numpy cannot hold"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_images_give_one_sentence(processor, name):
    source, expected = BAD[name]
    with pytest.raises(InvalidMedia) as caught:
        processor.prepare_text(PLACE, images=[source])
    message = str(caught.value)
    assert expected in message
    assert "\n" not in message and " at 0x" not in message and len(message) < 500


def test_limits_hold_before_decoding(processor, monkeypatch):
    monkeypatch.setattr(images_module, "MAX_IMAGE_BYTES", 100)
    with pytest.raises(InvalidMedia, match="image 0 is larger than"):
        processor.prepare_text(PLACE, images=[encoded(picture(50, 50), "PNG")])


def test_asking_for_huge_pixels_is_capped(processor):
    options = {"min_pixels": 2**28, "max_pixels": 2**28}
    with pytest.raises(Exception, match="4096 maximum of the model"):
        processor.prepare_text(PLACE, images=[picture(4, 4)], media_options=options)


def test_unresized_images_must_fit_the_patches(processor):
    result = processor.prepare_text(PLACE, images=[picture(96, 64)], media_options={"do_resize": False})
    assert result.media[0].item.grid == (1, 4, 6)
    with pytest.raises(InvalidMedia, match="image 0 is 97 x 64 pixels; without resizing"):
        processor.prepare_text(PLACE, images=[picture(97, 64)], media_options={"do_resize": False})
