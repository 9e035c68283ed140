"""Runs a simulated engine with random faults. A seed determines all faults.

    python -m tests.core.chaos --seed 17 --show     # prints what happened, event by event
    python -m tests.core.chaos --seeds 1000 2000    # runs many seeds until one fails

The executor raises errors before or after the forward pass, returns wrong results or rows with NaN, is slow,
and is interrupted. The log stalls and the clock jumps. Grammars are late, fail, or are reported for requests
without a grammar. Clients disconnect, deadlines pass, request ids are used again, prompts have several
answers, and the prefix cache is reset.
"""

import argparse
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from mmengine.config import EngineConfig
from mmengine.core.engine import EngineCore
from mmengine.core.fold.evolve import evolve
from mmengine.core.state.digest import state_digest
from mmengine.core.state.state import State
from mmengine.errors import MMEngineError, QueueFull
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader, LogWriter
from mmengine.replay import request_lines, step_lines, verify
from mmengine.simulation.simulated_executor import SimulatedExecutor, reference_tokens
from tests.core.workloads import check_invariants, small_config, small_request

EOS_IN = 20
FAULTS = (
    *("crash before the forward", "crash after the forward", "short result", "NaN row", "interrupt"),
    *("slow step", "clock jump", "log stall", "disconnect", "deadline", "no delivery", "reset"),
    *("grammar ready", "grammar failed", "grammar of nobody"),
)


Change = Callable[[EngineConfig], EngineConfig]


def unchanged(config: EngineConfig) -> EngineConfig:
    return config


class Plan:
    """Chooses random faults and counts them. `show`: print each fault and event."""

    def __init__(self, seed: int, show: bool):
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.show = show

    def strikes(self, fault: str, chance: float) -> bool:
        if self.rng.random() >= chance:
            return False
        self.met(fault)
        return True

    def met(self, fault: str, of: str = "") -> None:
        self.counts[fault] += 1
        self.tell(f"        *** {fault} {of}")

    def tell(self, line: str) -> None:
        if self.show:
            print(line)


class Clock:
    """A clock that advances by 1 at each call. `jump` moves it forward or back."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        self.now += 1
        return self.now

    def jump(self, by: int) -> None:
        self.now = max(0, self.now + by)


class Unreliable(SimulatedExecutor):
    def __init__(self, plan: Plan, config: EngineConfig, clock: Clock):
        super().__init__(config, eos_in=EOS_IN, check_kv=True)
        self._plan_of_faults, self._clock = plan, clock

    def _interrupt(self) -> None:
        if self._plan_of_faults.strikes("interrupt", 0.02):
            raise KeyboardInterrupt

    def _crash(self, fault: str) -> None:
        if self._plan_of_faults.strikes(fault, 0.03):
            raise self._plan_of_faults.rng.choice([ValueError, MemoryError, RuntimeError])("planted")

    def dispatch(self, plan):
        self._interrupt()
        self._crash("crash before the forward")
        super().dispatch(plan)

    def collect(self):
        faults = self._plan_of_faults
        self._interrupt()
        self._crash("crash before the forward")
        if faults.strikes("slow step", 0.05):
            self._clock.jump(faults.rng.randrange(1, 300))
        result = super().collect()
        self._crash("crash after the forward")
        if not len(result.token_ids):
            return result
        if faults.strikes("short result", 0.03):
            return msgspec.structs.replace(result, token_ids=result.token_ids[:-1])
        if faults.strikes("NaN row", 0.03):
            rows = len(result.token_ids) if result.counts is None else len(result.counts)
            broken = faults.rng.randrange(rows)
            stops = tuple((index, kind) for index, kind in result.stops if index != broken)
            return msgspec.structs.replace(result, stops=stops, errors=((broken, "NaN"),))
        return result


class Stalling(LogWriter):
    """A log whose commit fails at random until `cured` is set."""

    def __init__(self, plan: Plan, folder: Path):
        self.plan, self.planted, self.cured = plan, False, False
        super().__init__(folder, segment_bytes=5000)

    def append(self, event: ev.Event, step: int, mono_ns: int) -> None:
        self.plan.tell(f"{step:5} {mono_ns:12} {type(event).__name__:12} {_shown(event)}")
        super().append(event, step, mono_ns)

    def commit(self) -> bool:
        self.planted = not self.cured and self.plan.strikes("log stall", 0.1)
        return not self.planted and super().commit()

    @property
    def stalled(self) -> str:
        return "planted" if self.planted else super().stalled


class Chaos:
    """A run with faults. `ended`: (request, tokens, finish reason) for each finished request."""

    def __init__(self, seed: int, folder: Path, *, show: bool = False, change: Change = unchanged):
        self.folder, self.plan, self.clock = folder, Plan(seed, show), Clock()
        self.rng = self.plan.rng
        self.config = change(small_config(self.rng))
        self.plan.tell(f"seed {seed}: {self.config.as_dict()}")
        executor = Unreliable(self.plan, self.config, self.clock)
        self.sink = Stalling(self.plan, folder)
        self.core = EngineCore(self.config, executor, sink=self.sink, clock=self.clock)
        self.live, self.ended, self.compiling, self.last = {}, [], [], None

    def arrive(self) -> None:
        name = f"r{self.rng.randrange(8)}"
        request = small_request(self.rng, name, self.config, grammars=0.15, like=self.last)
        if name in self.live:
            return
        if self.rng.random() < 0.2:
            request = replace(request, deadline_ns=self.rng.randrange(1, 200))
        try:
            self.core.submit(request)
        except QueueFull:
            return
        except MMEngineError:
            assert self.core.stalled
            return
        self.last = request
        self.live[name] = (request, [])
        if request.grammar is not None:
            self.compiling.append(name)

    def compile_grammar(self) -> None:
        """Report that a random grammar is ready or has failed. Some reports name a random request, which may
        have no grammar.
        """
        name = f"r{self.rng.randrange(8)}"
        if self.compiling and self.rng.random() < 0.8:
            name = self.compiling.pop(self.rng.randrange(len(self.compiling)))
            fails = self.rng.random() < 0.2
            self.plan.met("grammar failed" if fails else "grammar ready", name)
        else:
            fails = self.rng.random() < 0.5
            self.plan.met("grammar of nobody", name)
            if name in self.compiling:
                self.compiling.remove(name)
        self.core.inbox.put(ev.GrammarFailed(name, "planted") if fails else ev.GrammarReady(name))

    def disturb(self) -> None:
        """Cause random faults between two steps."""
        if self.plan.strikes("disconnect", 0.1):
            self.core.cancel(f"r{self.rng.randrange(8)}")
        if self.plan.strikes("reset", 0.03):
            self.core.reset_prefix_cache(preempt_running=self.rng.random() < 0.5)
        if self.plan.strikes("clock jump", 0.03):
            self.clock.jump(self.rng.choice([-50, 10**6, 10**14]))
        if self.rng.random() < 0.3:
            self.compile_grammar()

    def step(self) -> None:
        try:
            outputs = self.core.step()
        except KeyboardInterrupt:
            return
        for output in outputs:
            request, tokens = self.live[output.request_id]
            tokens += output.token_ids
            if output.finish_reason is not None:
                self.ended.append((request, tokens, output.finish_reason))
                del self.live[output.request_id]
                if output.detail == "deadline":
                    self.plan.met("deadline", output.request_id)
                if not self.plan.strikes("no delivery", 0.1):
                    self.core.delivered(output.request_id)
        check_invariants(self.core.state)

    def run(self) -> None:
        for _ in range(40):
            self.arrive()
            self.disturb()
            for _ in range(self.rng.randrange(5)):
                self.step()
        while self.core.has_work:
            while self.compiling:
                self.core.inbox.put(ev.GrammarReady(self.compiling.pop()))
            self.step()
        self.sink.cured = True
        self.core.close()

    def check(self) -> None:
        """Check that all requests ended with the tokens of an undisturbed run, or a prefix if they ended
        early. Applying the log's events must give the live state, and `verify` must accept the log.
        """
        assert not self.live and self.ended
        self.check_tokens()
        self.check_log()

    def check_tokens(self) -> None:
        for request, got, reason in self.ended:
            tokens, end = reference_tokens(request, self.config, eos_in=EOS_IN)
            if reason in ("stop", "length"):
                assert (got, reason) == (tokens, end), request.request_id
            else:
                assert got == tokens[: len(got)], request.request_id

    def check_log(self) -> None:
        state = State(self.config)
        for record in LogReader(self.folder):
            evolve(state, record.event)
        assert state_digest(state) == state_digest(self.core.state)
        report = verify(self.folder)
        assert report.ok and not report.unfinished, report.divergence
        req_state = [line.finish_reason for line in request_lines(self.folder)]
        assert sorted(req_state) == sorted(reason for _, _, reason in self.ended if reason != "rejected")
        assert len(list(step_lines(self.folder))) == self.core.state.step


def check_seed(seed: int, folder: Path, *, show: bool = False, change: Change = unchanged) -> Counter[str]:
    """Run and check a seed, and return how often each fault occurred. An error has a note with the command
    that repeats the run. `change`: changes the seed's engine settings.
    """
    chaos = Chaos(seed, folder, show=show, change=change)
    try:
        chaos.run()
        chaos.check()
    except BaseException as error:
        error.add_note(f"see it again: python -m tests.core.chaos --seed {seed} --show")
        raise
    return chaos.plan.counts


def _shown(event: ev.Event) -> str:
    """Return the event's fields that differ from their defaults, with arrays as lists."""
    parts = []
    for field in msgspec.structs.fields(event):
        value = getattr(event, field.name)
        if value == field.default or value is None:
            continue
        if isinstance(value, bytes) and len(value) % 4 == 0 and not isinstance(event, ev.Checkpoint):
            value = np.frombuffer(value, np.int32).tolist()
        parts.append(f"{field.name}={value}")
    return " ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int)
    which.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "END"))
    parser.add_argument("--show", action="store_true", help="print every event and fault")
    options = parser.parse_args()
    first, end = options.seeds or (options.seed, options.seed + 1)
    faults: Counter[str] = Counter()
    for seed in range(first, end):
        folder = Path(tempfile.mkdtemp())
        try:
            faults += check_seed(seed, folder / "log", show=options.show)
        finally:
            shutil.rmtree(folder)
    print(f"{end - first} seeds hold")
    for fault in FAULTS:
        print(f"{faults[fault]:8} {fault}")


if __name__ == "__main__":
    sys.exit(main())
