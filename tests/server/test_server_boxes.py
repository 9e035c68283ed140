"""Tests that boxes in answers have pixel coordinates of the client's image, in all APIs."""

import base64
import io
import json

import pytest
from PIL import ExifTags, Image

from mmengine import AsyncEngine
from mmengine.models.box_unit import BoxUnit
from mmengine.processing.media.boxes import ImageFrame, restore
from tests.server.openai_answers import named_events
from tests.server.running import served

pytest.importorskip("mmengine_shapes")

NUMBER = {"type": "integer", "minimum": 0, "maximum": 1000}
BOX = {"type": "array", "items": NUMBER, "minItems": 4, "maxItems": 4}
SCHEMA = {
    "type": "object",
    "properties": {"bbox_2d": BOX, "at": {**BOX, "x-mmengine-box": True}, "plain": BOX},
    "required": ["bbox_2d", "at", "plain"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}, "boxes": True}
FLAT = {"type": "json_schema", "name": "it", "schema": SCHEMA, "boxes": True}
ASKED = {"temperature": 0, "model": "shapes"}
TURNED = 6  # the EXIF orientation of an image that a viewer rotates by 90 degrees
FRAME = ImageFrame(160, 96, TURNED)


def picture():
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = TURNED
    Image.effect_noise((FRAME.width, FRAME.height), 90).save(data := io.BytesIO(), "PNG", exif=exif)
    return base64.b64encode(data.getvalue()).decode()


PNG = picture()
URL = f"data:image/png;base64,{PNG}"
IMAGE = {"type": "image_url", "image_url": {"url": URL}}
QUESTION = {"type": "text", "text": "Where is it?"}


@pytest.fixture(scope="module")
def server():
    with served(AsyncEngine(), names=("shapes",)) as one:
        yield one


def expected_boxes(text):
    """Return the expected `boxes` for an answer's text."""
    found, value = {}, json.loads(text)
    for name in ("bbox_2d", "at"):
        box = restore(value[name], BoxUnit("thousandths"), FRAME)
        found[f"/{name}"] = {"pixels": list(box.pixels), **({"problem": box.problem} if box.problem else {})}
    return found


def test_chat_has_them_in_the_message_and_in_the_last_chunk(server):
    status, _, answer = server.chat([IMAGE, QUESTION], response_format=FORM, **ASKED)
    assert status == 200, answer
    message = answer["choices"][0]["message"]
    assert message["boxes"] == expected_boxes(message["content"])
    assert "field_confidence" not in message
    both = {**FORM, "field_confidence": True}
    events = [
        json.loads(each) for each in server.events([IMAGE, QUESTION], response_format=both, **ASKED)[:-1]
    ]
    deltas = [each["choices"][0]["delta"] for each in events]
    assert deltas[-1].keys() == {"field_confidence", "boxes"} and deltas[-1]["boxes"] == message["boxes"]
    assert not any("boxes" in delta for delta in deltas[:-1])


def test_other_apis_have_the_same_boxes(server):
    image = {"type": "input_image", "image_url": URL}
    turn = [{"role": "user", "content": [image, {"type": "input_text", "text": "Where is it?"}]}]
    status, _, answer = server.respond(turn, text={"format": FLAT}, **ASKED)
    assert status == 200, answer
    part = answer["output"][0]["content"][0]
    assert part["boxes"] == expected_boxes(part["text"])
    _, _, text = server.respond(turn, text={"format": FLAT}, stream=True, **ASKED)
    ended = dict(named_events(text))["response.completed"]["response"]
    assert ended["output"][0]["content"][0]["boxes"] == part["boxes"]
    source = {"type": "base64", "media_type": "image/png", "data": PNG}
    message = {
        "messages": [{"role": "user", "content": [{"type": "image", "source": source}, QUESTION]}],
        "max_tokens": 1000,
        "output_config": {"format": {name: value for name, value in FLAT.items() if name != "name"}},
        **ASKED,
    }
    status, _, answer = server.call("/v1/messages", message)
    assert status == 200 and answer["boxes"] == expected_boxes(answer["content"][0]["text"]), answer
    _, _, text = server.call("/v1/messages", {**message, "stream": True})
    assert json.dumps(answer["boxes"], separators=(",", ":")) in text


def test_an_answer_that_was_cut_has_no_boxes(server):
    _, _, answer = server.chat([IMAGE, QUESTION], response_format=FORM, **ASKED, max_tokens=4)
    assert answer["choices"][0]["message"]["boxes"] == {}


@pytest.mark.parametrize(
    "content, form, words",
    [
        ([QUESTION], FORM, "exactly one image in the prompt, which has 0"),
        ([IMAGE, IMAGE, QUESTION], FORM, "exactly one image in the prompt, which has 2"),
        ([IMAGE, QUESTION], {"type": "text", "boxes": True}, "json_schema or json_object"),
        ([IMAGE, QUESTION], {**FORM, "boxes": 1}, "must be true or false"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}], FORM, "readable image"),
    ],
)
def test_calls_without_one_image_are_refused(server, content, form, words):
    status, _, answer = server.chat(content, response_format=form, **ASKED)
    assert status == 400 and words in answer["error"]["message"], answer
    assert answer["error"]["param"] == "response_format.boxes"


def test_an_unknown_family_is_refused_by_its_name(monkeypatch):
    engine = AsyncEngine()
    monkeypatch.setattr(type(engine._engine.built.plugin), "box_units", {"another": BoxUnit("thousandths")})
    with served(engine, names=("shapes",)) as server:
        status, _, answer = server.chat([IMAGE, QUESTION], response_format=FORM, **ASKED)
    assert (
        status == 400 and "'qwen3_vl' have an unknown unit; known are another" in answer["error"]["message"]
    )
    assert answer["error"]["param"] == "response_format.boxes"


def test_a_completion_of_text_has_no_image(server):
    asked = {"prompt": "hello", "response_format": FORM, **ASKED}
    status, _, answer = server.call("/v1/completions", asked)
    assert status == 400 and answer["error"]["param"] == "response_format.boxes", answer
