"""Tests that torch's state is restored after a failed graph capture.

The parts of torch that need a GPU are replaced.
"""

import pytest
import torch

from mmengine.runtime.device.cuda import CudaRecorder


class Stream:
    device = torch.device("cuda:0")

    def __init__(self, name):
        self.name = name

    def wait_stream(self, other):
        pass


class Graph:
    """A fake CUDAGraph. `fails`: the call that fails, "begin" or "end". `pools`: each capture's memory pool.

    In CUDA, a forbidden call within a capture makes `capture_end` fail.
    """

    fails, pools = "", []

    def capture_begin(self, *pool, **options):
        self.pools.append(pool)
        if self.fails == "begin":
            raise torch.AcceleratorError("CUDA error: operation not permitted")

    def capture_end(self):
        if self.fails == "end":
            raise torch.AcceleratorError("CUDA error: operation failed due to an error")

    def pool(self):
        return (len(self.pools), 0)

    def replay(self):
        pass


@pytest.fixture
def current(monkeypatch):
    """Replace torch's streams and graphs. Returns the stack of current streams, the innermost last."""
    streams = [Stream("usual")]

    class Current:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            streams.append(self.stream)

        def __exit__(self, *raised):
            del streams[streams.index(self.stream, 1) :]

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("capture"))
    monkeypatch.setattr(torch.cuda, "stream", Current)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: streams[-1])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    monkeypatch.setattr(Graph, "pools", [])
    return streams


@pytest.mark.parametrize("fails", ["", "begin", "end"])
def test_the_usual_stream_is_current_again(current, monkeypatch, fails):
    monkeypatch.setattr(Graph, "fails", fails)
    recorder, ran = CudaRecorder(torch.device("cuda")), []
    compute = lambda: ran.append(current[-1].name)  # noqa: E731
    if fails:
        with pytest.raises(torch.AcceleratorError):
            recorder.record(compute)
    else:
        recorder.record(compute)
    assert set(ran) == {"capture"} and len(current) == 1


def test_a_new_capture_can_follow_a_failed_one(current, monkeypatch):
    """After a failed capture the next capture gets a new memory pool, because torch refuses the old pool.

    The failed graph is kept, because torch's allocator still uses it.
    """
    recorder = CudaRecorder(torch.device("cuda"))
    for fails in ("", "", "end", "", ""):
        monkeypatch.setattr(Graph, "fails", fails)
        try:
            recorder.record(lambda: None)
        except torch.AcceleratorError:
            assert fails
    assert Graph.pools == [(), ((1, 0),), ((1, 0),), (), ((4, 0),)]
    assert len(recorder._broken) == 1
