"""Tests of the health routes with an engine that hangs, cannot write its log, or has failed. Also tests the
request log.
"""

import asyncio
import errno
import logging
import threading
from types import SimpleNamespace

from mmengine.errors import ExecutorFailed, ExecutorLost
from mmengine.events.log import LogWriter
from mmengine.serve.async_engine import async_engine
from mmengine.serve.requests import health
from mmengine.server.lifecycle import lifecycle
from tests.server.running import SlowEcho, served, wait_for


def full(self, data):
    raise OSError(errno.ENOSPC, "No space left on device")


def told(server):
    """Return the status and the reasons from /health/ready, and check the other health routes."""
    assert server.call("/health/live")[0] == 200
    while True:  # Repeated if the state changes between two calls.
        status, headers, found = server.call("/health/ready")
        other, again = server.call("/health")[0], server.call("/health/ready")[0]
        if status == again:
            break
    assert other == status and (status == 503) == ("retry-after" in headers)
    assert (found["status"] == "ready") == (status == 200) == (not found["reasons"])
    return status, found["reasons"]


def refused(server, reason):
    """Check that a call is refused with this reason, and that the metric mmengine_ready is 0."""
    status, headers, found = server.chat("more")
    assert (status, found["error"]["code"]) == (503, "not_ready") and reason in found["error"]["message"]
    assert int(headers["retry-after"]) >= 5
    assert "mmengine_ready 0.0" in server.call("/metrics")[2]


def in_background(server):
    asking = threading.Thread(target=server.chat, args=("hello",))
    asking.start()
    return asking


def test_a_hanging_step_is_unhealthy(monkeypatch):
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(health, "time", clock)
    hangs, goes_on = threading.Event(), threading.Event()

    class Hanging(SlowEcho):
        def collect(self):
            hangs.set()
            assert goes_on.wait(20)
            return super().collect()

    with served(executor_class=Hanging) as one:
        assert told(one) == (200, [])
        asking = in_background(one)
        try:
            assert hangs.wait(20) and told(one) == (200, [])
            clock.now += async_engine.STEP_LIMIT_S + 4
            assert told(one) == (503, ["a step has not returned for 64 seconds"])
            refused(one, "a step has not returned")
        finally:
            goes_on.set()
        asking.join()
        wait_for(lambda: told(one) == (200, []))
        assert "mmengine_ready 1.0" in one.call("/metrics")[2]


def test_a_full_disk_is_unhealthy(tmp_path, monkeypatch):
    with served(executor_class=SlowEcho, engine_options={"log": tmp_path / "log"}) as one:
        with monkeypatch.context() as broken:
            broken.setattr(LogWriter, "_write", full)
            asking = in_background(one)
            wait_for(lambda: told(one)[0] == 503)
            assert "No space left" in told(one)[1][0]
            refused(one, "No space left")
        asking.join()
        wait_for(lambda: told(one) == (200, []))


def test_a_dead_engine_thread_is_unhealthy(monkeypatch):
    with served() as one:
        assert told(one) == (200, [])
        monkeypatch.setattr("mmengine.core.decide.scheduler.Scheduler.schedule", lambda self, view: None)
        assert one.chat("hello")[0] == 503
        status, reasons = told(one)
        assert status == 503 and reasons[0].startswith("the engine stopped: no progress at step 0")
        refused(one, "the engine stopped")


def test_library_messages_are_not_shown():
    """Clients get no text from a library's exception, which may contain secrets."""

    class Lost(SlowEcho):
        def collect(self):
            raise ExecutorLost("step 3 failed: RuntimeError: no device at 0x7f31, see /srv/secret")

    with served(executor_class=Lost) as one:
        asked = one.chat("hello")
        wait_for(lambda: told(one)[0] == 503)
        status, reasons = told(one)
        assert reasons[0] == "the engine stopped; the log says why"
        for found in (asked, one.chat("hello"), one.call("/health"), one.call("/metrics")):
            assert "secret" not in str(found) and "0x7f31" not in str(found)


def test_each_request_has_one_line_with_its_id_and_no_content(caplog):
    caplog.set_level(logging.INFO, "mmengine.operators")
    with served() as one:
        one.chat("a secret question", request_id="first")
        one.events("a secret question", request_id="second")
        wrong = {"messages": [], "zzz": "secret field"}
        assert (
            one.call("/v1/chat/completions", wrong, {"x-request-id": "third"})[1]["x-request-id"] == "third"
        )
        assert one.call("/v1/chat/completions", wrong, {"x-request-id": "a b"})[1].get("x-request-id") is None
        one.call("/health")
    lines = [each for each in caplog.messages if "event='http'" in each]
    assert [each.partition("id='")[2].partition("'")[0] for each in lines] == ["first", "second", "third", ""]
    assert ["status=200" in each for each in lines] == [True, True, False, False]
    assert all("route='/v1/chat/completions'" in each and "seconds=" in each for each in lines)
    assert not any("secret" in each.lower() for each in caplog.messages)


def test_a_dead_engine_ends_a_server_without_a_supervisor():
    engine = SimpleNamespace(
        stats=lambda: SimpleNamespace(num_output_tokens=0),
        readiness=lambda: health.stopped_engine(ExecutorFailed("ValueError: a bug")),
    )

    async def main():
        pulse = lifecycle._Pulse(engine, None)
        pulse.server = SimpleNamespace(should_exit=False, started=True)
        beating = asyncio.create_task(pulse.beat())
        while not pulse.server.should_exit:
            await asyncio.sleep(0)
        beating.cancel()
        return pulse.failure

    assert asyncio.run(asyncio.wait_for(main(), 10)) == "the engine stopped: ValueError: a bug"
