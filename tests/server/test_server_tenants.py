"""Tests that API keys are tenants: they take turns in the queue, and do not share the prefix cache."""

import pytest

from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from mmengine.server.http.auth import ApiKeys
from tests.server.running import served

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
        # a client's own salt replaces the key's
        assert cached_tokens(server, "one", cache_salt="ours") == 0
        assert cached_tokens(server, "other", cache_salt="ours") > 0
    queued = [record.event for record in LogReader(log) if isinstance(record.event, ev.Queued)]
    tenants = [event.tenant for event in queued][-6:]
    assert tenants[0] == tenants[1] == tenants[4] != tenants[2] == tenants[3] == tenants[5]
    assert all(tenants) and not set(tenants) & {event.request_id[:16] for event in queued}


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
