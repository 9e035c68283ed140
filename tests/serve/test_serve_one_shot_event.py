"""Tests tasks that wait for a OneShotEvent."""

import asyncio

from mmengine.serve.stream.one_shot_event import OneShotEvent


def test_all_waiting_tasks_wake():
    async def run():
        once, heard = OneShotEvent(), []

        async def wait(name):
            await once.wait()
            heard.append(name)

        waiting = [asyncio.create_task(wait(name)) for name in "abc"]
        await asyncio.sleep(0)
        waiting[1].cancel()
        await asyncio.sleep(0)
        assert not once.is_set and heard == []
        once.set()
        once.set()
        await asyncio.gather(*waiting, return_exceptions=True)
        await wait("late")  # returns immediately
        return once.is_set, heard

    assert asyncio.run(run()) == (True, ["a", "c", "late"])
