"""Workloads that reveal planted bugs: chats with shared system prompts, images, tenants, grammars, adapters,
sessions, cancelled requests and failed steps. The KV pools are too small for the workloads.
"""

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mmengine.config import EngineConfig
from mmengine.core.engine import EngineCore
from mmengine.errors import InvalidRequest, MMEngineError, QueueFull
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogWriter
from mmengine.request import Adapter, GrammarRequest, MediaItem, Request, SamplingParams
from mmengine.simulation.simulated_executor import SimulatedExecutor

EOS_IN = 24
ADAPTERS = tuple(Adapter(bytes([n]) * 32, 100, name=f"adapter {n}") for n in (1, 2, 3))
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 6,
    "token_budget": 32,
    "max_model_len": 96,
    "block_size": 4,
    "num_blocks": 37,
    "encoder_budget": 24,
    "encoder_cache_size": 40,
    "admission_reserve": "none",
    "max_waiting": 200,
    "checkpoint_interval": 16,
}


@dataclass
class Night:
    """A workload.

    `settings`: changes to SETTINGS. `images`, `salts`, `grammars`: the probability that a request has an
    image, a cache salt, a grammar. `choices`: the probability that a request is a second sample (n = 2) of
    the previous request's prompt.
    `num_sessions`: the number of sessions that continue during the run. `fail_at`: the steps that fail.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    num_requests: int = 60
    seed: int = 1
    images: float = 0.3
    salts: float = 0.2
    grammars: float = 0.0
    choices: float = 0.0
    num_sessions: int = 0
    fail_at: tuple[int, ...] = ()
    patches: int = 2  # height and width of an image's grid

    @property
    def config(self) -> EngineConfig:
        return EngineConfig(**{**SETTINGS, **self.settings})

    def run(self, folder: Path) -> Exception | None:
        """Serve the workload and write its log to `folder`. Return the error that ended the run, or None."""
        sink = LogWriter(folder)
        served = _Served(self, sink)
        try:
            served.serve()
        except Exception as error:
            sink.commit()
            sink.close()
            return error
        return None


class _Served:
    def __init__(self, night: Night, sink: LogWriter):
        self.night, self.rng = night, random.Random(night.seed)
        self.config = night.config
        executor = SimulatedExecutor(
            self.config, eos_in=EOS_IN, fault=lambda step: "device error" if step in night.fail_at else None
        )
        self.core = EngineCore(self.config, executor, sink=sink)
        self.live: set[str] = set()
        self.compiling: list[str] = []
        self.last: Request | None = None
        self.turns: dict[str, list[int]] = {}

    def serve(self) -> None:
        if self.config.max_loras:
            for adapter in ADAPTERS:
                self.core.inbox.put(ev.AdapterLoaded(adapter, "folder"))
        for number in range(self.night.num_sessions):
            self.core.sessions.open(ev.SessionOpened(f"s{number}"))
            self.turns[f"s{number}"] = list(range(100 * number, 100 * number + 12))
        for number in range(self.night.num_requests):
            self.arrive(number)
            if self.rng.random() < 0.08 and self.live:
                self.core.cancel(self.rng.choice(sorted(self.live)))
            if self.compiling and self.rng.random() < 0.5:
                self.core.grammar_ready(self.compiling.pop(0))
            self.step(self.rng.choice((0, 0, 1, 1, 2, 4, 9)))
        while self.core.has_work and (self.compiling or not self.core.awaits_grammars):
            if self.compiling:
                self.core.grammar_ready(self.compiling.pop(0))
            self.step(1)
        for name in self.turns:
            self.core.sessions.close(name, "closed")
        self.step(2)
        self.core.close()

    def arrive(self, number: int) -> None:
        name = f"req-{number}"
        session = f"s{number % max(1, 2 * self.night.num_sessions)}"
        try:
            if session in self.turns:
                self.continue_session(session, name)
            else:
                request = self.request(name)
                self.core.submit(request)
                self.last = request
                if request.grammar is not None:
                    self.compiling.append(name)
        except (QueueFull, InvalidRequest):
            return
        self.live.add(name)

    def continue_session(self, session: str, name: str) -> None:
        said = self.core.state.sessions.all.get(session)
        tokens = [*(self.turns[session] if said is None or not len(said.tokens) else said.tokens.tolist())]
        tokens += [self.rng.randrange(100, 900) for _ in range(self.rng.randint(2, 8))]
        if len(tokens) > self.config.max_model_len - 12:
            tokens = tokens[:12]
        sampling = SamplingParams(max_tokens=self.rng.randint(2, 8), seed=1)
        try:
            self.core.sessions.append(session, Request(name, np.array(tokens, np.int32), sampling))
        except MMEngineError as error:
            raise QueueFull(str(error)) from None

    def request(self, name: str) -> Request:
        rng, night = self.rng, self.night
        if self.last is not None and not self.last.group and rng.random() < night.choices:
            no_outputs = np.zeros(0, np.int32)
            same = replace(self.last, request_id=name, sample_index=1, outputs=no_outputs)
            if self.last.request_id in self.live and self.last.grammar is None:
                return replace(same, group=self.last.request_id)
        assistant = rng.randrange(3)
        system = list(range(1000 * assistant, 1000 * assistant + rng.choice((8, 14, 20))))
        media = []
        if rng.random() < night.images:
            size, tag = rng.choice((4, 6, 9)), rng.randrange(6)
            media = [self.image(tag, len(system), size)]
            system += [7] * size
        text = [rng.randrange(4000, 9000) for _ in range(rng.randint(1, 24))]
        grammar = GrammarRequest("regex", "[a-z]+") if rng.random() < night.grammars else None
        adapter = rng.choice((None, *ADAPTERS)) if self.config.max_loras else None
        return Request(
            name,
            np.array(system + text, np.int32),
            SamplingParams(max_tokens=rng.randint(2, 28), seed=1),
            tuple(media),
            priority=rng.choice((0, 0, 1, 2)),
            cache_salt="tenant" if rng.random() < night.salts else "",
            grammar=grammar,
            adapter=adapter,
        )

    def image(self, tag: int, start: int, size: int) -> MediaItem:
        side = self.night.patches
        return MediaItem(bytes([tag, size]).ljust(32, b"\0"), "image", ((start, size),), (1, side, side))

    def step(self, count: int) -> None:
        for _ in range(count):
            for output in self.core.step():
                if output.finish_reason is not None:
                    self.live.discard(output.request_id)
                    self.core.delivered(output.request_id)
