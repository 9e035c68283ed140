"""Tests that API keys are tenants: keys take turns in the queue, and do not share the prefix cache."""

import asyncio
from threading import Thread
from types import SimpleNamespace

import pytest

from mmengine.core.resume import Resume
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from mmengine.server.http.admission import Admission
from mmengine.server.http.auth import ApiKeys
from mmengine.server.sessions.registry import SessionRegistry
from mmengine.server.settings import ServerSettings
from tests.server.running import Lasting, served, wait_for

TEXT = "The same long question from everybody, so long that it fills blocks. " * 4


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("one\nother\n")
    return path


def cached_tokens(server, key, **fields):
    body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2, **fields}
    status, _, found = server.call("/v1/chat/completions", body, {"authorization": f"Bearer {key}"})
    assert status == 200, found
    return found["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_keys_do_not_share_the_prefix_cache_and_are_tenants(key_file, tmp_path):
    log = tmp_path / "log"
    with served(key_file=key_file, engine_options={"log": log}) as server:
        assert cached_tokens(server, "one") == 0 < cached_tokens(server, "one")
        assert cached_tokens(server, "other") == 0 < cached_tokens(server, "other")
        # a client's salt replaces the key's salt
        assert cached_tokens(server, "one", cache_salt="ours") == 0
        assert cached_tokens(server, "other", cache_salt="ours") > 0
    queued = [record.event for record in LogReader(log) if isinstance(record.event, ev.Queued)]
    tenants = [event.tenant for event in queued][-6:]
    assert tenants[0] == tenants[1] == tenants[4] != tenants[2] == tenants[3] == tenants[5]
    assert all(tenants) and not set(tenants) & {event.request_id[:16] for event in queued}


def test_a_key_stays_one_tenant_after_a_restart(key_file, tmp_path):
    """In the log, the key's recovered request and new requests have the same tenant."""
    log, headers = tmp_path / "log", {"authorization": "Bearer one"}
    body = {"messages": [{"role": "user", "content": TEXT}], "request_id": "mine"}
    with served(executor_class=Lasting, drain_s=0, key_file=key_file, engine_options={"log": log}) as server:
        asking = Thread(target=server.call, args=("/v1/chat/completions", body, headers))
        asking.start()
        wait_for(lambda: server.engine._open.running)
    asking.join()
    options = {"engine_options": {"log": log, "resume": Resume()}}
    with served(key_file=key_file, **options) as server:
        cached_tokens(server, "one")
        cached_tokens(server, "other")
    queued = [record.event for record in LogReader(log) if isinstance(record.event, ev.Queued)]
    left, again, other = [event.tenant for event in queued]
    assert left == again != other


def test_a_key_keeps_the_tenant_of_its_session(key_file):
    keys = ApiKeys(key_file)
    admission = Admission(SimpleNamespace(max_open=4), ServerSettings(), keys)
    sessions = SimpleNamespace(settings=SimpleNamespace(tenant="before"), session_id="theowner:sess_1")

    async def facts():
        return [sessions]

    registry = SessionRegistry(SimpleNamespace(sessions=facts), ServerSettings(), None, admission, {})
    asyncio.run(registry.keep_tenants())
    assert keys.tenant_of("theowner") == "before" != keys.tenant_of("another")


def test_share_prefix_cache_lets_keys_share(key_file):
    with served(key_file=key_file, share_prefix_cache=True) as server:
        assert cached_tokens(server, "one") == 0 < cached_tokens(server, "other")


def test_without_keys_there_is_no_tenant_and_no_salt():
    keys = ApiKeys(None)
    assert keys.tenant_of("") == keys.salt_of("") == ""


def test_tenants_are_keyed_and_salts_are_stable(key_file):
    first, second = ApiKeys(key_file), ApiKeys(key_file)
    owner = first.owner_of({b"x-api-key": b"one"})
    assert first.tenant_of(owner) != second.tenant_of(owner), "a published log cannot be searched for keys"
    assert first.salt_of(owner) == second.salt_of(owner), "a block store outlives the process"
    assert owner not in first.salt_of(owner)
