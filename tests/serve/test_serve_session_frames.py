"""Tests session frames: an encoder patch takes two frames, so the first frame waits for the second."""

import asyncio
import time

import pytest

from mmengine import AsyncEngine, Engine
from mmengine.errors import InvalidMedia
from tests.serve.serve_fakes import EchoExecutor, TurnEcho, builder
from tests.serve.test_serve_sessions import SIDE, picture


def test_an_invalid_frame_is_refused_at_once():
    """If the session kept the invalid frame, the next valid frame would be refused too."""
    with Engine() as engine, engine.session(media_options=SIDE) as session:
        with pytest.raises(InvalidMedia):
            session.frame(b"no picture", 0.0)
        assert session.frame(picture(0), 0.5) is None
        with pytest.raises(InvalidMedia):
            session.frame(b"no picture", 1.0)
        assert session.frame(picture(1), 1.5) is not None and session.facts.num_media == 1


class Slow(EchoExecutor):
    """A slow executor, so that a long question is still running when the caller leaves."""

    def collect(self):
        time.sleep(0.01)
        return super().collect()


def test_a_frame_is_held_until_it_is_part_of_the_session():
    """A failed or cancelled request does not lose the waiting frame. A completed request adds the frame
    to the session, and the frame no longer waits.
    """

    async def run():
        built = builder(processor=TurnEcho(), executor_class=Slow)
        async with AsyncEngine(builder=built) as engine:
            session = await engine.session()
            await session.frame("a frame", 1.0)
            async with session.stream("q" * 100, max_tokens=200) as stream:
                async for _ in stream:
                    break
            with pytest.raises(InvalidMedia):
                await session.ask("bad")
            with pytest.raises(InvalidMedia):
                await session.append("bad")
            await session.facts()
            assert session.num_frames_held == 1
            assert (await session.ask("q", max_tokens=9)).text == "<FQ>"
            await session.facts()
            assert session.num_frames_held == 0
            await session.frame("a frame", 2.0)
            asked = asyncio.create_task(session.append("x"))
            async with asyncio.timeout(10):
                while (await session.facts()).num_requests < 2:
                    await asyncio.sleep(0)
            asked.cancel()  # the session already has the text and the frame
            await asyncio.gather(asked, return_exceptions=True)
            assert session.num_frames_held == 0

    asyncio.run(run())
