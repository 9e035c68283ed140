"""Tests that a redacted log keeps the decisions and has no original content."""

import random
from dataclasses import replace as with_fields

import msgspec
import numpy as np
import pytest

from mmengine.core.engine import EngineCore
from mmengine.errors import InvalidRequest
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader, LogWriter
from mmengine.replay import verify
from mmengine.replay.convert.redact import redact
from mmengine.request import GrammarRequest, MediaItem, SamplingParams
from mmengine.simulation.simulated_executor import SimulatedExecutor
from tests.core.small_engine import request, settings_of
from tests.replay.runs import busy_run
from tests.replay.test_replay_reasons import SETTINGS, small_config

KEY = bytes(range(32))


def random_run(folder, seed):
    """Run random requests with random settings, including swaps and unusual block sizes."""
    config = small_config(random.Random(seed))
    names = (*SETTINGS, "swap_blocks", "preempt_mode", "max_retries", "block_size")
    settings = {name: getattr(config, name) for name in names}
    blocks = {"num_blocks": 1 + 72 // config.block_size} if config.block_size < 4 else {}
    busy_run(folder, seed, num_requests=20, mixed=True, **settings, **blocks)
    return folder


def texts_removed(event):
    """Return the event without the fields that redaction may change."""
    changes = {}
    for name in event.__struct_fields__:
        if name in _CHANGED:
            changes[name] = None
        if name == "encode":
            changes[name] = [(row, index) for _, row, index in event.encode]
        if name in ("evict", "keys", "used"):
            changes[name] = len(getattr(event, name))
        if name in ("token_ids", "drafts", "prompt", "outputs"):
            changes[name] = len(getattr(event, name))
    return type(event).__name__, {**msgspec.structs.asdict(event), **changes}


_CHANGED = {
    *(
        "request_id",
        "group",
        "cache_salt",
        "sampling",
        "media",
        "grammar",
        "grammar_slot",
        "envelope",
        "fingerprints",
        "config",
        "digest",
        "columns",
        "requests",
    ),
    *("error", "errors", "detail", "reason", "logprobs", "cuts", "lost"),
}


@pytest.mark.parametrize("seed", range(12))
def test_the_decisions_are_the_same(tmp_path, seed):
    log = random_run(tmp_path / "log", seed)
    assert verify(log).ok
    report = redact(log, tmp_path / "public", KEY)
    found = verify(tmp_path / "public")
    assert found.ok and found.rederived, found.divergence
    old, new = list(LogReader(log)), list(LogReader(tmp_path / "public"))
    assert report.records == len(old) == len(new)
    for before, after in zip(old, new, strict=True):
        assert (before.step, before.mono_ns - old[0].mono_ns) == (after.step, after.mono_ns)
        assert texts_removed(before.event) == texts_removed(after.event)


def secret_log(folder, name="alice", salt="the-tenant", start=1_000_000):
    """Write a log with a request that identifies a user, an answer with logprobs, and an error. Return the
    prompt's tokens.
    """
    config = settings_of(max_model_len=48, eos_token_ids=(424242,))
    executor = SimulatedExecutor(config, fault=lambda step: "no memory at /home/alice" if step == 1 else None)
    fingerprints = {"weights": "fingerprint-of-our-model", "processor": "p"}
    core = EngineCore(config, executor, sink=LogWriter(folder), fingerprints=fingerprints)
    tokens = list(range(start, start + 24))
    picture = MediaItem(b"PICTURE-OF-ALICE".ljust(32, b"!"), "image", ((4, 5),), (1, 2, 10))
    sampling = SamplingParams(
        max_tokens=6,
        seed=987654321,
        stop=("the secret word",),
        stop_token_ids=(555555,),
        logit_bias={666666: 1.0},
        logprobs=3,
    )
    first = with_fields(
        request(name, tokens, media=[picture]),
        sampling=sampling,
        cache_salt=salt,
        grammar=GrammarRequest("json_schema", '{"const": "schema"}'),
    )
    core.submit(first)
    core.submit(with_fields(first, request_id=f"{name}-2", grammar=None, group=name, sample_index=1))
    core.inbox.put(ev.GrammarReady(name))
    core.cancel("bob", "because the user left")
    while core.has_work:
        core.step()
    core.close()
    return tokens


def test_the_redacted_log_has_no_original_content(tmp_path):
    tokens = secret_log(tmp_path / "log")
    redact(tmp_path / "log", tmp_path / "public", KEY)
    assert verify(tmp_path / "public").ok
    data = b"".join(path.read_bytes() for path in sorted((tmp_path / "public").glob("*.mmlog*")))
    original = b"".join(path.read_bytes() for path in sorted((tmp_path / "log").glob("*.mmlog*")))
    words = ["alice", "the-tenant", "PICTURE-OF-ALICE", "secret word", "schema", "home", "fingerprint-of"]
    for word in words:
        assert word.encode() in original and word.encode() not in data, word
    for number in (987654321, 555555, 666666, 424242):
        assert msgspec.msgpack.encode(number) in original and msgspec.msgpack.encode(number) not in data
    said = set(tokens) | {
        token
        for record in LogReader(tmp_path / "log")
        if isinstance(record.event, ev.Executed)
        for token in np.frombuffer(record.event.token_ids, np.int32).tolist()
    }
    for token in said:
        assert np.int32(token).tobytes() not in data or token < 2**16, token
    for record in LogReader(tmp_path / "public"):
        for name in ("prompt", "token_ids", "drafts"):
            column = getattr(record.event, name, b"")
            assert not said & set(np.frombuffer(column, np.int32).tolist())
        assert not getattr(record.event, "logprobs", ())
    assert KEY not in data


def prompts(folder):
    found = {}
    for record in LogReader(folder):
        if isinstance(record.event, ev.Queued):
            found[len(found)] = np.frombuffer(record.event.prompt, np.int32)
    return found


def test_only_equal_prefixes_stay_equal(tmp_path):
    # Two redacted prompts are equal up to the first position at which tokens, media or salt differ.
    config = settings_of()
    core = EngineCore(config, SimulatedExecutor(config), sink=LogWriter(tmp_path / "log"))
    picture = [MediaItem(bytes(32), "image", ((3, 4),), (1, 2, 2))]
    other = [MediaItem(b"\1" * 32, "image", ((3, 4),), (1, 2, 2))]
    same = [7] * 12
    for number, (tokens, more) in enumerate(
        [
            (same, {}),
            (same, {}),
            ([7] * 6 + [8] * 6, {}),
            (same, {"cache_salt": "tenant"}),
            (same, {"media": picture}),
            (same, {"media": other}),
        ]
    ):
        core.submit(request(f"q{number}", tokens, **more))
    while core.has_work:
        core.step()
    core.close()
    redact(tmp_path / "log", tmp_path / "public", KEY)
    found = prompts(tmp_path / "public")
    assert len(set(found[0].tolist())) == 12, "equal tokens become different numbers at different positions"

    def common(one, two):
        differ = np.flatnonzero(found[one] != found[two])
        assert set(differ) == set(range(differ[0], 12)) if len(differ) else True, "never equal again"
        return int(differ[0]) if len(differ) else 12

    assert (common(0, 1), common(0, 2), common(0, 3)) == (12, 6, 0)
    assert (common(0, 4), common(4, 5)) == (4, 4), "the image begins at token 3"
    assert all(number >= 0 for prompt in found.values() for number in prompt.tolist())


def test_names_depend_on_the_key_alone(tmp_path):
    secret_log(tmp_path / "one")
    secret_log(tmp_path / "two")
    for name, key in {"a": KEY, "b": KEY, "c": KEY[::-1]}.items():
        redact(tmp_path / ("two" if name == "b" else "one"), tmp_path / name, key)
    assert np.array_equal(prompts(tmp_path / "a")[0], prompts(tmp_path / "b")[0])
    assert not set(prompts(tmp_path / "a")[0].tolist()) & set(prompts(tmp_path / "c")[0].tolist())
    with pytest.raises(InvalidRequest, match="at least 16"):
        redact(tmp_path / "one", tmp_path / "d", b"short")


def test_a_divergence_is_preserved(tmp_path):
    """Redaction keeps a divergence in a decision's field, and a divergence that only a digest shows."""
    busy_run(tmp_path / "log")
    for number, kind in enumerate((ev.Finished, ev.Checkpoint)):
        writer, is_changed = LogWriter(tmp_path / f"{number}"), False
        for record in LogReader(tmp_path / "log"):
            event = record.event
            if isinstance(event, kind) and record.step > 30 and not is_changed:
                is_changed = True
                event = ev.Checkpoint(bytes(16)) if kind is ev.Checkpoint else with_reason(event)
            writer.append(event, record.step, record.mono_ns)
        writer.close()
        before = verify(tmp_path / f"{number}").divergence
        redact(tmp_path / f"{number}", tmp_path / f"{number}-public", KEY)
        after = verify(tmp_path / f"{number}-public").divergence
        assert is_changed and (before.sequence, before.event, before.field) == (
            after.sequence,
            after.event,
            after.field,
        )


def with_reason(event):
    return ev.Finished(event.request_id, "abort" if event.reason != "abort" else "stop", event.detail)
