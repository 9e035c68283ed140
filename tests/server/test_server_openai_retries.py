"""Tests that OpenAI's client waits as long as the server says, and does not retry permanent errors."""

import json
import threading
from functools import partial

import openai
import pytest

from mmengine.errors import ErrorCode, InvalidRequest
from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.serve.requests.health import Readiness
from tests.serve.serve_fakes import builder
from tests.server.running import LONG_CONTEXT, Lasting, SlowEcho, served, wait_for


class Client(openai.OpenAI):
    """A client that records the delay before each retry, but waits only 0.05 s. Calls `when_refused` before
    each retry.
    """

    def when_refused(self):
        pass

    def _calculate_retry_timeout(self, *arguments, **options):
        self.waits.append(super()._calculate_retry_timeout(*arguments, **options))
        self.when_refused()
        return 0.05


@pytest.fixture
def client():
    made = []

    def connected(server, **options):
        one = Client(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="one", **options)
        one.waits = []
        made.append(one)
        return one

    yield connected
    for one in made:
        one.close()


def ask(client, text="hi", **options):
    return client.chat.completions.create(
        model="echo", messages=[{"role": "user", "content": text}], **options
    )


def holds(server, num_waiting):
    """Return whether a single request runs and `num_waiting` requests wait."""
    stats = server.engine.stats()
    return (stats.num_running, stats.num_waiting) == (1, num_waiting)


def test_a_full_queue_is_retried(client):
    small = builder(executor_class=Lasting, max_num_seqs=1, max_waiting=1, **LONG_CONTEXT)
    with served(AsyncEngine(builder=small)) as one:
        streams = [
            threading.Thread(target=one.events, args=("a" * length,), kwargs={"request_id": f"{length}"})
            for length in (60, 61)
        ]
        # The second request must arrive while the first request runs.
        for number, stream in enumerate(streams):
            stream.start()
            wait_for(partial(holds, one, number))
        with pytest.raises(openai.RateLimitError) as found:
            ask(client(one, max_retries=0))
        assert found.value.code == "queue_full" and int(found.value.response.headers["retry-after"]) >= 1
        patient = client(one, max_retries=50)
        patient.when_refused = one.executor.may_end.set
        assert ask(patient).choices[0].message.content == "HI"
        assert patient.waits and all(1 <= seconds <= 120 for seconds in patient.waits)
        for stream in streams:
            stream.join()


def test_not_ready_is_retried_after_the_servers_time(client, monkeypatch):
    full = Readiness(("the disk is full",))
    with served() as one:
        asking = client(one)
        monkeypatch.setattr(one.engine, "readiness", lambda: full if len(asking.waits) < 2 else Readiness(()))
        assert ask(asking).choices[0].message.content == "HI"
        assert asking.waits == [5.0, 5.0]
        monkeypatch.setattr(one.engine, "readiness", lambda: full)
        with pytest.raises(openai.InternalServerError, match="not ready: the disk is full") as found:
            ask(asking)
        assert found.value.status_code == 503 and found.value.code == "not_ready"


def test_permanent_errors_are_not_retried(client, monkeypatch):
    with served() as one:
        asking = client(one)
        with pytest.raises(openai.InternalServerError) as found:
            ask(asking, "a" * 300, extra_body={"deadline_s": 1e-6})
        assert found.value.status_code == 504 and found.value.code == "deadline_exceeded"

        def taken(*arguments, **options):
            raise InvalidRequest("the request id 'mine' is in use", code=ErrorCode.REQUEST_ID_IN_USE)

        monkeypatch.setattr(one.engine, "stream", taken)
        with pytest.raises(openai.ConflictError) as found:
            ask(asking)
        assert found.value.code == "request_id_in_use" and asking.waits == []


def test_keys_and_shares_have_their_classes(client, tmp_path):
    """An unknown API key raises AuthenticationError."""
    (tmp_path / "keys").write_text("one\n")
    with served(key_file=tmp_path / "keys") as one:
        assert ask(client(one)).choices[0].message.content == "HI"
        with pytest.raises(openai.AuthenticationError) as found:
            ask(client(one).with_options(api_key="other"))
        assert found.value.code == "invalid_api_key"


def test_an_error_in_the_middle_of_a_stream_is_raised(client):
    class Broken(SlowEcho):
        def collect(self):
            found = super().collect()
            if self._steps > 5:
                raise RuntimeError("the device fell over")
            return found

    with served(executor_class=Broken) as one:
        said = ""
        with pytest.raises(openai.APIError) as found:
            for chunk in ask(client(one), "hello there", stream=True):
                said += chunk.choices[0].delta.content
        assert said == "HELLO" and found.value.code == "request_failed"
        assert json.loads(json.dumps(found.value.body))["type"] == "server_error"
