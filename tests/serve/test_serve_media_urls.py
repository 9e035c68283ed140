"""Tests prompts with media by URL: which URLs are found, when they may be fetched, and that answers are the
same as for the media's bytes. Also tests limits, when fetched bytes are released, errors in a batch's lines,
a resume without the network, and cancelled fetches.
"""

import asyncio
import binascii
import json
import struct
import time
import zlib

import pytest

from mmengine.cli.batch import run_batch_file
from mmengine.core.resume import Resume
from mmengine.errors import FIELD, InvalidMedia, InvalidRequest, in_words
from mmengine.processing.fetch.fetcher import MediaFetcher
from mmengine.processing.fetch.limits import FetchLimits
from mmengine.processing.fetch.refusals import FetchRefused
from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.serve.engine.engine import Engine
from mmengine.serve.pipeline.pipeline import Pipeline
from mmengine.serve.prompt.media_references import replaced, replaced_items
from mmengine.serve.prompt.prompt import Prompt
from mmengine.serve.prompt.prompt_media import fetcher_of
from tests.log_copies import copied
from tests.pictures import scene
from tests.processing.internet import Internet, answer, png

URL, FILE = "https://a.b/c.png", "file:///c.png"


def ask(*parts, text="What is in the image?"):
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def image(url):
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.fixture(scope="module")
def picture():
    return scene()


@pytest.fixture(scope="module")
def shared():
    net = Internet()
    yield net
    net.close()


@pytest.fixture
def net(shared, picture):
    shared.pages, shared.heads = {"/a.png": answer(picture)}, []
    return shared


@pytest.fixture(scope="module")
def engine():
    with Engine() as one:
        yield one


def found_in(messages, reads_files=False):
    places = {}
    replaced(
        messages,
        lambda name, where: places.setdefault(where.text.replace(FIELD, in_words(where.path)), name),
        reads_files,
    )
    return places


@pytest.mark.parametrize(
    "part",
    [
        *({"type": "image", "image": URL}, {"type": "image", "url": URL}, {"image": URL}, {"image_url": URL}),
        *(
            {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
            {"type": "image_url", "image_url": URL},
        ),
        {"type": "image", "url": URL.replace("https", "HTTPS")},
    ],
)
def test_a_reference_is_found_wherever_a_processor_looks(part):
    assert list(found_in([{"role": "system", "content": "x"}, *ask(part)])) == ["image 0 (message 1, part 0)"]
    (message,) = replaced(ask(part), lambda name, where: b"bytes", False)
    assert "b'bytes'" in str(message)
    assert "b'bytes'" not in str(part), "the caller's messages must not change"


def test_references_have_the_places_that_processors_report():
    # Errors name a URL's place as processors do: item, message, part and frame.
    places = found_in(
        ask(
            image("data:,"),
            image(URL),
            {"type": "video", "video": [URL, "a.png", URL]},
            {"type": "video", "video": URL},
        )
    )
    assert list(places) == [
        "image 1 (message 0, part 1)",
        "video 0 (message 0, part 2), frame 0",
        "video 0 (message 0, part 2), frame 2",
        "video 1 (message 0, part 3)",
    ]
    assert replaced_items([URL, b"x"], "image", lambda name, where: where.text.encode(), False) == [
        b"image 0",
        b"x",
    ]
    assert replaced_items(URL, "video", lambda name, where: where.text.encode(), False) == [b"video 0"]


@pytest.mark.parametrize(
    "part",
    [
        *(
            {"type": "text", "text": URL},
            {"type": "text", "text": "x", "image_url": URL},
            image("a.png"),
            image(FILE),
        ),
        *(
            {"type": "image", "path": "a.png"},
            image("ftp://a.b/c"),
            image(f" {URL}"),
            image(None),
            image(5),
            "x",
            5,
        ),
        *({"type": ["image"], "image": URL}, {"type": "image"}, {"type": "image", "image": b"x", "url": URL}),
    ],
)
def test_other_values_are_unchanged(part):
    assert found_in(ask(part)) == {}
    assert replaced(ask(part), lambda name, where: b"bytes", False) == ask(part)


def test_files_are_names_where_they_are_read():
    # With `reads_files`, file: URLs and paths are found too.
    parts = image(FILE), {"type": "image", "path": "a.png"}, image("a.png"), image("data:,")
    assert list(found_in(ask(*parts), reads_files=True).values()) == [FILE, "a.png"]


def test_the_urls_option_permits_fetching_or_is_refused():
    assert fetcher_of(Prompt()) is None is fetcher_of(Prompt(media_options={"urls": False}))
    door = fetcher_of(Prompt(media_options={"urls": True}))
    assert door.limits.hosts is None and not door.limits.http and not door.reads_files
    assert fetcher_of(Prompt(media_options={"urls": "public"})) is door, "they share a fetcher"
    assert fetcher_of(Prompt(media_options={"urls": ["a.b"]})).limits.hosts == ("a.b",)
    given = MediaFetcher(FetchLimits(hosts=()))
    assert fetcher_of(Prompt(media_options={"urls": given})) is given
    for wrong in (5, ["a b"], {"a": 1}, ["https://a.b"]):
        with pytest.raises(InvalidRequest, match="media_options.urls"):
            fetcher_of(Prompt(media_options={"urls": wrong}))


def test_the_pipeline_answers_a_url_like_its_bytes(engine, net, picture):
    pipe, options = Pipeline(model=engine), {"processor_kwargs": {"urls": net.fetcher()}}
    said = pipe(text=ask({"type": "image", "image": picture}), max_new_tokens=8)[0]["generated_text"][-1]
    part = {"type": "image", "url": net.url("/a.png")}
    (one,) = pipe(text=ask(part), max_new_tokens=8, **options)
    assert one["generated_text"][-1] == said
    assert one["input_text"] == ask(part), "what was given is shown, and no bytes"
    several = pipe(text=[ask(part)] * 3, max_new_tokens=8, **options)
    assert [each[0]["generated_text"][-1] for each in several] == [said] * 3
    opened = Pipeline(model=engine, **options)
    assert next(iter(opened(text=iter([ask(part)]), max_new_tokens=8)))[0]["generated_text"][-1] == said
    text = "<|vision_start|><|image_pad|><|vision_end|>What?"
    given = pipe(images=picture, text=text, max_new_tokens=8)
    assert pipe(images=net.url("/a.png"), text=text, max_new_tokens=8, **options) == given
    with pytest.raises(InvalidMedia, match=r'media_options=\{"urls": True\}'):
        pipe(text=ask(part), max_new_tokens=8)


def test_frames_and_files_of_videos_come_by_urls(engine, net, picture):
    door = net.fetcher()
    frames = [{"type": "video", "video": [net.url("/a.png")] * 3}]
    (one,) = engine.generate([Prompt(ask(*frames), media_options={"urls": door})], max_tokens=2)
    (other,) = engine.generate([Prompt(ask({"type": "video", "video": [picture] * 3}))], max_tokens=2)
    assert one.choices[0].token_ids == other.choices[0].token_ids
    with pytest.raises(FetchRefused, match=r"video 0 \(message 0, part 0\), frame 1 is not fetched"):
        engine.generate(
            [
                Prompt(
                    ask({"type": "video", "video": [picture, net.url("/none")]}), media_options={"urls": door}
                )
            ]
        )


def claims(width, height):
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in ((b"IHDR", head), (b"IDAT", zlib.compress(b"\0\0\0\0")), (b"IEND", b""))
    )
    return b"\x89PNG\r\n\x1a\n" + chunks


def test_pixels_are_bounded_before_they_are_decoded(engine, net):
    net.pages["/a.png"] = answer(claims(60_000, 60_000))
    with pytest.raises(InvalidMedia, match="pixels"):
        engine.submit(Prompt(ask(image(net.url("/a.png"))), media_options={"urls": net.fetcher()}))
    assert engine.is_idle


def test_a_data_url_beyond_the_limit_is_refused_before_it_is_decoded(engine, monkeypatch):
    decoded, decode = [], binascii.a2b_base64
    monkeypatch.setattr(binascii, "a2b_base64", lambda text, **how: decoded.append(1) or decode(text, **how))
    with pytest.raises(InvalidMedia, match="larger than 64 MiB"):
        engine.submit(ask(image("data:image/png;base64," + "A" * (100 * 2**20))))
    assert not decoded


def test_a_batch_fetches_ahead_and_tells_lines_that_cannot_be_fetched(engine, net, tmp_path):
    lines = [
        {
            "custom_id": str(number),
            "messages": ask(image(net.url("/none" if number == 3 else "/a.png"))),
            "max_tokens": 2,
        }
        for number in range(6)
    ]
    requests, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text("\n".join(map(json.dumps, lines)))

    class Kept:
        """Gives the module's engine to the batch, which must not close the engine."""

        def __enter__(self):
            return engine

        def __exit__(self, *exc):
            pass

    door = net.fetcher()
    assert run_batch_file(requests, out, None, lambda resume: Kept(), {"urls": door}) == 1
    answers = {each["custom_id"]: each for each in map(json.loads, out.read_text().splitlines())}
    assert len(answers) == 6 and len({answers[name]["text"] for name in "01245"}) == 1
    assert answers["3"]["error"].startswith(
        "image 0 (message 0, part 0) is not fetched: its host did not return it"
    )
    assert door.num_bytes == 0


def test_media_of_accepted_requests_are_never_fetched_again(net, picture, tmp_path):
    """The media store beside the log has the bytes, so another process continues without the network."""
    options = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "request_id": "a"}
    with Engine(log=tmp_path / "whole") as engine:
        engine.submit(ask({"type": "image", "image": picture}), **options)
        whole = _finish(engine)
    first = Engine(log=tmp_path / "log")
    first.submit(Prompt(ask(image(net.url("/a.png"))), media_options={"urls": net.fetcher()}), **options)
    for _ in range(3):
        first.step()
    copied(tmp_path / "log", tmp_path / "killed")
    first.close()
    num_fetched = len(net.heads)
    with Engine(log=tmp_path / "killed", resume=Resume()) as second:
        gone_on = second.requests.resume("a", 1) or _finish(second)
    assert gone_on.choices[0].token_ids == whole.choices[0].token_ids and num_fetched == 1 == len(net.heads)


def _finish(engine):
    found = None
    while not engine.is_idle:
        for output in engine.step():
            found = output.completion or found
    return found


class Slow:
    """A page that never arrives."""

    def __init__(self):
        self.num_waiting = 0

    def __call__(self, connection, closing):
        self.num_waiting += 1
        closing.wait(200)


async def eventually(check):
    ends = time.monotonic() + 60
    while not check():
        assert time.monotonic() < ends
        await asyncio.sleep(0.01)


def test_only_its_own_prompt_waits_for_a_slow_host(net, picture):
    """When a request is cancelled or misses its deadline, its fetches are cancelled too."""
    slow = net.pages["/slow"] = Slow()
    door = net.fetcher(timeout_s=60, max_fetches_a_host=16)
    prompt = Prompt(
        ask(*(image(net.url(f"/slow?{number}")) for number in range(3))), media_options={"urls": door}
    )
    net.pages.update({f"/slow?{number}": slow for number in range(3)})
    options = {"max_tokens": 2, "temperature": 0.0}

    async def run():
        async with AsyncEngine() as engine:
            await engine.generate(ask({"type": "image", "image": picture}), **options)
            left = [engine.stream(prompt, **options) for _ in range(3)]
            late = asyncio.create_task(engine.generate(prompt, deadline_s=0.6, **options))
            await eventually(lambda: slow.num_waiting >= 9)
            await asyncio.sleep(0.2)
            standing = engine.readiness()
            assert standing.num_preparing >= 3 and standing.oldest_preparing_s == 0, "fetching does not count"
            await engine.generate("hello", **options)
            await engine.generate(ask({"type": "image", "image": picture}), **options)
            assert door.num_running >= 9, "the slow host has not answered"
            for stream in left:
                await stream.aclose()
            with pytest.raises(Exception, match="deadline"):
                await late
            await eventually(lambda: door.num_running == 0 and door.num_bytes == 0)
            await eventually(lambda: engine.readiness().num_preparing == 0)
            net.pages["/fine.png"] = answer(png())
            fine = Prompt(ask(image(net.url("/fine.png"))), media_options={"urls": door})
            await engine.generate(fine, **options)

    asyncio.run(run())


def test_every_call_of_an_engine_takes_urls_among_its_media_options(engine, net):
    options = {"urls": net.fetcher()}
    for content in ("Hello", [image(net.url("/a.png"))]):
        messages = Prompt([{"role": "user", "content": content}], media_options=options)
        assert engine.chat(messages, max_tokens=2).choices[0].finish_reason
    session = engine.session(media_options=options)
    session.append("Hello")
    assert session.ask("Hello", max_tokens=2).finish_reason
    session.close()
