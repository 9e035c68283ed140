"""Replay: reads a log, rebuilds the engine's states, and derives the log's decisions again. "Fold" means to
apply a log's events to the state in order. A row is a running request's slot in the batch. Replay needs
neither torch nor a model.
"""

from mmengine.replay.minimize.failures import Failure, replay_failure
from mmengine.replay.queries.summaries import RequestLine, StepLine, request_lines, step_lines
from mmengine.replay.timeline import Step, Timeline, open_log
from mmengine.replay.verify import Divergence, VerifyReport, verify

__all__ = [
    "Divergence",
    "Failure",
    "RequestLine",
    "Step",
    "StepLine",
    "Timeline",
    "VerifyReport",
    "open_log",
    "replay_failure",
    "request_lines",
    "step_lines",
    "verify",
]
