"""Records a golden log for each engine feature.

    python -m tests.golden.make_golden NAME...

Each folder contains the log, a snapshot from its middle, and `expected.json`: the digest, the counts and the
lines that every build must compute from the log. Before version 0.1.0, a golden log is recorded again if the
log format or the scheduling rules change. From 0.1.0 on, a recorded log never changes.
"""

import json
import random
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from mmengine.config import EngineConfig
from mmengine.core.engine import EngineCore
from mmengine.core.first_events import queued_as_logged
from mmengine.core.fold.evolve import evolve
from mmengine.core.snapshot import snapshot
from mmengine.core.state.digest import state_digest
from mmengine.core.state.state import State
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader, LogWriter
from mmengine.events.snapshots import snapshot_path
from mmengine.replay import request_lines, step_lines, verify
from mmengine.simulation.simulated_executor import SimulatedExecutor
from tests.core.shaky_store import ShakyStore
from tests.core.test_store_chaos import Engine, plain_config, prompt
from tests.core.workloads import small_request
from tests.replay.runs import EOS_IN, busy_run, session_run

HERE = Path(__file__).parent


def expected(folder: Path, digest: bytes) -> dict:
    """Return the values that every build must compute from the log. `digest`: the final state's digest."""
    report = verify(folder)
    lines = [asdict(line) for line in request_lines(folder)]
    return {
        "digest": digest.hex(),
        "events": report.events,
        "steps": report.steps,
        "tokens": report.tokens,
        "checkpoints": report.checkpoints,
        "step_lines": [list(asdict(line).values()) for line in step_lines(folder)],
        "requests": [{name: line[name] for name in line if not name.endswith("_ns")} for line in lines],
    }


# Two steps are in flight, except after a step with drafts.
MIXED = {"seed": 42, "max_in_flight": 2, "draft_policy": "goodput"}
SETTINGS = {
    "mixed": MIXED,
    # The drafter has its own KV. With this seed, each vLLM rule changes at least one decision.
    "compat": {"seed": 49, "compat": "vllm", "lookahead_tokens": 2},
    # Few slots, so that recurrent states are evicted.
    "recurrent_states": MIXED | {"num_state_slots": 9, "snapshot_every": 8},
    # Several adapters, but only a single adapter can run at a time.
    "adapters": MIXED | {"max_loras": 1},
}


def crashed_run(folder: Path, num_requests: int, settings: dict = MIXED) -> EngineCore:
    """Record a process that ends during its run, and the process that continues its log. The second process
    receives more requests than its queue can contain.
    """
    drafts = {"num_draft_tokens": 2, "drafts_for": "forms"}
    with TemporaryDirectory() as before:
        busy_run(Path(before), num_requests=num_requests, mixed=True, **settings, **drafts)
        records = list(LogReader(Path(before)))
    writer, config = LogWriter(folder), EngineConfig.from_dict(records[0].event.config)
    state = State(config)
    for record in records[: len(records) * 2 // 3]:
        writer.append(record.event, record.step, record.mono_ns)
        evolve(state, record.event)
    executor = SimulatedExecutor(config, eos_in=EOS_IN)
    core = EngineCore(config, executor, sink=writer, state=state, started=records[0].event)
    steps = tuple(flight.step for flight in state.flights)
    lost = ((state.waiting[-1].request.request_id, "its image is lost"),)
    core.recover(ev.Recovered(steps, "tail", (("0.mmlog", 99, 7),), lost, {"weights": "00"}, "0.1.0"))
    _run(core)
    rng = random.Random(0)
    late = [small_request(rng, f"late{number}", config) for number in range(config.max_waiting + 1)]
    for request in late[1:]:
        core.submit(request)
    core.inbox.put(queued_as_logged(late[0]))  # the queue is full when this request arrives
    _run(core)
    core.close()
    return core


def _run(core: EngineCore) -> None:
    """Run until all requests have ended. Each grammar becomes ready before the next step."""
    while core.has_work:
        for name, known in core.state.requests.items():
            if known.waits_for_grammar:
                core.inbox.put(ev.GrammarReady(name))
        for output in core.step():
            if output.finish_reason is not None:
                core.delivered(output.request_id)


def stored_run(folder: Path) -> EngineCore:
    """Record an engine that shares a faulty block store with a second engine. Prefix cache resets make the
    engines fetch blocks.
    """
    rng = random.Random(7)
    with TemporaryDirectory() as beside:
        store, config = ShakyStore(rng, chance=0.08), plain_config()
        engines = [Engine(config, store, place) for place in (folder, Path(beside))]
        for number in range(60):
            engine, name = engines[number % 2], f"r{number}"
            shared = prompt(name, rng.choice((18, 30, 44)))
            engine.submit(shared if rng.random() < 0.7 else small_request(rng, name, config))
            for each in engines:
                for _ in range(rng.randrange(6)):
                    each.step()
            if number % 5 == 0:
                engine.core.reset_prefix_cache()
        for engine in engines:
            engine.run()
            engine.check()
    return engines[0].core


def save_state(folder: Path) -> None:
    """Write a snapshot from the middle of the log, between two steps."""
    records = list(LogReader(folder))
    state = State(EngineConfig.from_dict(records[0].event.config))
    for place, record in enumerate(records):
        evolve(state, record.event)
        if place >= len(records) // 2 and not state.is_open:
            break
    snapshot_path(folder, place).write_bytes(snapshot.take(state, records[0].event, place))


def main(name: str) -> None:
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    if name == "store":
        core = stored_run(folder)
    elif name == "sessions":
        core = session_run(folder)
    else:
        core = crashed_run(folder, 24, SETTINGS[name])
    save_state(folder)
    (folder / "lock").unlink()
    text = json.dumps(expected(folder, state_digest(core.state)), separators=(",", ":"))
    (folder / "expected.json").write_text(text + "\n")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        main(name)
