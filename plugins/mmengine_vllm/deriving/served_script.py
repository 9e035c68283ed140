"""Serves a log's requests on a vLLM scheduler class, without a model, and records the run."""

from collections.abc import Iterator

from msgspec.structs import replace

from mmengine.config import EngineConfig
from mmengine.core import first_events
from mmengine.events import vocabulary as ev
from mmengine.events.codec import Record
from mmengine.replay.rerun.script import Script
from mmengine_vllm.deriving.own_scheduler import OwnScheduler
from mmengine_vllm.deriving.served_requests import Answers, serve, stalled
from mmengine_vllm.vllm_object import VllmObject

Answer = tuple[list[int], str, dict[int, tuple[int, int]]]


class RecordedHost:
    """A replacement for Host (served_requests.py) that records the calls from `serve`. Inputs (requests,
    aborts) are events from a log.
    """

    def __init__(self, engine: OwnScheduler):
        self.engine, self.scheduler = engine, engine.scheduler
        self.update, self.give_drafts = engine.update, engine.give_drafts

    def happen(self, event: ev.Event) -> None:
        self.engine.observe(event)

    def schedule(self) -> VllmObject:
        self.engine.schedule()
        return self.engine.output


class ServedScript:
    """One run of a script. `started`: STARTED of the script's log. `name`: the scheduler class, as in
    `scheduler_class` (own_scheduler.py).

    `num_calls`: number of `schedule` calls. `calls`: for each record, the number of its `schedule` call.
    `stall`: an error text if the last call could schedule requests but scheduled none, else "".
    """

    def __init__(self, started: ev.Started, script: Script, name: str):
        self.script, self.started = script, started_of(started, script.config)
        self._events: list[tuple[ev.Event, int, int]] = [(self.started, 0, 0)]
        self.engine = OwnScheduler(self.started, script.config, name, self._events.extend)
        self.num_calls, self.stall, self.calls = 0, "", list[int]()

    def records(self, max_steps: int) -> Iterator[Record]:
        """Serve the script for at most `max_steps` steps, and yield the records of the new log."""
        host, script = RecordedHost(self.engine), self.script
        calls = serve(
            host,
            [(each.step, each.event) for each in script.observations],
            Answers(answers_of(script), script.config.num_draft_tokens),
            overlaps=script.config.max_in_flight > 1,
            most_calls=min(2 * max_steps + 64, 100_000),
        )
        for output, is_idle in calls:
            self.num_calls += 1
            yield from self._take()
            if stalled(self.engine.scheduler, output, is_idle) is not None:
                self.stall = self.engine.stalled()
                return
        yield from self._take()

    @property
    def present(self) -> tuple[str, ...]:
        """The ids of the requests that wait or run."""
        return tuple(self.engine.scheduler.requests)

    def _take(self) -> Iterator[Record]:
        events = self._events.copy()
        self._events.clear()
        for event, step, ns in events:
            self.calls.append(self.num_calls - 1)
            yield Record(len(self.calls) - 1, step, ns, event)


def answers_of(script: Script) -> dict[str, Answer]:
    """Return the answers to a script's requests, in served_requests' format."""
    found = {}
    for event in script.requests:
        answer = script.answers[event.request_id]
        end = "stop" if answer.stop else "error" if answer.error else ""
        runs = {place: (count, drafts) for place, count, drafts in answer.runs.tolist()}
        found[event.request_id] = answer.tokens.tolist(), end, runs
    return found


def started_of(started: ev.Started, config: EngineConfig) -> ev.Started:
    """Return a STARTED event with the host in `started` and the settings in `config`."""
    facts, before = dict(started.fingerprints), EngineConfig.from_dict(started.config)
    renamed = (
        ("max_num_active_reqs", "max_num_seqs"),
        ("max_num_batched_tokens", "token_budget"),
        ("hash_block_size", "block_size"),
    )
    for theirs, ours in renamed:
        if facts.get(f"vllm.{theirs}") == str(getattr(before, ours)):
            facts[f"vllm.{theirs}"] = str(getattr(config, ours))
    made = first_events.started_of(replace(config, compat=before.compat), facts, host=started.host)
    return replace(made, constants=replace(made.constants, knows_contents=True))
