"""The interface for engines that derive a log's decisions again. The host is the engine that recorded the
log, such as vLLM. The decisions are derived with mmengine's copy of the host's rules, or with the host's own
scheduler, which this module loads.
"""

from collections import deque
from importlib import import_module
from types import ModuleType
from typing import Protocol

from mmengine.config import EngineConfig
from mmengine.errors import LogError
from mmengine.events import vocabulary as ev
from mmengine.replay.host_rules import UNMODELLED, HostRules
from mmengine.replay.hosted.outcome import Difference, Outcome

Ended = ev.Finished | ev.Preempted
PLUGIN = "mmengine_vllm"
# Features that vLLM's own scheduler can replay without workers, but that mmengine's copy of the rules does
# not model.
_DERIVED_BY_HOST = {"hybrid KV groups", "KV groups without full attention"}


class HostEngine(Protocol):
    """Derives a host's decisions, call by call. `ends`: FINISHED and PREEMPTED events that follow from the
    last observations or results, oldest first. The log must continue with these events.
    """

    config: EngineConfig
    ends: deque[Ended]

    @property
    def waiting(self) -> list[str]:
        """The waiting requests, in the order of the queue."""

    @property
    def has_flights(self) -> bool:
        """Whether a step is in flight."""

    def observe(self, event: ev.Event) -> None:
        """Apply an observation other than drafts and results."""

    def note(self, event: ev.Noted) -> bool:
        """Apply the call in a NOTED event. Return whether later decisions can still be derived."""

    def draft(self, event: ev.Drafted, names: list[str]) -> None:
        """Set these requests' drafts. Raises KeyError for a request that has ended, and ValueError for
        impossible drafts.
        """

    def schedule(self) -> Outcome:
        """Run a scheduling call, and return its outcome."""

    def dispatch(self) -> None:
        """Close the open step, whose result returns later."""

    def collect(self, result: ev.Executed | ev.Failed) -> None:
        """Apply the oldest step's result. Raises ValueError for a result that does not match the step."""

    def drop_empty_step(self) -> None:
        """Close an open step without rows, which has no result."""

    def left_over(self) -> list[str]:
        """Return the requests that the next call would schedule, or no requests while a step is in flight."""

    def stalled(self) -> str:
        """Return the `no_progress` message if requests could run, KV blocks are free, and no step is in
        flight. Otherwise return "". Must be called after `left_over` returned nothing.
        """

    def rule_of(self, found: Difference, logged: Outcome, derived: Outcome, waiting: list[str]) -> str:
        """Return the rule that most likely explains a difference, or "". `waiting`: the waiting requests
        before the call.
        """


def no_progress(num_running: int, num_waiting: int, num_free: int, num_blocks: int) -> str:
    """Return the message for a call that schedules nothing although it could."""
    return (
        f"nothing is scheduled and no step is in flight: {num_running} requests run, {num_waiting} wait, and "
        f"{num_free} of {num_blocks - 1} KV blocks are free"
    )


def own_scheduler(name: str, started: ev.Started, config: EngineConfig) -> HostEngine:
    """Return the host's own scheduler. `name`: "vllm", or the class of a vLLM scheduler as MODULE:CLASS.

    Raises LogError if vLLM or its plugin is not installed, or if the installed version differs from the log's
    host.
    """
    engine: HostEngine = plugin_module("own_scheduler", name).OwnScheduler(started, config, name)
    return engine


def plugin_module(module: str, name: str) -> ModuleType:
    """Return a module of the plugin, which imports vLLM. `name`: the scheduler's name, for errors.

    Raises LogError if vLLM or the plugin is not installed.
    """
    try:
        return import_module(f"{PLUGIN}.deriving.{module}")
    except ImportError as error:
        raise LogError(
            f"--with {name} requires vLLM and {PLUGIN} in this environment ({error}): run the command in "
            "vLLM's environment, after `pip install . ./plugins/mmengine_vllm`"
        ) from error


def own_rules(name: str, started: ev.Started) -> HostRules:
    """Return the HostRules for deriving decisions with the host's own scheduler. The result has a caveat if
    this scheduler cannot replay the log.
    """
    missing = [each for each in started.fingerprints.get(UNMODELLED, "").split("; ") if each]
    lacking = ", ".join(each for each in missing if each not in _DERIVED_BY_HOST)
    if lacking:
        return HostRules("", "", f"{lacking} cannot be repeated without vLLM's workers")
    if not started.constants.knows_contents:
        return HostRules("", "", "the log does not say what vLLM's prefix cache contained when the log began")
    return HostRules("vllm", started.host)
