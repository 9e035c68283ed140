"""Tests that `show` and `why` read the name of a request's API from the envelope. The server stores an
envelope, which describes the HTTP call, with each request.
"""

import pytest

from mmengine.cli.logs.show_tables import request_table
from mmengine.core.engine import EngineCore
from mmengine.events.log import LogWriter
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.queries.request_events import request_events
from mmengine.replay.queries.summaries import request_lines
from mmengine.simulation.simulated_executor import SimulatedExecutor
from tests.core.small_engine import request, settings_of


@pytest.mark.parametrize(
    ("envelope", "said"),
    [
        (b'{"api": "chat", "created": 1}', "chat"),
        (b'{"created": 1}', "unknown"),
        (b"\xff\xfe", "unknown"),
        (b"[" * 5000, "unknown"),
        (b'{"api": "' + b"x" * 5000 + b'"}', "x" * 32),
    ],
)
def test_show_names_the_endpoint(tmp_path, envelope, said):
    folder, config = tmp_path / "log", settings_of(num_blocks=33)
    core = EngineCore(config, SimulatedExecutor(config), sink=LogWriter(folder))
    core.submit(request("a", 5, max_tokens=2, envelope=envelope))
    while core.has_work:
        core.step()
    core.close()
    lines = list(request_lines(folder))
    assert [line.api for line in lines] == [said]
    first = next(request_events(CheckedLog(folder), "a"))
    assert first.changed["api"] == said and f"through {said}" in first.text
    assert "through" in [str(column.header) for column in request_table(lines).columns]
