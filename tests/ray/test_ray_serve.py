"""Clients notice nothing when Ray Serve's replicas are killed, hang, or are replaced in a rolling update."""

import asyncio
import os
import random
import signal
import time

import pytest

pytest.importorskip("ray.serve", reason="Ray is not installed; make ray makes an environment with it")

from ray import serve  # noqa: E402

from mmengine.replay.queries.fleet import logs_in  # noqa: E402
from mmengine.replay.verify import verify  # noqa: E402
from mmengine_ray.deployments import application  # noqa: E402
from tests.ray.fleets import all_told, memory_mb, replicas, serving, settings_for  # noqa: E402

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1500)]
STREAMS = 60
KILLS = int(os.environ.get("MMENGINE_RAY_KILLS", "50"))


@pytest.fixture(scope="module")
def port():
    with serving() as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def fleet(port, folder):
    serve.run(application(settings_for(folder, replicas=3)))
    asyncio.run(replicas(3))
    return port


@pytest.fixture(scope="module")
def undisturbed(fleet):
    found = asyncio.run(all_told(fleet, range(STREAMS)))
    assert all(said[index][-1][1] in ("stop", "length") for said in found for index in said)
    return found


def test_memory_use_of_ray(fleet):
    total = 0.0
    for mb, command in memory_mb():
        if mb > 1:
            total += mb
            print(f"{mb:7.0f} MB  {command[:90]}")
    print(f"{total:7.0f} MB in all, three replicas included")


def test_a_replica_is_killed_at_random_instants(fleet, undisturbed, folder):
    chosen, unfinished, took = random.Random(3), [], []

    async def kill(after_s):
        await asyncio.sleep(after_s)
        victim = chosen.choice(await replicas(2))
        os.kill(victim.pid, signal.SIGKILL)

    for number in range(KILLS):
        begun = time.monotonic()
        found = asyncio.run(all_told(fleet, range(STREAMS), kill(chosen.random() * 1.5)))
        took.append(time.monotonic() - begun)
        for place, (said, wanted) in enumerate(zip(found, undisturbed, strict=True)):
            assert said == wanted, f"kill {number}, stream {place}"
    logs = logs_in(folder)  # a replica that was killed at its start has no log
    for log in logs:
        unfinished.append(len(verify(log).unfinished))
    print(f"{KILLS} kills, {len(logs)} lives, {sum(unfinished)} requests were unfinished in logs of the dead")
    print(f"a round of {STREAMS} streams took {min(took):.1f} to {max(took):.1f} s")
    assert sum(unfinished) > KILLS * 5, "most streams were over before the kills"


def test_a_rolling_update_under_load_fails_no_request(fleet, undisturbed, folder):
    before = {each.pid for each in asyncio.run(replicas(3))}

    async def roll():
        await asyncio.sleep(0.5)
        await asyncio.to_thread(serve.run, application(settings_for(folder, replicas=3, hang_s=61.0)))

    for said, wanted in zip(asyncio.run(all_told(fleet, range(STREAMS), roll())), undisturbed, strict=True):
        assert said == wanted
    assert before.isdisjoint(each.pid for each in asyncio.run(replicas(3)))


def test_a_replica_that_hangs_is_left_and_replaced(fleet, undisturbed, folder):
    """The replica process is frozen by SIGSTOP. Ray Serve's health check ends the process."""

    async def freeze():
        await asyncio.sleep(0.5)
        victim = (await replicas(3))[0]
        os.kill(victim.pid, signal.SIGSTOP)
        return victim

    async def go():
        task = asyncio.create_task(freeze())
        found = await all_told(fleet, range(STREAMS), asyncio.shield(task))
        return found, await task

    found, victim = asyncio.run(go())
    for said, wanted in zip(found, undisturbed, strict=True):
        assert said == wanted
    end = time.monotonic() + 60
    while os.path.exists(f"/proc/{victim.pid}") and time.monotonic() < end:
        time.sleep(0.2)
    assert not os.path.exists(f"/proc/{victim.pid}"), "Serve's health check did not end it"
