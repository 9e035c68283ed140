"""The long versions: `make soak-server`."""

import os
import random
import threading
import time

import pytest

from tests.server.health_under_images import NUM_IMAGES, measured
from tests.server.running import SlowEcho, is_empty, leave_at_random, served, wait_for

pytestmark = pytest.mark.soak
QUIET = 1.0  # load for each core, above which others decide how soon anything answers


def test_a_thousand_disconnects_at_random_leak_nothing():
    with served(executor_class=SlowEcho, ping_s=0.05) as one:
        threads_before, files_before = threading.active_count(), len(os.listdir("/proc/self/fd"))
        threads = [
            threading.Thread(target=leave_at_random, args=(one, 125, random.Random(seed)))
            for seed in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wait_for(lambda: is_empty(one), seconds=60)
        wait_for(lambda: len(os.listdir("/proc/self/fd")) <= files_before + 2)
        assert threading.active_count() <= threads_before + 4  # those that prepare start when they are needed
        assert "mmengine_http_streams_open 0.0" in one.call("/metrics")[2]
        assert one.chat("still there")[2]["choices"][0]["message"]["content"] == "STILL THERE"


def test_the_event_loop_answers_while_images_arrive():
    time.sleep(1)
    found = measured()
    for name, value in found.items():
        print(name, value)
    assert found["answers"] == {"200": NUM_IMAGES}
    is_slow = found["live"]["p99"] >= 20
    if is_slow and found["load_before"] > QUIET * os.cpu_count():
        pytest.skip(f"the machine is busy (load {found['load_before']:.1f}); measured: {found['live']}")
    assert not is_slow, found
