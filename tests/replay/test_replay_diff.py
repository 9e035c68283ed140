"""Tests that `diff` finds and classifies the first difference between two logs."""

import numpy as np
import pytest
from msgspec.structs import replace

from mmengine.core.engine import EngineCore
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader, LogWriter
from mmengine.replay.convert.redact import redact
from mmengine.replay.diff import diff
from mmengine.simulation.simulated_executor import SimulatedExecutor
from tests.core.small_engine import request, settings_of
from tests.replay.runs import busy_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "log"
    busy_run(folder)
    return folder


def changed(log, folder, change):
    """Copy a log to `folder` with events changed. `change` returns a new event, None to keep the event, or []
    to drop it.
    """
    writer = LogWriter(folder)
    for record in LogReader(log):
        event = change(record.event, record.step)
        if event != []:
            writer.append(event or record.event, record.step, record.mono_ns + 5)
    writer.close()
    return folder


def test_times_and_digests_are_ignored(folder, tmp_path):
    def slower(event, step):
        if isinstance(event, ev.Executed):
            return replace(event, device_ns=event.device_ns + 9)
        return [] if isinstance(event, ev.Checkpoint) else None

    found = diff(folder, changed(folder, tmp_path / "other", slower))
    assert found.kind == "" and not found.settings and found.events > 200
    assert diff(folder, folder) == found


@pytest.mark.parametrize("settings", [{"token_budget": 16}, {"num_blocks": 17}, {"max_in_flight": 2}])
def test_different_settings_diverge_at_a_decision(folder, tmp_path, settings):
    busy_run(tmp_path / "other", **settings)
    found = diff(folder, tmp_path / "other")
    ((name, value),) = settings.items()
    assert found.settings[name][1] == value and found.kind
    one, two = list(LogReader(folder)), list(LogReader(tmp_path / "other"))
    for side, records in zip(found.sides, (one, two)):
        assert type(records[side.sequence].event).__name__ == side.event
        assert records[side.sequence].step == side.step


def test_a_different_token_is_an_input_difference(folder, tmp_path):
    seen = []

    def other(event, step):
        if isinstance(event, ev.Executed) and step > 30 and event.token_ids and not seen:
            seen.append(np.frombuffer(event.token_ids, np.int32).copy())
            seen[0][-1] += 1
            return replace(event, token_ids=seen[0].tobytes())
        return None

    found = diff(folder, changed(folder, tmp_path / "other", other))
    assert (found.kind, found.field) == ("inputs", "tokens") and found.request.startswith("r")
    assert found.sides[0].value[0] + 1 == found.sides[1].value[0] == seen[0][-1]


def test_shapes_are_compared_without_content(folder, tmp_path):
    """With `shapes`, `diff` ignores different tokens and reports different decisions."""

    def other(event, step):
        if isinstance(event, ev.Executed) and event.token_ids:
            return replace(event, token_ids=bytes(len(event.token_ids)))
        return None

    zeros = changed(folder, tmp_path / "zeros", other)
    assert diff(folder, zeros).field == "tokens" and diff(folder, zeros, shapes=True).kind == ""
    busy_run(tmp_path / "other", token_budget=16)
    assert diff(folder, tmp_path / "other", shapes=True).kind == "decisions"


def test_a_different_finish_is_a_decision_difference(folder, tmp_path):
    def other(event, step):
        if isinstance(event, ev.Finished) and event.reason == "length":
            return replace(event, reason="stop")
        return None

    found = diff(folder, changed(folder, tmp_path / "other", other))
    assert (found.kind, found.field) == ("decisions", "reason")
    assert [side.value for side in found.sides] == ["length", "stop"]


def test_a_log_that_ends_before_the_other(folder, tmp_path):
    writer, count = LogWriter(tmp_path / "part"), 0
    for count, record in enumerate(LogReader(folder)):
        if count == 100:
            break
        writer.append(record.event, record.step, record.mono_ns)
    writer.close()
    found = diff(tmp_path / "part", folder)
    assert found.kind == "end" and found.sides[0].event == "" and found.sides[1].sequence >= 100


def test_requests_may_be_matched_in_order(tmp_path):
    """With "arrival", `diff` matches requests by their order, so their ids may differ. With `shapes`, `diff`
    also ignores the prompts' content.
    """
    for seed in (1, 2):
        busy_run(tmp_path / f"{seed}", seed, mixed=True)
        redact(tmp_path / f"{seed}", tmp_path / f"{seed}-public", bytes(16))
        by_id = diff(tmp_path / f"{seed}", tmp_path / f"{seed}-public")
        assert (by_id.kind, by_id.field) == ("inputs", "request_id")
        by_order = diff(tmp_path / f"{seed}", tmp_path / f"{seed}-public", "arrival")
        assert by_order.field == "prompt", "the ids are no difference any more"
        by_shape = diff(tmp_path / f"{seed}", tmp_path / f"{seed}-public", "arrival", shapes=True)
        assert by_shape.kind == "" and by_shape.events > 200


def test_rows_and_blocks_are_ignored(tmp_path):
    """`diff` ignores a request's row and block numbers. In the second log, request y arrives first."""
    config = settings_of(num_blocks=33, enable_prefix_caching=False)
    for name, order in {"one": ("x", "y"), "two": ("y", "x")}.items():
        core = EngineCore(config, SimulatedExecutor(config), sink=LogWriter(tmp_path / name))
        for each in order:
            core.submit(request(each, 9, max_tokens=2 + (each == "x")))
        while core.has_work:
            core.step()
        core.close()
    one, two = (admission_of(tmp_path / name, "x") for name in ("one", "two"))
    assert one.row != two.row and one.new_blocks != two.new_blocks
    found = diff(tmp_path / "one", tmp_path / "two")
    assert (found.kind, found.field) == ("inputs", "request_id"), "the arrivals differ first"


def admission_of(folder, name):
    return next(
        r.event for r in LogReader(folder) if isinstance(r.event, ev.Admitted) and r.event.request_id == name
    )
