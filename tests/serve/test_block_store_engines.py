"""Tests that engines share KV blocks through a folder, also after a restart, and that no answer changes."""

import os
import threading
import time

import pytest

from mmengine import Engine, EngineConfig
from mmengine.block_store.folder import FolderStore
from mmengine.block_store.registry import BLOCK_STORES
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from mmengine.replay import verify
from mmengine.runtime import features
from tests.pictures import data_url, looking

QUESTION = [looking("Which shapes are there, and what are their colours? " * 4, data_url(3, size=(320, 320)))]


def config(folder, **settings) -> EngineConfig:
    values = {"num_blocks": 128, "max_model_len": 512, "block_store": "folder", **settings}
    return EngineConfig(block_store_path=str(folder), **values)


def answered(settings, prompt=QUESTION, log=None, **options):
    """Return the answer's tokens, the engine's counters and the block store."""
    with Engine(config=settings, log=log) as engine:
        (answer,) = engine.generate([prompt], max_tokens=options.pop("max_tokens", 12), **options)
        return answer.token_ids, engine.stats(), engine.built.store


@pytest.fixture(scope="module")
def expected():
    with Engine(config=EngineConfig(num_blocks=128, max_model_len=512)) as engine:
        return engine.generate([QUESTION], max_tokens=12)[0].token_ids


@pytest.fixture(scope="module")
def kept(tmp_path_factory, expected):
    """Return a folder that a closed engine has filled with KV blocks."""
    folder = tmp_path_factory.mktemp("kept")
    tokens, stats, store = answered(config(folder))
    assert tokens == expected and stats.num_fetched_blocks == 0 and store.num_put > 5
    return folder


@pytest.fixture
def copied(kept, tmp_path):
    for path in kept.rglob("*"):
        if path.is_file():
            (tmp_path / "store" / path.parent.name).mkdir(parents=True, exist_ok=True)
            (tmp_path / "store" / path.parent.name / path.name).write_bytes(path.read_bytes())
    return tmp_path / "store"


def events(log):
    return [record.event for record in LogReader(log)]


def test_a_prefix_is_a_hit_for_another_engine_and_after_a_restart(copied, expected, tmp_path):
    tokens, stats, store = answered(config(copied), log=tmp_path / "log")
    assert tokens == expected
    assert stats.num_fetched_blocks > 5 and stats.num_encoded_items == 0
    assert verify(tmp_path / "log").ok  # `verify` needs no store
    (arrived,) = [event for event in events(tmp_path / "log") if isinstance(event, ev.Arrived)]
    assert len(arrived.digests) == 8 * stats.num_fetched_blocks


def test_outputs_from_another_engine_are_continued(copied, expected):
    with Engine(config=config(copied)) as engine:
        engine.submit(QUESTION, max_tokens=12, outputs=expected[:1])
        ends = []
        while engine.has_work:
            ends += [output.completion for output in engine.step() if output.completion is not None]
        assert ends[0].token_ids == expected and engine.stats().num_fetched_blocks > 5


def blocks_of(folder):
    """Return the files with KV blocks: the files of the most frequent size."""
    sizes: dict[int, list] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            sizes.setdefault(path.stat().st_size, []).append(path)
    return max(sizes.values(), key=len)


@pytest.mark.parametrize("how", ["wrong", "torn", "another's", "gone"])
def test_damaged_blocks_are_found_and_computed_again(copied, expected, how):
    paths = blocks_of(copied)
    for one, other in zip(paths, [*paths[1:], paths[0]], strict=True):
        data = one.read_bytes()
        if how == "wrong":
            one.write_bytes(data[:-9] + bytes([data[-9] ^ 64]) + data[-8:])
        elif how == "torn":
            one.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
        elif how == "gone":
            one.write_bytes(data[:-1])
        else:
            os.replace(other, other.with_suffix(".was"))
            other.write_bytes(data)
    tokens, stats, store = answered(config(copied))
    assert tokens == expected
    assert stats.num_fetched_blocks == 0 and stats.num_lost_fetches == 1
    assert store.num_spoiled == (0 if how == "gone" else 1)


def test_a_block_that_is_gone_is_put_again_by_whoever_put_it(tmp_path, expected):
    # An engine stores a block again if the block's file was deleted.
    folder = tmp_path / "store"
    with Engine(config=config(folder, num_blocks=40)) as engine:
        assert engine.generate([QUESTION], max_tokens=12)[0].token_ids == expected
        put = settled(engine)
        before = {path: path.read_bytes() for path in blocks_of(folder)}
        for path in before:
            path.unlink()
        for number in range(6):  # other prompts evict the blocks in memory
            engine.generate([QUESTION], max_tokens=4, cache_salt=str(number))
        assert engine.generate([QUESTION], max_tokens=12)[0].token_ids == expected
        assert settled(engine) > put
    first = [path for path in before if path.exists()]
    assert first and all(path.read_bytes() == before[path] for path in first)


def settled(engine):
    """Wait until all values are stored, and return their number."""
    store = engine.built.store
    end = time.monotonic() + 20
    while store._waiting_bytes and time.monotonic() < end:
        time.sleep(0.01)
    return store.num_put


def test_a_hostile_value_is_not_read_beyond_its_bounds(copied, expected):
    for path in blocks_of(copied):
        path.write_bytes(b"MMBS" + os.urandom(4 * path.stat().st_size))
    assert answered(config(copied))[0] == expected


class Hanging(FolderStore):
    """A store that does not answer."""

    over = threading.Event()

    def has(self, keys):
        Hanging.over.wait()
        return []


def test_a_hanging_store_delays_only_its_own_requests(tmp_path, expected):
    BLOCK_STORES.register("hanging", Hanging)
    try:
        settings = config(tmp_path / "s", block_store="hanging", fetch_timeout_s=0.3)
        with Engine(config=settings, log=tmp_path / "log") as engine:
            answers = [engine.generate([QUESTION], max_tokens=12)[0].token_ids for _ in range(2)]
            Hanging.over.set()
    finally:
        Hanging.over.set()
    assert answers == [expected, expected] and verify(tmp_path / "log").ok
    lost = [event for event in events(tmp_path / "log") if isinstance(event, ev.Lost)]
    assert [event.reason for event in lost] == ["deadline"]


def test_encoder_outputs_come_where_the_prefix_does_not(copied, tmp_path, monkeypatch):
    """With another text before the image, only the image's encoder output is reused."""
    prompt = [{"role": "system", "content": "You are brief."}, *QUESTION]
    with Engine(config=EngineConfig(num_blocks=128, max_model_len=512)) as engine:
        alone = engine.generate([prompt], max_tokens=12)[0].token_ids
    monkeypatch.setattr(features, "upload_joined", None)  # so that encoding fails
    tokens, stats, _ = answered(config(copied), prompt, log=tmp_path / "log")
    assert tokens == alone and stats.num_fetched_blocks == 0
    (offered,) = [event for event in events(tmp_path / "log") if isinstance(event, ev.Offered)]
    assert [index for index, _ in offered.items] == [0]
