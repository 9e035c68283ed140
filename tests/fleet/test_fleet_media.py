"""Tests that a fleet releases fetched media, and that silent hosts delay no other request."""

import asyncio
import socket

import pytest

from mmengine.processing.fetch.fetcher import MediaFetcher
from mmengine.processing.fetch.limits import FetchLimits
from mmengine.processing.fetch.refusals import FetchRefused
from mmengine.serve.prompt.prompt import Prompt
from tests.fleet.test_fleet_moves import closed, fleet, replica

SIZE = 100_000


def asking(door, *urls):
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*images, {"type": "text", "text": "hi"}]
    return Prompt(messages=[{"role": "user", "content": content}], media_options={"urls": door})


def test_media_fetched_for_a_count_are_released_however_it_ends(tmp_path):
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + b"x" * SIZE)
    door = MediaFetcher(FetchLimits(root=tmp_path, max_bytes=2 * SIZE, max_bytes_in_flight=4 * SIZE))
    good, bad = (f"file://{tmp_path}/{name}" for name in ("a.png", "missing.png"))

    async def go():
        one = replica("a")
        engine, _ = fleet(one)
        for _ in range(5):
            with pytest.raises(FetchRefused):
                await engine.count(asking(door, good, bad))
            assert door.num_bytes == 0
        left = asyncio.create_task(engine.count(asking(door, good)))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        assert door.num_bytes == 0
        assert await engine.count(asking(door, good)) > 0
        await closed(engine, one)

    asyncio.run(go())


def test_silent_hosts_hold_no_thread_that_others_wait_for():
    silent = socket.socket()
    silent.bind(("127.0.0.1", 0))
    silent.listen(64)
    port = silent.getsockname()[1]
    limits = FetchLimits(http=True, ports=(port,), timeout_s=300.0)
    door = MediaFetcher(limits, is_allowed=lambda address: True)

    async def go():
        one = replica("a")
        engine, _ = fleet(one)
        slow = [engine.stream(asking(door, f"http://127.0.0.1:{port}/{n}.png")) for n in range(40)]
        await asyncio.sleep(0.1)
        await engine.generate(asking(door, "data:image/png;base64,AAAA"))
        assert door.num_running, "the silent hosts still hold their fetches"
        for stream in slow:
            stream.cancel()
        await closed(engine, one)

    with silent:
        asyncio.run(go())
