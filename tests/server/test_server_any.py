"""Tests the application under a plain ASGI server, such as Ray Serve's proxies. Such a server lacks the
`Line` (transport/sse.py) through which mmengine's own server reports slow readers.
"""

import asyncio
import json

import pytest

from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.server.app.app import App
from mmengine.server.http.auth import ApiKeys
from mmengine.server.settings import ServerSettings
from mmengine.server.transport.any_asgi_server import FULL_BYTES, AnyServer
from tests.serve.serve_fakes import builder
from tests.server.running import SlowEcho

PATH = "/v1/chat/completions"


class Call:
    """A call of an ASGI application without a server. `leaves`: an event that disconnects the client."""

    def __init__(self, app, method, path, body=None):
        self.messages, self.leaves = [], asyncio.Event()
        self.may_send = asyncio.Event()
        self.may_send.set()
        self._body = [json.dumps(body).encode()] if body is not None else [b""]
        scope = {"type": "http", "method": method, "path": path, "headers": [], "client": None}
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self):
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        await self.may_send.wait()
        self.messages.append(message)

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.messages).decode()


@pytest.fixture
def go():
    def run(test, **settings):
        async def main():
            engine = AsyncEngine(builder=builder(executor_class=SlowEcho))
            app = App(engine, ServerSettings.of(settings), ApiKeys(None), ("echo",))
            await asyncio.wait_for(test(AnyServer(app), engine), 30)
            await engine.close(drain=False)

        asyncio.run(main())

    return run


def asked(text, **fields):
    return {"messages": [{"role": "user", "content": text}], **fields}


def test_answers_streams_and_refusals(go):
    async def test(app, engine):
        whole, stream = (Call(app, "POST", PATH, asked("hello", stream=each)) for each in (False, True))
        bad, models = Call(app, "POST", PATH, asked("a", nonsense=1)), Call(app, "GET", "/v1/models")
        await asyncio.gather(*(each.task for each in (whole, stream, bad, models)))
        assert json.loads(whole.text)["choices"][0]["message"]["content"] == "HELLO"
        events = [line.removeprefix("data: ") for line in stream.text.split("\n\n") if line]
        assert events[-1] == "[DONE]"
        deltas = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events[:-1]]
        assert "".join(deltas) == "HELLO"
        assert stream.messages[0]["type"] == "http.response.start" and not stream.messages[-1]["more_body"]
        assert [each.messages[0]["status"] for each in (whole, stream, bad, models)] == [200, 200, 400, 200]

    go(test)


def test_a_disconnect_cancels_the_call(go):
    async def test(app, engine):
        calls = [Call(app, "POST", PATH, asked("a" * 300, stream=each)) for each in (False, True)]
        while engine.stats().num_running < 2 or not calls[1].messages:
            await asyncio.sleep(0.01)
        for call in calls:
            call.leaves.set()
        await asyncio.gather(*(call.task for call in calls))
        while engine.stats().num_running:
            await asyncio.sleep(0.01)
        assert "[DONE]" not in calls[1].text

    go(test)


def test_a_slow_reader_is_cut(go):
    async def test(app, engine):
        call = Call(app, "POST", PATH, asked("a" * 180, stream=True, n=4, logprobs=True, top_logprobs=3))
        while not call.messages:
            await asyncio.sleep(0.005)
        call.may_send.clear()
        await call.task
        assert len(call.text) < FULL_BYTES * 4 and "[DONE]" not in call.text

    go(test, slow_reader_s=0.2)
