"""Builds a small engine with the simulated executor, for scenarios that a reader can follow by hand."""

import numpy as np

from mmengine.config import EngineConfig
from mmengine.core.engine import EngineCore
from mmengine.events import vocabulary as ev
from mmengine.events.log import MemoryLog
from mmengine.request import MediaItem, Request, SamplingParams
from mmengine.simulation.simulated_executor import SimulatedExecutor
from tests.core.workloads import check_invariants


def settings_of(**settings) -> EngineConfig:
    """Return settings with 64 usable blocks, each with 4 tokens. Other limits are too large to matter."""
    values = {
        "max_num_seqs": 4,
        "token_budget": 64,
        "max_model_len": 64,
        "block_size": 4,
        "num_blocks": 65,
        "encoder_budget": 64,
        "encoder_cache_size": 64,
        **settings,
    }
    return EngineConfig(**values)


def request(name: str, prompt: int | list[int], *, max_tokens: int = 4, media=(), **fields) -> Request:
    """Return a request. `prompt`: token ids, or their number. With a number, the token ids depend on the
    name.
    """
    if isinstance(prompt, int):
        first = 10 * (1 + sum(name.encode()))
        prompt = list(range(first, first + prompt))
    sampling = SamplingParams(max_tokens=max_tokens, seed=1)
    return Request(name, np.array(prompt, np.int32), sampling, tuple(media), **fields)


def image(tag: int, start: int, size: int) -> MediaItem:
    return MediaItem(bytes([tag, size]).ljust(32, b"\0"), "image", ((start, size),), (1, 2, 2))


def video(tag: int, *runs: tuple[int, int]) -> MediaItem:
    sizes = bytes(size for _, size in runs)
    return MediaItem((bytes([tag]) + sizes).ljust(32, b"\1"), "video", tuple(runs), (len(runs), 2, 2))


def ints(column: bytes | None) -> list[int] | None:
    return None if column is None else np.frombuffer(column, np.int32).tolist()


class Bench:
    """An engine that a test runs step by step. `tokens`: each request's tokens so far. `ends`: (finish
    reason, detail) for each finished request.
    """

    def __init__(self, *, executor=None, fault=None, eos_in=0, sink=None, clock=None, **settings):
        self.config = settings_of(**settings)
        options = {"fault": fault} if fault else {}
        self.executor = executor or SimulatedExecutor(self.config, eos_in=eos_in, check_kv=True, **options)
        options = {"clock": clock} if clock else {}
        self.log = sink or MemoryLog()
        self.core = EngineCore(self.config, self.executor, sink=self.log, **options)
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, tuple[str, str]] = {}
        self._seen = 1  # the event STARTED counts as seen

    @property
    def state(self):
        return self.core.state

    def submit(self, *requests: Request) -> None:
        for one in requests:
            self.core.submit(one)

    def step(self) -> list[ev.Event]:
        """Run one step and return the events that it added to the log."""
        for output in self.core.step():
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                assert output.request_id not in self.ends
                self.ends[output.request_id] = (output.finish_reason, output.detail)
        check_invariants(self.state)
        return self.new_events()

    def new_events(self) -> list[ev.Event]:
        events = [record.event for record in list(self.log.records)[self._seen :]]
        self._seen += len(events)
        return events

    def decisions(self) -> list[ev.Event]:
        """Run one step and return its events PREEMPTED, SCHEDULED and ADMITTED."""
        kinds = (ev.Preempted, ev.Scheduled, ev.Admitted)
        return [event for event in self.step() if isinstance(event, kinds)]

    def run(self) -> list[ev.Event]:
        """Run until nothing is left to do, and return all events."""
        events = []
        while self.core.has_work:
            events += self.step()
        return events
