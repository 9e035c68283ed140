"""The decision function for a recorded log: this build's rules, or the host's own scheduler."""

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
# Features that the rules here do not model, and that vLLM's scheduler derives without its workers.
_DERIVED_BY_HOST = {"hybrid KV groups"}


class HostEngine(Protocol):
    """Decides what a host decided, call by call. `ends`: the ends that the last observations or results led
    to, oldest first, which the log must contain next.
    """

    config: EngineConfig
    ends: deque[Ended]

    @property
    def waiting(self) -> list[str]:
        """The requests that wait, first request first."""

    @property
    def has_flights(self) -> bool:
        """Whether a step's result is missing."""

    def observe(self, event: ev.Event) -> None:
        """Apply an observation that names no row."""

    def note(self, event: ev.Noted) -> bool:
        """Apply a noted call. Return whether the decisions after it can be derived."""

    def draft(self, event: ev.Drafted, names: list[str]) -> None:
        """Give drafts to these requests. Raises KeyError for a request that has ended, and ValueError."""

    def schedule(self) -> Outcome:
        """Decide one call and return its outcome."""

    def dispatch(self) -> None:
        """Close the open step. Its result returns later, and the next call may come before."""

    def collect(self, result: ev.Executed | ev.Failed) -> None:
        """Apply the result of the oldest step. Raises ValueError for a result that does not fit the step."""

    def drop_empty_step(self) -> None:
        """Close an open step without rows, which has no result."""

    def left_over(self) -> list[str]:
        """Return the requests that the next call schedules, or none while a step is in flight."""

    def stalled(self) -> str:
        """Return what waits although no step is in flight and KV blocks are free, as a text, or "". Call it
        after `left_over` returned nothing.
        """

    def rule_of(self, found: Difference, logged: Outcome, derived: Outcome, waiting: list[str]) -> str:
        """Return the rule that most likely explains a difference, or "". `waiting`: before the call."""


def no_progress(num_running: int, num_waiting: int, num_free: int, num_blocks: int) -> str:
    """Return the text for a call that schedules nothing, though it could. Block 0 does not count."""
    return (
        f"nothing is scheduled and no step is in flight: {num_running} requests run, {num_waiting} wait, and "
        f"{num_free} of {num_blocks - 1} KV blocks are free"
    )


def own_scheduler(name: str, started: ev.Started, config: EngineConfig) -> HostEngine:
    """Return the host's own scheduler. `name`: "vllm", or a scheduler class of vLLM as MODULE:CLASS.

    Raises LogError if vLLM or its plugin is not installed, or has another version than the log's host.
    """
    engine: HostEngine = plugin_module("own_scheduler", name).OwnScheduler(started, config, name)
    return engine


def plugin_module(module: str, name: str) -> ModuleType:
    """Return a module of the plugin that imports vLLM. `name`: as in `own_scheduler`, for the error.

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
    """Return the rules for a log whose decisions the host's own scheduler derives: no rules of this build,
    and a caveat if the scheduler cannot be fed with this log.
    """
    missing = [each for each in started.fingerprints.get(UNMODELLED, "").split("; ") if each]
    lacking = ", ".join(each for each in missing if each not in _DERIVED_BY_HOST)
    if lacking:
        return HostRules("", "", f"{lacking} cannot be repeated without vLLM's workers")
    if not started.constants.knows_contents:
        return HostRules("", "", "the log does not tell what vLLM's prefix cache held when it began")
    return HostRules("vllm", started.host)
