"""Test log commands on the logs of several replicas: each request's path over the replicas, and the HTML
report.
"""

import asyncio
import json

import pytest
from typer.testing import CliRunner

from mmengine.cli.main import app
from mmengine.fleet.attempt import RoutingLimits
from mmengine.fleet.engine import FleetEngine
from mmengine.fleet.replica import Replica
from mmengine.replay.queries.fleet import describe_path, is_fleet, logs_in, replica_paths
from mmengine.replay.queries.request_names import matching_ids
from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.serve.prompt.prompt import Prompt
from tests.fleet.carriers import LocalCarrier
from tests.serve.serve_fakes import EchoProcessor, builder
from tests.server.running import SlowEcho

TEXT = "abc" * 40


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Return the folder of three replicas' logs. One replica is disconnected during an answer, another
    drains.
    """
    folder = tmp_path_factory.mktemp("fleet")

    async def go():
        build = builder(executor_class=SlowEcho)
        kept = [Replica(name, AsyncEngine(builder=build, log=folder / name), beat_s=0.05) for name in "abc"]
        carrier = LocalCarrier(*kept)
        engine = FleetEngine(carrier, EchoProcessor(), kept[0].engine.config, 64, RoutingLimits(10, 60))
        asked = [
            asyncio.create_task(engine.generate(Prompt(text=f"{n}{TEXT}"), request_id=f"r{n}", n=1 + n % 2))
            for n in range(8)
        ]
        while sum(each.load().num_open and not each.load().waiting_tokens for each in kept) < 2:
            await asyncio.sleep(0.01)
        lost, drained, _ = sorted(kept, key=lambda each: -each.load().num_open)
        carrier.lose(lost.name)
        drained.leave("it drains")
        assert all(each.text == f"{n}{TEXT}".upper() for n, each in enumerate(await asyncio.gather(*asked)))
        await engine.close()
        for each in kept:
            await each.engine.close(drain=False)

    asyncio.run(go())
    return folder


def run(*words):
    result = CliRunner().invoke(app, ["log", *map(str, words)])
    return result.exit_code, result.output


def test_paths_of_requests(logs):
    assert is_fleet(logs) and not is_fleet(logs / "a") and logs_in(logs / "a") == [logs / "a"]
    ways, broken = replica_paths(logs_in(logs))
    assert not broken and len(ways) == 12, sorted(ways)
    assert matching_ids(ways, "r1") == ["r1/0", "r1/1"] and matching_ids(ways, "r2") == ["r2"]
    for way in ways.values():
        assert way.end == "stop" and way.num_tokens == len(TEXT) + 2
        for before, after in zip(way.hops, way.hops[1:]):
            assert before.end == "abort" and after.num_given <= before.num_given + before.num_said
    moved = [way for way in ways.values() if len(way.hops) > 1]
    assert moved and any(way.hops[1].num_given for way in moved)
    sentences = describe_path(moved[0])
    assert "migrated to another replica" in sentences[0] and "ended: stop" in sentences[-1]


def test_log_commands_support_fleets(logs, tmp_path):
    ways, _ = replica_paths(logs_in(logs))
    name = next(way.core_id for way in ways.values() if len(way.hops) > 1)
    code, shown = run("show", logs)
    assert code == 0 and "→" in shown and "12 answers" in shown
    code, lines = run("show", logs, "--json")
    assert code == 0 and {json.loads(line)["core_id"] for line in lines.splitlines()} == set(ways)
    for verb in (("show", logs, "--request", name), ("why", logs, name)):
        code, told = run(*verb)
        assert code == 0 and "migrated to another replica" in told and f", {name}\n" in told
    assert run("show", logs, "--steps")[0] != 0
    assert run("why", logs, "nobody")[0] != 0
    code, verified = run("verify", logs)
    assert code == 0 and "3 of 3 logs verified" in verified
    page = tmp_path / "fleet.html"
    assert run("report", logs, "-o", page)[0] == 0
    text = page.read_text()
    assert name in text and "script" not in text and 'href="fleet.a.html"' in text
    assert (tmp_path / "fleet.a.html").stat().st_size > 10_000
