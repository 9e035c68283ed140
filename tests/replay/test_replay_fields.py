"""Tests the table in docs/reference/log.md, which says how verify treats a change to each field. Each test
changes a single field, keeps the checksum valid, and compares verify's verdict with the table.
"""

import random
import re
from dataclasses import replace as replace_fields
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest

from mmengine.core.engine import EngineCore
from mmengine.errors import CorruptLog
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader, LogWriter
from mmengine.replay import verify
from mmengine.request import PREFILL, Adapter, GrammarRequest, Pooling, ThinkingBudget
from mmengine.simulation.simulated_executor import SimulatedExecutor
from tests.core.halves import host_config, run_in_halves
from tests.core.shaky_store import ShakyStore
from tests.core.small_engine import request, settings_of
from tests.core.test_store_chaos import Engine, plain_config, prompt
from tests.events.logs import column, rewrite
from tests.golden.make_golden import crashed_run
from tests.replay.runs import busy_run, session_run, thrashing_core

TABLE = Path(__file__).parents[2] / "docs" / "reference" / "log.md"
CLAIMS = dict(re.findall(r"^\| `(\w+\.\w+)` \| (compared|followed|observed) \|", TABLE.read_text(), re.M))
TRIES = 5
replace = msgspec.structs.replace
# Replacement values for fields where the general rules in `other_values` do not suffice.
OTHERS = {
    "Started.schema": lambda old: [ev.SCHEMA_VERSION + 1],
    "Started.decision_version": lambda old: [99],
    "Started.config": lambda old: [{**old, "token_budget": old["token_budget"] - 1}],
    "Started.fingerprints": lambda old: [{**old, "weights": "others"}],
    "Started.constants": lambda old: [replace(old, frees_at_once=not old.frees_at_once)],
    "Queued.sampling": lambda old: [replace(old, max_tokens=max(1, old.max_tokens - 1))],
    "Queued.priority": lambda old: [old + 1000],
    "Queued.grammar": lambda old: [GrammarRequest("regex", "a")] if old is None else [None],
    "Queued.thinking": lambda old: [ThinkingBudget(3, True, (), (5,))] if old is None else [None],
    "Queued.pooling": lambda old: [None if old else Pooling("embed")],
    "Queued.adapter": lambda old: [None] if old else [Adapter(b"other", 10)],
    "AdapterLoaded.adapter": lambda old: [replace(old, digest=b"other")],
    "Admitted.copy": lambda old: [(1, 2)],
    "AdmittedWithAdapter.copy": lambda old: [(1, 2)],
    "AdmittedWithState.copy": lambda old: [(1, 2)],
    "Offered.num_blocks": lambda old: [old - 1 if old else 1],
    "Offered.items": lambda old: [((0, bytes(8)),)],
    "Executed.stops": lambda old: [old[1:] or ((0, "planted"),)],
    "Executed.errors": lambda old: [old[1:] or ((0, "planted"),)],
    "Executed.logprobs": lambda old: [old[1:] or ((0, ((5, -1.0),)),)],
    "Executed.drafts": lambda old: [old[:-4] or column(1)],
    "Executed.device_ns": lambda old: [old + 10**9],
    "Executed.host_ns": lambda old: [old + 10**9],
    "Executed.draft_ns": lambda old: [old + 10**9],
    "Executed.prompt_logprobs": lambda old: [old[1:] or ((0, 1, column(5), bytes(4)),)],
    "Executed.pooled": lambda old: [old[1:] or ((0, bytes(32), b""),)],
    "Recovered.steps": lambda old: [(*old, 77)],
    "Recovered.cuts": lambda old: [(*old, ("1.mmlog", 5, 5))],
    "Recovered.fingerprints": lambda old: [{**old, "weights": "others"}],
}
# Fields whose items are (key, row, index) tuples. The items in all other tuple fields are keys.
KEYS = {f"{name}.encode" for name in ("Scheduled", "Admitted", "AdmittedWithState", "AdmittedWithAdapter")}


def other_values(name, old):
    """Return replacement values that have the type of `old` and differ from it."""
    if name in OTHERS:
        return OTHERS[name](old)
    match old:
        case bool():
            return [not old]
        case bytes():
            numbers = np.frombuffer(old[: len(old) // 4 * 4], np.int32).copy()
            numbers[-1:] += 1
            return [numbers.tobytes() if len(numbers) else column(1)]
        case int():
            return [old + 1]
        case str():
            return [f"{old}x"]
        case tuple() if old:
            return [old[1:]]
        case tuple():
            return [((b"key", 0, 0),) if name in KEYS else (b"key",)]
        case None:
            return [column(1)]
    raise AssertionError(f"say in OTHERS what else {name} can be")


def thrashing_run(folder):
    core = thrashing_core(folder)
    for _ in range(60):
        core.step()
    core.close()


def fetched_run(folder):
    """Run two engines over the same store. The second engine fetches the first engine's blocks, except a
    block that is damaged in between.
    """
    store, config = ShakyStore(random.Random(1), chance=0), plain_config()
    first, second = (Engine(config, store, path) for path in (folder.with_name("first"), folder))
    for engine in (first, second):
        engine.submit(prompt("a"))
        engine.run()
        engine.check()
        torn = list(store.values)[3]
        store.values[torn] = bytes(len(store.values[torn]))


def pooled_run(folder):
    """Run pooling requests together with requests that generate tokens."""
    config = settings_of(token_budget=8)
    core = EngineCore(config, SimulatedExecutor(config), sink=LogWriter(folder))
    for name in "abc":
        core.submit(replace_fields(request(name, 11), sampling=PREFILL, pooling=Pooling("embed")))
        core.submit(request(name.upper(), 5))
    while core.has_work:
        core.step()
    core.close()


RECORDED = "recorded in vLLM"


def recorded_run(folder):
    """Copy a log that was recorded in vLLM, and insert a "pause" note after its third record."""
    writer = LogWriter(folder)
    for record in LogReader(Path(__file__).parent / "recordings" / "vllm_032_priority"):
        if record.sequence == 3:
            writer.append(ev.Noted("pause", "1"), record.step, record.mono_ns)
        writer.append(record.event, record.step, record.mono_ns)
    writer.close()


DRAFTING, OVERLAPPING = (
    next(config for config in map(host_config, range(99)) if getattr(config, name) == value)
    for name, value in (("num_draft_tokens", 3), ("max_in_flight", 2))
)
RUNS = {
    "busy": lambda folder: busy_run(folder, 5, num_requests=9),
    "two lives": lambda folder: crashed_run(folder, 16),
    "vLLM's": lambda folder: busy_run(folder, 0, compat="vllm", policy="fcfs", num_requests=12, fail_at=()),
    "thrashing": thrashing_run,
    "with states": lambda folder: busy_run(
        folder, 5, num_requests=9, swap_blocks=0, num_state_slots=6, snapshot_every=4
    ),
    "with adapters": lambda folder: busy_run(
        folder, 5, num_requests=9, swap_blocks=0, max_loras=2, lora_bytes=250
    ),
    "with a store": fetched_run,
    "with sessions": session_run,
    "with vectors": pooled_run,
    RECORDED: recorded_run,
    "in halves": lambda folder: run_in_halves(DRAFTING, 3, folder),
    "overlapping halves": lambda folder: run_in_halves(OVERLAPPING, 3, folder),
    "in pieces": lambda folder: busy_run(folder, 5, num_requests=9, encoder_piece=1),
}


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Return a function that creates the records for a named run on first use."""

    @cache
    def made(name):
        folder = tmp_path_factory.mktemp("run") / "log"
        RUNS[name](folder)
        return list(LogReader(folder))

    return made


def instances(logs, kind, field, most):
    """Yield (records, index) for up to `most` records of type `kind` per run. Records whose `field` is not
    empty come first.
    """
    for name in RUNS:
        if name == RECORDED and kind != "Noted":
            continue  # in a recorded log, verify compares the outcomes of calls, not fields
        records = logs(name)
        places = [place for place, record in enumerate(records) if is_fit(record.event, kind)]
        places.sort(key=lambda place: not getattr(records[place].event, field))
        yield from ((records, place) for place in places[:most])


def is_fit(event, kind):
    """Return whether the event has the type `kind` and may be changed. Executed events without tokens, and
    Finished events of rejected requests, may not be changed.
    """
    if isinstance(event, ev.Executed) and not event.token_ids:
        return False
    if isinstance(event, ev.Finished) and event.reason == "rejected":
        return False  # The table states this exception.
    return type(event).__name__ == kind


def outcome(records, place, folder):
    """Return verify's verdict on records with a change at `place`: "refused", "agrees", "folded only"
    (no decision was derived), the field that diverges at `place`, or "later" for a divergence at another
    record.
    """
    try:
        report = verify(rewrite(records, folder))
    except CorruptLog:
        return "refused"
    found = report.divergence
    if found is None:
        return "agrees" if report.rederived else "folded only"
    return found.field if found.sequence == place else "later"


def test_the_table_has_every_field_once():
    fields = {f"{cls.__name__}.{name}" for cls in ev.TYPES.values() for name in cls.__struct_fields__}
    assert set(CLAIMS) == fields | {"record.sequence", "record.step", "record.mono_ns"}
    assert len(re.findall(r"^\| `\w+\.\w+` \|", TABLE.read_text(), re.M)) == len(CLAIMS)
    decided = {cls.__name__ for cls in ev.TYPES.values() if cls not in ev.OBSERVATIONS}
    assert all(claim == "compared" for name, claim in CLAIMS.items() if name.split(".")[0] in decided)


@pytest.mark.parametrize("name", [name for name in CLAIMS if not name.startswith("record.")])
def test_verify_treats_a_changed_field_as_the_table_says(logs, tmp_path, name):
    kind, field = name.split(".")
    claim, seen = CLAIMS[name], []
    for records, place in instances(logs, kind, field, TRIES if claim == "followed" else 1):
        record = records[place]
        for value in other_values(name, getattr(record.event, field)):
            changed = list(records)
            changed[place] = replace(record, event=replace(record.event, **{field: value}))
            assert changed[place] != record
            seen.append(outcome(changed, place, tmp_path / str(len(seen))))
        if claim == "followed" and seen[-1] != "agrees":
            break
    if claim == "compared":
        assert seen and set(seen) <= {field, "refused"}, seen
    elif claim == "observed":
        assert seen and set(seen) == {"agrees"}, seen
    else:
        assert seen and seen[-1] != "agrees", seen


def test_verify_treats_a_changed_record_as_the_table_says(logs, tmp_path):
    """verify compares a record's step but not its time, and reports a missing sequence number as a gap. The
    writer numbers records itself, so the gap is built from two files.
    """
    records = logs("busy")
    place = len(records) // 2
    later = list(records)
    later[place] = replace(records[place], step=records[place].step + 1)
    assert CLAIMS["record.step"] == "compared" and outcome(later, place, tmp_path / "step") == "step"
    stretched = [
        replace(record, mono_ns=record.mono_ns * 3 + 10**9 * (record.sequence > place)) for record in records
    ]
    assert CLAIMS["record.mono_ns"] == "observed" and outcome(stretched, place, tmp_path / "ns") == "agrees"
    folder = rewrite(records[: place + 1], tmp_path / "gap")
    rest = rewrite(records[place + 2 :], tmp_path / "rest")
    data = bytearray((rest / f"{0:020d}.mmlog").read_bytes())
    (folder / f"{place + 2:020d}.mmlog").write_bytes(data)
    assert CLAIMS["record.sequence"] == "compared" and outcome_of(folder) == "gap"


def outcome_of(folder):
    with pytest.raises(CorruptLog) as error:
        verify(folder)
    return error.value.kind
