"""Tests boxes in answers about images that the client names by URL, server path or file id. Also tests a
fleet replica, and a model family with boxes in pixels of the resized image.
"""

import base64
import json
import threading
from contextlib import contextmanager

import pytest

from mmengine import AsyncEngine
from mmengine.fleet.engine import FleetEngine
from mmengine.fleet.replica import Replica
from mmengine.models.box_unit import BoxUnit
from mmengine.processing.media.boxes import restore
from mmengine.server.chat import answer_boxes
from mmengine.server.http.body_reader import SMALL_BODY
from tests.fleet.carriers import LocalCarrier
from tests.processing.internet import Internet, answer
from tests.server.batching import begun, client_of, ended, line, lines_in
from tests.server.running import served
from tests.server.test_server_boxes import ASKED, BOX, FRAME, IMAGE, PNG, QUESTION

THOUSANDTHS = BoxUnit("thousandths")
DATA = base64.b64decode(PNG)
SCHEMA = {
    "type": "object",
    "properties": {"bbox_2d": BOX},
    "required": ["bbox_2d"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}, "boxes": True}
FLAT = {"type": "json_schema", "name": "it", "schema": SCHEMA, "boxes": True}


@pytest.fixture(scope="module")
def net():
    net = Internet()
    net.pages = {"/a.png": answer(DATA), "/broken.png": answer(DATA[:20]), "/b.txt": answer(b"no image")}
    yield net
    net.close()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("root")
    (folder / "a.png").write_bytes(DATA)
    return folder


@pytest.fixture(scope="module")
def server(net, root, tmp_path_factory):
    log = tmp_path_factory.mktemp("boxes") / "log"
    fetcher = net.fetcher(root=root)
    with served(AsyncEngine(log=log), names=("shapes",), media_fetcher=fetcher, storage={"log": log}) as one:
        yield one


def image(url, **fields):
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def expected_boxes(text, unit=THOUSANDTHS, frame=FRAME):
    """Return the expected `boxes` for an answer's text."""
    box = restore(json.loads(text)["bbox_2d"], unit, frame)
    return {"/bbox_2d": {"pixels": list(box.pixels), **({"problem": box.problem} if box.problem else {})}}


def check_message(reply):
    status, _, body = reply
    assert status == 200, body
    message = body["choices"][0]["message"]
    assert message["boxes"] == expected_boxes(message["content"])
    return message


def test_an_image_by_url_or_path_has_the_boxes_of_its_bytes(server, net):
    sent = check_message(server.chat([IMAGE, QUESTION], response_format=FORM, **ASKED))
    for part in (
        image(net.url("/a.png")),
        image("file://a.png"),
        {"type": "image", "path": "a.png"},
        {"type": "image", "base64": PNG},
    ):
        assert check_message(server.chat([part, QUESTION], response_format=FORM, **ASKED)) == sent
    assert server.media_fetcher.num_bytes == 0
    events = server.events([image(net.url("/a.png")), QUESTION], response_format=FORM, **ASKED)
    assert json.loads(events[-2])["choices"][0]["delta"]["boxes"] == sent["boxes"]


def test_an_uploaded_image_has_the_boxes_of_its_bytes(server):
    with client_of(server) as client:
        file = client.files.create(file=("a.png", DATA), purpose="vision")
    for part in (image(file.id), {"type": "file", "file": {"file_id": file.id}}):
        check_message(server.chat([part, QUESTION], response_format=FORM, **ASKED))
    message = {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image", "source": {"type": "file", "file_id": file.id}},
                    QUESTION,
                ],
            }
        ],
        "max_tokens": 1000,
        "output_config": {"format": {name: value for name, value in FLAT.items() if name != "name"}},
        **ASKED,
    }
    status, _, found = server.call("/v1/messages", message)
    assert status == 200 and found["boxes"] == expected_boxes(found["content"][0]["text"]), found


def test_images_are_measured_on_a_parser_thread(server, net, monkeypatch):
    measure, threads = answer_boxes.image_frame, []

    def measured(*given):
        threads.append(threading.current_thread().name)
        return measure(*given)

    monkeypatch.setattr(answer_boxes, "image_frame", measured)
    with client_of(server) as client:
        file = client.files.create(file=("a.png", DATA), purpose="vision")
    for part in (IMAGE, image(net.url("/a.png")), image(file.id)):
        check_message(server.chat([part, QUESTION], response_format=FORM, **ASKED))
    assert len(DATA) > SMALL_BODY
    assert [name.startswith("mmengine-parse") for name in threads] == [True] * 3, threads


@pytest.mark.parametrize("stores", [True, False])
def test_responses_and_batches_read_images_by_url(server, net, stores):
    picture = {"type": "input_image", "image_url": net.url("/a.png")}
    turn = [{"role": "user", "content": [picture, {"type": "input_text", "text": "Where is it?"}]}]
    status, _, found = server.respond(turn, text={"format": FLAT}, store=stores, **ASKED)
    assert status == 200, found
    part = found["output"][0]["content"][0]
    assert part["boxes"] == expected_boxes(part["text"])
    if stores:
        _, _, again = server.call(f"/v1/responses/{found['id']}")
        assert again["output"][0]["content"][0]["boxes"] == part["boxes"]
    lines = [line("one", [image(net.url("/a.png")), QUESTION], response_format=FORM, **ASKED)]
    with client_of(server) as client:
        batch = ended(client, begun(client, lines))
        (row,) = lines_in(client, batch.output_file_id)
    check_message((200, {}, row["response"]["body"]))


def test_a_repeated_call_has_the_same_boxes(server, net):
    content, key = [image(net.url("/a.png")), QUESTION], {"idempotency-key": "twice"}
    body = {"messages": [{"role": "user", "content": content}], "response_format": FORM, **ASKED}
    first, again = (check_message(server.call("/v1/chat/completions", body, key)) for _ in range(2))
    assert first == again


@pytest.mark.parametrize(
    "part, code, param",
    [
        (lambda net: image(net.url("/missing")), "media_not_fetched", "messages[0].content[0]"),
        (lambda net: image(net.url("/b.txt")), "media_not_fetched", "messages[0].content[0]"),
        (lambda net: image(net.url("/broken.png")), None, "response_format.boxes"),
        (lambda net: image("file://missing.png"), "media_not_fetched", "messages[0].content[0]"),
        (lambda net: image(f"file-{'0' * 24}"), "file_not_found", "messages[0].content[0].image_url"),
        (
            lambda net: {"type": "video_url", "video_url": {"url": net.url("/a.png")}},
            None,
            "response_format.boxes",
        ),
    ],
)
def test_an_image_that_cannot_be_read_is_one_error(server, net, part, code, param):
    status, _, body = server.chat([part(net), QUESTION], response_format=FORM, **ASKED)
    assert status in (400, 404), body
    assert (body["error"]["code"], body["error"]["param"]) == (code, param), body
    assert server.media_fetcher.num_bytes == 0


def test_images_under_other_names_count(server):
    # Boxes need exactly one image. An image in another accepted format counts too.
    parts = [IMAGE, {"type": "image", "url": IMAGE["image_url"]["url"]}, QUESTION]
    status, _, body = server.chat(parts, response_format=FORM, **ASKED)
    assert status == 400 and "which has 2" in body["error"]["message"], body


def test_a_session_refuses_boxes(server):
    status, _, session = server.call("/v1/sessions", {})
    assert status == 200, session
    asked = {"content": [IMAGE, QUESTION], "response_format": FORM}
    status, _, body = server.call(f"/v1/sessions/{session['id']}/ask", asked)
    assert status == 400 and "not supported in a session" in body["error"]["message"], body


def test_pixels_of_the_resized_image_need_the_fetched_bytes(server, net, monkeypatch):
    plugin = type(server.engine._engine.built.plugin)
    monkeypatch.setattr(plugin, "box_units", {"qwen3_vl": BoxUnit("pixels", 16)})
    reply = server.chat([image(net.url("/a.png")), QUESTION], response_format=FORM, **ASKED)
    sent = server.chat([IMAGE, QUESTION], response_format=FORM, **ASKED)
    message = reply[2]["choices"][0]["message"]
    assert message == sent[2]["choices"][0]["message"], message
    upright = FRAME.height, FRAME.width
    frame = FRAME._replace(resized_width=upright[0] // 32 * 32, resized_height=upright[1] // 32 * 32)
    assert message["boxes"] == expected_boxes(message["content"], BoxUnit("pixels", 16), frame)


@contextmanager
def fleet_served(**options):
    """Serve the included model by a fleet of one replica."""
    engine = AsyncEngine()

    def fleet() -> FleetEngine:
        carrier = LocalCarrier(Replica("a", engine))
        return FleetEngine(carrier, engine.processor, engine.config, 64, box_unit=engine.box_unit)

    with served(fleet, names=("shapes",), **options) as one:
        yield one


def test_replicas_give_boxes_too(net, root):
    with fleet_served(media_fetcher=net.fetcher(root=root)) as server:
        for part in (IMAGE, image(net.url("/a.png"))):
            check_message(server.chat([part, QUESTION], response_format=FORM, **ASKED))
