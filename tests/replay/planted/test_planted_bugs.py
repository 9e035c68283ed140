"""Tests that planted bugs are found by an invariant or by the first divergence, and that their logs are
minimized.
"""

import pytest

from mmengine.replay import replay_failure
from mmengine.replay.minimize.build_probe import KIND
from tests.replay.planted import bugs, more_bugs
from tests.replay.planted.finding import Bug, find, minimize, write

MOST_REQUESTS = 6
FAST = {
    *("a block is lost", "tenants share prefixes", "rejected drafts stay", "no wait for the grammar"),
    *("a row runs past its end", "an early delivery"),
}
ALL = (*bugs.BUGS, *more_bugs.BUGS)


@pytest.mark.parametrize(
    "bug",
    [pytest.param(bug, id=bug.name, marks=() if bug.name in FAST else pytest.mark.soak) for bug in ALL],
)
def test_a_planted_bug(tmp_path, bug: Bug):
    write(bug, tmp_path / "log")
    found = find(bug, tmp_path / "log")
    assert found.invariant == bug.found_by or found.divergence.partition(":")[0] == bug.found_by, found
    small = minimize(bug, tmp_path / "log", tmp_path / "small")
    assert small.num_requests <= MOST_REQUESTS, small
    # A build without the bug replays the small log without a failure. A failure of the kind KIND is a
    # difference between two builds, which a replay with a single build cannot show.
    if small.failure.kind != KIND:
        assert replay_failure(tmp_path / "small" / "log", small.failure.kind) is None, "a good build is fine"
