"""After all requests have ended, no object that is reachable from an engine contains a request's id."""

import asyncio
import hashlib
from collections import deque

import numpy as np
import pytest

from mmengine.core.resume import Resume
from mmengine.errors import InvalidRequest, QueueFull
from mmengine.models.plugin import MediaInput, Prepared
from mmengine.request import MediaItem
from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.serve.engine.engine import Engine
from mmengine_shapes.scenes import random_scene
from tests.serve.serve_fakes import EchoExecutor, EchoProcessor, builder

GRAMMAR = {"choice": ["yes", "no"]}
OURS = ("mmengine.", "mmengine_", "tests.", __name__)


class Picturing(EchoProcessor):
    """A processor whose prompts have pixels."""

    def prepare_text(self, text, **options):
        prepared = super().prepare_text(text)
        name = hashlib.sha256(text.encode()).digest()
        item = MediaItem(name, "image", ((0, 1),), (1, 2, 2))
        return Prepared(prepared.prompt_token_ids, (MediaInput(item, np.zeros((4, 8), np.uint8)),), text)


class Holding(EchoExecutor):
    """An executor that stores pixels, as a device does. With `fails`, every step fails."""

    fails = False

    def __init__(self, *args):
        super().__init__(*args)
        self.held = {}

    def attach(self, request_id, media):
        super().attach(request_id, media)
        self.held[request_id] = media

    def release(self, request_id):
        super().release(request_id)
        self.held.pop(request_id, None)
        self._rows = {row: each for row, each in self._rows.items() if each.request_id != request_id}

    def collect(self):
        result = super().collect()
        if self.fails:
            raise RuntimeError("the device fell over")
        return result


def kept(root, names):
    """Return the attribute paths from `root` to each occurrence of an id in `names`. The log in memory is
    skipped.
    """
    seen, found, ahead = set(), [], deque([(root, type(root).__name__)])
    while ahead:
        value, path = ahead.popleft()
        if isinstance(value, str):
            found += [f"{path}: {value}"] if value in names else []
            continue
        if id(value) in seen or path.endswith(".sink") or len(path) > 400:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            ahead.extend((key, f"{path} key") for key in value)
            ahead.extend((each, f"{path}[{key!r:.40}]") for key, each in value.items())
        elif isinstance(value, list | tuple | set | frozenset | deque):
            ahead.extend((each, f"{path}[]") for each in value)
        elif isinstance(value, np.ndarray):
            ahead.extend((each, f"{path}[]") for each in (value.tolist() if value.dtype == object else ()))
        elif type(value).__module__.startswith(OURS):
            ahead.extend((each, f"{path}.{name}") for name, each in attributes(value))
    return found


def attributes(value):
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        slots = getattr(kind, "__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                yield name, getattr(value, name)


def drive(engine):
    answers = {}
    while engine.has_work:
        for output in engine.step():
            if output.completion is not None:
                answers[output.request_id] = output.completion.finish_reason
    engine.step()  # logs that the answers were received
    return answers


def fake(tmp_path, resume=None, **settings):
    build = builder(processor=Picturing(), executor_class=Holding, **settings)
    return Engine(builder=build, log=tmp_path / "log", resume=resume)


def test_every_resource_is_released_however_a_request_ends(tmp_path):
    with fake(tmp_path, max_num_seqs=4) as engine:
        executor = engine.built.executor
        ids = {f"request {k}" for k in range(6)}
        engine.submit("stop", request_id="request 0", grammar=GRAMMAR, max_tokens=20)
        engine.submit("some length", request_id="request 1", grammar=GRAMMAR, max_tokens=3)
        engine.submit("three", request_id="request 2", grammar=GRAMMAR, n=3, temperature=1.0)
        engine.submit("cancelled", request_id="request 3", grammar=GRAMMAR, max_tokens=20)
        ids |= {f"request 2/{k}" for k in range(3)}
        engine.step()
        for holder in engine._resources._all:
            assert kept(holder, ids), (
                f"{type(holder).__name__} holds no request, so the test would prove nothing"
            )
        engine.cancel("request 3")
        ended = drive(engine)
        assert ended == {
            "request 0": "stop", "request 1": "length", "request 2": "stop", "request 3": "abort",
        }  # fmt: skip
        engine.submit("late", request_id="request 4", grammar=GRAMMAR, deadline_s=1e-9)
        assert drive(engine) == {"request 4": "abort"}
        executor.fails = True
        engine.submit("fails", request_id="request 5", grammar=GRAMMAR)
        assert drive(engine) == {"request 5": "error"}
        assert kept(engine, ids) == []


def test_nothing_is_kept_of_a_request_that_was_refused(tmp_path):
    with fake(tmp_path, max_waiting=3) as engine:
        for k in range(2):
            engine.submit(f"prompt {k}", request_id=f"taken {k}", max_tokens=9)
        with pytest.raises(QueueFull, match="max_waiting"):
            engine.submit("two", request_id="refused", grammar=GRAMMAR, n=2, temperature=1.0)
        with pytest.raises(InvalidRequest, match="never run|longer|max_model_len"):
            engine.submit("long " * 200, request_id="too long", grammar=GRAMMAR)
        ids = {"refused", "refused/0", "refused/1", "too long"}
        assert [where for where in kept(engine._resources, ids) if "refused/0" not in where] == []
        assert drive(engine) == {"taken 0": "stop", "taken 1": "stop"}
        assert kept(engine, ids | {"taken 0", "taken 1"}) == []


def test_an_id_in_use_does_not_affect_its_request(tmp_path):
    with fake(tmp_path) as engine:
        engine.submit("both", request_id="a", n=2, temperature=1.0, max_tokens=9)
        held = dict(engine.built.executor.held)
        with pytest.raises(InvalidRequest, match="the request id 'a/0' is in use; choose another"):
            engine.submit("other", request_id="a/0")
        assert engine.built.executor.held == held and set(held) == {"a/0", "a/1"}
        assert drive(engine) == {"a": "stop"}


def test_resources_of_recovered_requests_are_released_too(tmp_path):
    with fake(tmp_path) as engine:
        for name in ("taken up", "dropped", "lost"):
            engine.submit(name, request_id=name, grammar=GRAMMAR, max_tokens=9)
        engine.step()
        engine._core.sink.close()  # the log stays as a killed process leaves it
        engine.built.close = lambda: None
    store = tmp_path / "log" / "media"
    (store / f"{hashlib.sha256(b'lost').hexdigest()}.media").unlink()
    with fake(tmp_path, Resume()) as engine:
        ids = {"taken up", "dropped", "lost"}
        assert kept(engine._resources, ids)
        with pytest.raises(InvalidRequest, match="in use"):
            engine.submit("another", request_id="dropped")
        assert engine.built.executor.held["dropped"]
        assert engine.requests.resume("taken up") is None
        engine.requests.drop_resumed("dropped")
        engine.requests.resume("lost")
        assert drive(engine) == {"taken up": "stop", "lost": "error"}
        assert kept(engine, ids) == [] and list(store.iterdir()) == []


def test_an_async_engine_keeps_nothing_of_ended_requests():
    async def main():
        build = builder(processor=Picturing(), executor_class=Holding)
        async with AsyncEngine(builder=build) as engine:
            names = [f"stream {k}" for k in range(5)]
            streams = [engine.stream(name, request_id=name, grammar=GRAMMAR, max_tokens=9) for name in names]
            await streams[0].accepted()
            await streams[1].aclose()
            for stream in (streams[0], *streams[2:]):
                async for _ in stream:
                    pass
            with pytest.raises(InvalidRequest):
                await engine.generate("bad form", request_id="stream 5", grammar={"choice": []})
            while engine._engine.has_work or engine._open:
                await asyncio.sleep(0.01)
            engine._engine.requests.all_delivered()
        assert kept(engine, {*names, "stream 5"}) == []

    asyncio.run(asyncio.wait_for(main(), 30))


def test_the_runtime_keeps_no_pixels(tmp_path):
    import random

    scene = random_scene(random.Random(3)).draw()
    content = [{"type": "image", "image": scene}, {"type": "text", "text": "What is in the image?"}]
    with Engine(log=tmp_path / "log") as engine:
        for name in ("ends", "is cancelled"):
            engine.submit([{"role": "user", "content": content}], request_id=name, max_tokens=4)
        engine.step()
        ids = {"ends", "is cancelled"}
        assert kept(engine.built.executor, ids)
        engine.cancel("is cancelled")
        assert drive(engine) == {"ends": "length", "is cancelled": "abort"}
        assert kept(engine, ids) == []
