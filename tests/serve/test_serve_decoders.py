"""Tests that a hostile media item harms only its own decoder process."""

import os
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from mmengine.errors import InvalidMedia, MMEngineError, QueueFull, RequestFailed
from mmengine.models.media_decoding import DecoderRecipe, EncodedMedia, FrameTimes
from mmengine.processing.workers import decoders as decoders_module
from mmengine.processing.workers.attempt import Attempt
from mmengine.processing.workers.decoders import Decoders
from mmengine.processing.workers.messages import MAX_INLINE
from tests.serve import hostile_decoder

RECIPE = DecoderRecipe(hostile_decoder.__name__, b"")


def media(what):
    return EncodedMedia("image", what.encode(), {}, "image 0")


@pytest.fixture(scope="module")
def decoders():
    """Decoders with a single process that has little memory. If a test kills the process, the next test gets
    a new one.
    """
    made = Decoders(RECIPE, 1, 2**27, limit_s=20)
    yield made
    made.close()


def process_of(decoders):
    return decoders(media("rows 1024")).grid[1]


@pytest.mark.parametrize("size", [1024, MAX_INLINE, MAX_INLINE + 1024, 3 * 2**20])
def test_pixels_come_back_whatever_their_size(decoders, size):
    found = decoders(media(f"rows {size}"))
    assert found.patches.shape == (size // 1024, 1024) and found.patches.dtype == np.uint8
    assert (found.patches == found.grid[1] % 251).all() and found.timestamps == (0.5,)
    found.patches[0, 0] = 1  # the array must be writable


def test_times_reach_the_process_and_come_back(decoders):
    times = FrameTimes(8.0, (0, 4), 16)
    found = decoders(EncodedMedia("video", (b"times",), {}, "video 0", times))
    assert found.grid == (16, 0, 4) and found.interval == 0.125 and found.duration == 1.5


def test_a_process_is_kept_steps_back_and_sees_little(decoders, monkeypatch):
    # A decoder process is kept after a refusal, has a lower priority, and sees few environment variables.
    monkeypatch.setenv("A_SECRET", "x")
    first = decoders(media("rows 1024"))
    assert first.grid[1] == process_of(decoders) != os.getpid()
    assert first.grid[2] > os.nice(0), "decoders must not slow the engine down"
    for refusal, kind in (("refuse", InvalidMedia), ("bug", RequestFailed)):
        with pytest.raises(kind, match="image 0"):
            decoders(media(refusal))
    assert first.grid[1] == process_of(decoders), "a refusal costs no process"
    fresh = Decoders(RECIPE, 1, 2**30, 20)
    with pytest.raises(InvalidMedia) as error:
        fresh(media("modules"))
    fresh.close()
    assert str(error.value).startswith("[]") and "A_SECRET" not in str(error.value)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("crash", "died .SIGSEGV"),
        ("killed", "SIGKILL, most likely out of memory"),
        ("eat", "needs more than 128 MiB to be decoded .media_process_bytes."),
        ("eaten", "needs more than 128 MiB"),
        ("leave", "died .exit code 0"),
        ("lie", "died"),
    ],
)
def test_an_item_harms_only_its_own_process(decoders, what, says):
    before, lost = process_of(decoders), decoders.num_lost
    with pytest.raises(InvalidMedia, match=f"image 0.*{says}"):
        decoders(media(what))
    assert process_of(decoders) != before and decoders.num_lost == lost + 1
    assert not alive(before)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("what", ["spin", "sleep"])
def test_time_is_limited(what):
    decoders = Decoders(RECIPE, 1, 2**27, limit_s=0.3)
    before = process_of(decoders)
    with pytest.raises(InvalidMedia, match="longer than 0.3 seconds to be decoded .prepare_timeout_s."):
        decoders(media(what))
    assert not alive(before) and process_of(decoders) != before
    decoders.close()


def test_a_step_that_must_not_wait_gets_a_new_process(decoders):
    """If all processes are busy, an attempt that must not wait gets an additional process."""
    other = Attempt(None)

    def decode():
        with other.on_this_thread(), pytest.raises(MMEngineError):
            decoders(media("sleep"))

    busy = threading.Thread(target=decode)
    busy.start()
    while not decoders._num_busy:
        time.sleep(0.01)
    with Attempt(None, waits=False).on_this_thread():
        assert process_of(decoders)
    assert decoders._num_busy == 1
    other.give_up()
    busy.join(10)
    assert not decoders._num_busy


def test_an_attempt_ends_what_runs_and_what_waits_for_it(decoders):
    # `give_up` ends a running and a waiting attempt. A deadline ends the third attempt while it waits.
    outcomes = {}

    def decode(name, attempt):
        with attempt.on_this_thread():
            try:
                decoders(media("sleep"))
            except MMEngineError as error:
                outcomes[name] = str(error), time.monotonic()

    attempts = {"running": Attempt(None), "waiting": Attempt(None), "late": Attempt(time.monotonic() + 0.2)}
    threads = [threading.Thread(target=decode, args=item) for item in attempts.items()]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    threads[2].join(10)
    assert outcomes.keys() == {"late"}, "only `late` has ended, since the process was busy"
    attempts["waiting"].give_up()
    threads[1].join(10)
    assert outcomes.keys() == {"late", "waiting"}
    attempts["running"].give_up()
    threads[0].join(10)
    assert {text for text, _ in outcomes.values()} == {"the request was given up before it began"}
    assert process_of(decoders)
    with pytest.raises(RequestFailed), attempts["running"].on_this_thread():
        decoders(media("rows 1024"))


def test_processes_that_do_not_start_are_not_started_again_and_again(monkeypatch):
    # After a failed start, no start is tried for FIRST_PAUSE_S. Meanwhile `reasons` reports the failure.
    clock = SimpleNamespace(ahead=0.0, monotonic=lambda: time.monotonic() + clock.ahead)
    monkeypatch.setattr(decoders_module, "time", clock)
    monkeypatch.setattr(decoders_module, "FIRST_PAUSE_S", 10.0)
    decoders = Decoders(DecoderRecipe(RECIPE.module, b"does not start"), 1, 2**27, 20)
    started = []
    start = decoders_module.DecoderProcess
    monkeypatch.setattr(decoders_module, "DecoderProcess", lambda *a: (started.append(1), start(*a))[1])
    for _ in range(20):
        with pytest.raises(QueueFull, match="no decoder can be started: it did not start .exit code 3"):
            decoders(media("rows 1024"))
    assert len(started) == 1 and "exit code 3" in decoders.reasons[0]
    clock.ahead = 10.5
    assert not decoders.reasons, "an engine that is not ready gets no work, so nothing would start a decoder"
    decoders._recipe = RECIPE
    assert process_of(decoders) and not decoders.reasons
    decoders.close()


def test_closing_ends_the_processes():
    decoders = Decoders(RECIPE, 2, 2**27, 20)
    idle = process_of(decoders)
    decoders.close()
    assert not alive(idle)
    assert not alive(process_of(decoders)), "a process that starts after the close is not kept"
