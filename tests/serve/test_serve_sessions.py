"""Tests engine.session() with the included checkpoint. A session's answer equals the answer to a single
request with the session's content.
"""

import asyncio
import io
import threading
import time

import numpy as np
import pytest
from PIL import Image

from mmengine import AsyncEngine, Engine, Prompt
from mmengine.config import EngineConfig
from mmengine.core.resume import Resume
from mmengine.errors import InvalidMedia, InvalidRequest, QueueFull, SessionBusy
from mmengine.replay import verify
from tests.log_copies import copied
from tests.serve.serve_fakes import TurnEcho, builder
from tests.server.running import SlowEcho

QUESTION = "Which colour?"
SIDE = {"min_pixels": 64 * 64, "max_pixels": 64 * 64}  # a fixed frame size for videos of any length


def picture(number, side=64):
    return Image.new("RGB", (side, side), (number * 40 % 256, 100, 255 - number * 20 % 256))


def frames(count, first=0):
    return [(0.5 * number, picture(number)) for number in range(first, first + count)]


def film(seen):
    """Return a message part with all frames as a video."""
    metadata = {"fps": 1000.0, "frames_indices": [int(1000 * seconds) for seconds, _ in seen]}
    return {"type": "video", "video": ([image for _, image in seen], metadata)}


def tokens(completion):
    return completion.choices[0].token_ids


@pytest.fixture(scope="module")
def engine():
    with Engine() as one:
        yield one


def cold(engine, messages, **options):
    """Reset the prefix cache, and return the answer to a request."""
    engine._core.reset_prefix_cache()
    return engine.generate([Prompt(messages, media_options=SIDE)], **options)[0]


def test_frames_and_a_question_are_one_cold_request(engine):
    seen = frames(6)
    with engine.session(system="You watch.", media_options=SIDE) as session:
        told = [session.frame(image, seconds) for seconds, image in seen]
        assert [each is None for each in told] == [True, False] * 3, "two frames are a patch"
        answer = session.ask(QUESTION, max_tokens=8)
        assert answer.num_cached_tokens >= session.facts.num_tokens // 2
    content = [film(seen), {"type": "text", "text": QUESTION}]
    messages = [{"role": "system", "content": "You watch."}, {"role": "user", "content": content}]
    alone = cold(engine, messages, max_tokens=8)
    assert np.array_equal(answer.prompt_token_ids, alone.prompt_token_ids)
    assert tokens(answer) == tokens(alone) and not alone.num_cached_tokens


def test_answers_stay_and_the_conversation_goes_on(engine):
    """A session's prompt equals the prompt of a chat with the same turns."""
    image = {"type": "image", "image": picture(3)}
    with engine.session() as session:
        session.append(["Look: ", image])
        first = session.ask("What is it?", max_tokens=6, seed=3, temperature=0.8)
        session.append(image)
        second = session.ask("And that?", max_tokens=6)
    prompt = [*second.prompt_token_ids.tolist()]
    said = tokens(first)
    place = len(first.prompt_token_ids)
    assert prompt[place : place + len(said)] == said, "all answer tokens stay, also the last one"
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Look: "}, image, _text("What is it?")]},
        {"role": "assistant", "content": "X"},
        {"role": "user", "content": [image, _text("And that?")]},
    ]
    prepared = Prompt(messages=messages).prepare(engine.processor)
    # In the session's prompt, the first answer's tokens stand in the place of "X".
    (mark,) = engine.processor.tokenizer.encode("X")
    at = prepared.prompt_token_ids.tolist().index(mark, place)
    rest = prepared.prompt_token_ids.tolist()[at + 1 :]
    ends = said[-1] == rest[0]
    assert prompt == [*first.prompt_token_ids.tolist(), *said, *rest[ends:]]


def _text(text):
    return {"type": "text", "text": text}


def test_a_form_and_a_stop_go_with_a_question(engine):
    with engine.session() as session:
        session.append("Some text.")
        answer = session.ask("Yes or no?", grammar={"choice": ["yes", "no"]}, max_tokens=9)
        assert answer.text in ("yes", "no")
        assert session.facts.answer == tokens(answer)


def test_too_long_a_session_begins_anew_with_its_anchor_and_the_last_patches(engine):
    """A shortened session's answer equals the answer to a request with only the kept content."""
    with engine.session(system="Watch.", length=130, keep=80, media_options=SIDE) as session:
        session.append("The door is red. ", anchor=True)
        lengths = []
        for seconds, image in frames(24):
            session.frame(image, seconds)
            lengths.append(session.facts.num_tokens)
        assert max(lengths) <= 130 and any(b < a for a, b in zip(lengths, lengths[1:], strict=False))
        answer = session.ask(QUESTION, max_tokens=6)
        text = engine.processor.tokenizer.decode(answer.prompt_token_ids.tolist())
        assert "The door is red. <" in text and "<11.2 seconds>" in text and "<0.2 seconds>" not in text
        items = session.facts.num_media
        kept = frames(2 * items, 24 - 2 * items)
    content = [_text("The door is red. "), film(kept), _text(QUESTION)]
    messages = [{"role": "system", "content": "Watch."}, {"role": "user", "content": content}]
    alone = cold(engine, messages, max_tokens=6)
    assert tokens(alone) == tokens(answer)
    assert not engine.sessions._media.num_bytes, "a closed session keeps no media"


def test_invalid_content_is_refused_and_changes_nothing(engine):
    with engine.session(length=64, keep=32) as session:
        session.append("a")
        before = session.facts
        with pytest.raises(InvalidRequest, match="limit is 64"):
            session.append("word " * 200)
        with pytest.raises(InvalidRequest, match="an anchor must come first"):
            session.append("b", anchor=True)
        with pytest.raises(InvalidMedia):
            session.append({"type": "image", "image": b"no picture"})
        with pytest.raises(InvalidRequest, match="leave out n"):
            session.ask("c", n=2)
        with pytest.raises(InvalidRequest, match="a number of seconds"):
            session.frame(picture(0), -1)
        session.frame(picture(0), 5.0)
        with pytest.raises(InvalidRequest, match="not be before the previous"):
            session.frame(picture(0), 4.0)
        assert session.facts == before
    with pytest.raises(InvalidRequest, match="no session"):
        session.append("d")
    with pytest.raises(InvalidRequest, match="length must lie in"):
        engine.session(length=10**9)
    with pytest.raises(InvalidRequest, match="idle_s"):
        engine.session(idle_s=-1)
    engine.session("short", idle_s=1e-10)  # closed almost immediately; 0 means never
    for _ in range(2):  # one step opens the session, the next closes it
        engine.step()
    assert "short" not in engine.sessions.names()


def test_media_in_memory_have_a_limit():
    with Engine(config=EngineConfig(session_media_bytes=10_000)) as engine, engine.session() as session:
        with pytest.raises(QueueFull, match="session_media_bytes"):
            session.append({"type": "image", "image": picture(0)})
        session.append("a text")


def test_a_session_goes_on_in_the_next_process(tmp_path):
    """The media store keeps a session's images over a restart, and deletes their files with the session. The
    answer stays the same.
    """
    log, store = tmp_path / "log", tmp_path / "log" / "media"
    with Engine(log=log) as engine:
        session = engine.session("door", system="Watch.", length=80, keep=50, media_options=SIDE)
        for seconds, image in frames(6):
            session.frame(image, seconds)
        count = len(list(store.iterdir()))
        assert count == 3
    with Engine(log=log, resume=Resume()) as engine:
        session = engine.session("door", media_options=SIDE)
        assert session.facts.num_media == 3 and session.facts.settings.system == "Watch."
        assert not session.facts.num_leased_tokens and len(list(store.iterdir())) == 3
        answer = session.ask(QUESTION, max_tokens=6)
        assert not answer.num_cached_tokens
        for seconds, image in frames(8, 6):
            session.frame(image, seconds)
        assert len(list(store.iterdir())) < 7, "dropped media are deleted"
        session.close()
        engine.step()
        assert not list(store.iterdir())
    with Engine() as engine:
        content = [film(frames(6)), _text(QUESTION)]
        messages = [{"role": "system", "content": "Watch."}, {"role": "user", "content": content}]
        assert tokens(cold(engine, messages, max_tokens=6)) == tokens(answer)


def test_files_of_a_resumed_session_go_when_it_is_idle(tmp_path):
    """An idle session's files are deleted without another request."""
    log, store = tmp_path / "log", tmp_path / "log" / "media"
    with Engine(log=log) as engine:
        for number, idle_s in enumerate((0.1, 0)):
            session = engine.session(f"door {number}", idle_s=idle_s)
            session.append({"type": "image", "image": picture(number)})
    with Engine(log=log, resume=Resume()) as engine:
        assert len(list(store.iterdir())) == 2
        time.sleep(0.1)
        engine.step()
        assert engine.sessions.names() == ["door 1"] and len(list(store.iterdir())) == 1
        engine.sessions.close("door 1")
        engine.step()
        assert not list(store.iterdir())


@pytest.mark.parametrize("ahead_bytes", [2**30, 1])
def test_other_requests_go_on_while_a_session_decodes_its_images_again(tmp_path, ahead_bytes):
    """A resumed session decodes its images again. Preparation threads decode images up to media_ahead_bytes,
    and engine steps decode the rest.
    """
    log, config = tmp_path / "log", EngineConfig(media_decoding="threads", media_ahead_bytes=ahead_bytes)
    with Engine(log=log) as engine:
        session = engine.session("door")
        for number in range(3):
            buffer = io.BytesIO()
            picture(number).save(buffer, "PNG")
            session.append({"type": "image", "image": buffer.getvalue()})
        length = session.facts.num_tokens

    async def run():
        async with AsyncEngine(log=log, resume=Resume(), config=config) as engine:
            begun, answered, threads = threading.Event(), threading.Event(), []
            restore = engine.processor.restore

            def watched(item, source):
                threads.append(threading.current_thread().name.rpartition("-")[0])
                begun.set()
                assert answered.wait(10)
                return restore(item, source)

            engine.processor.restore = watched
            session = engine.attach_session("door")
            asked = asyncio.create_task(session.ask(QUESTION, max_tokens=4))
            await asyncio.to_thread(begun.wait, 10)
            async with asyncio.timeout(5):
                await engine.generate("Another caller.", max_tokens=2)
            answered.set()
            told = await asked
            on_lane = 3 if ahead_bytes > 1 else 1
            assert threads == ["mmengine-media"] * on_lane + [""] * (3 - on_lane)
            assert not told.num_cached_tokens and not engine._engine.media_memory.num_bytes
            again = await session.ask(QUESTION, max_tokens=4)
            assert again.num_cached_tokens > length - 16 and len(threads) == 3, (
                "computed tokens and images are kept"
            )

    asyncio.run(run())


def test_a_session_survives_a_kill_at_any_step(tmp_path):
    """The log is copied after each step, and a new engine resumes each copy."""

    def echo(log, resume=None):
        return Engine(builder=builder(processor=TurnEcho()), log=log, resume=resume)

    copies, ends = [], []
    with echo(tmp_path / "log") as engine:
        step = engine.step

        def watched(**options):
            news = step(**options)
            copies.append(copied(tmp_path / "log", tmp_path / f"copy {len(copies)}"))
            return news

        engine.step = watched
        session = engine.session("door", system="s")
        for number, text in enumerate("ab"):
            session.append(text * 20)
            ends.append(session.facts.num_tokens)
            session.ask(f"{number}?", max_tokens=4 + number)
            ends.append(session.facts.num_tokens)
        last = session.facts
    assert len(copies) > 10
    for copy in copies:
        with echo(copy, Resume()) as engine:
            while engine.has_work:
                engine.step()
            if not engine.sessions.names():
                continue
            session = engine.session("door")
            facts = session.facts
            assert not facts.live and not engine.requests.resumed
            assert facts.num_tokens == ([0, *ends])[facts.num_requests]
            if facts.num_requests == last.num_requests:
                assert facts.answer == last.answer
        assert verify(copy).ok


def test_missing_media_are_reported(tmp_path):
    config = EngineConfig(media_store_bytes=0)
    with Engine(log=tmp_path / "log", config=config) as engine:
        engine.session("door").append({"type": "image", "image": picture(1)})
    lost = pytest.raises(InvalidMedia, match="lost with the process")
    with Engine(log=tmp_path / "log", config=config, resume=Resume()) as engine, lost:
        engine.session("door").ask(QUESTION, max_tokens=2)


def test_requests_of_a_session_run_one_at_a_time():
    async def run():
        async with AsyncEngine(builder=builder(processor=TurnEcho())) as engine:
            session = await engine.session(system="s")
            done = await asyncio.gather(*(session.append(text) for text in "abc"))
            assert [each.num_tokens for each in done] == [3, 4, 5]
            asked = [asyncio.create_task(session.ask("q", max_tokens=40)) for _ in range(20)]
            results = await asyncio.gather(*asked, return_exceptions=True)
            assert any(isinstance(each, SessionBusy) for each in results)
            said = [each.text for each in results if not isinstance(each, BaseException)]
            assert said[0] == "S<ABCQ>" and len(said) >= 2
            assert (await session.facts()).num_requests == 3 + len(said)

    asyncio.run(run())


def test_leaving_a_question_takes_it_back():
    async def run():
        # SlowEcho's answer is unfinished when its caller leaves, so the session loses the question.
        slow = builder(processor=TurnEcho(), executor_class=SlowEcho)
        async with AsyncEngine(builder=slow) as engine:
            session = await engine.session()
            await session.append("hello")
            before = await session.facts()
            async with session.stream("q" * 60, max_tokens=80) as stream:
                async for _ in stream:
                    break
            await session.append("!")
            facts = await session.facts()
            assert facts.num_tokens == before.num_tokens + 1 and facts.num_requests == 2

    asyncio.run(run())


def test_a_session_is_not_idle_while_a_request_of_it_is_prepared():
    class Slow(TurnEcho):
        def prepare_turn(self, content, **options):
            time.sleep(0.3)
            return super().prepare_turn(content, **options)

    async def run():
        async with AsyncEngine(builder=builder(processor=Slow())) as engine:
            session = await engine.session(idle_s=0.1)
            first, second = await asyncio.gather(session.append("a"), session.append("b"))
            assert (first.num_tokens, second.num_tokens) == (2, 3)
            async with asyncio.timeout(10):
                while await engine.sessions():
                    await asyncio.sleep(0.02)

    asyncio.run(run())


def test_idle_time_counts_from_a_waiting_frame_too():
    def left(engine):
        return engine.sessions.idle_s

    with Engine(builder=builder(processor=TurnEcho())) as engine:
        session = engine.session(idle_s=100)
        engine.step()
        time.sleep(0.5)
        before = left(engine)
        assert session.frame(picture(0), 0.0) is None and before < left(engine)

    async def run():
        async with AsyncEngine(builder=builder(processor=TurnEcho())) as engine:
            session = await engine.session(idle_s=100)
            await session.facts()
            await asyncio.sleep(0.5)
            before = await engine.on_engine(left)
            assert await session.frame(picture(0), 0.0) is None
            assert before < await engine.on_engine(left)
            async with session.turn():
                assert await engine.on_engine(left) is None

    asyncio.run(run())


def test_sessions_end_by_themselves_and_by_the_number():
    # A session ends after idle_s. While max_sessions sessions are open, a new session is refused.
    async def run():
        async with AsyncEngine(builder=builder(processor=TurnEcho(), max_sessions=1)) as engine:
            first = await engine.session(idle_s=0.2)
            with pytest.raises(QueueFull, match="max_sessions"):
                await engine.session()
            await first.append("a")
            async with asyncio.timeout(10):
                while await engine.sessions():
                    await asyncio.sleep(0.02)
            second = await engine.session()
            with pytest.raises(InvalidRequest, match="no session"):
                await first.append("b")
            await second.close()
            await second.close()
            assert not await engine.sessions()

    asyncio.run(run())
