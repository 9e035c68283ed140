"""Replay: read a log, fold it, derive its decisions again. Needs no torch and no model."""

from mmengine.replay.show import RequestLine, StepLine, request_lines, step_lines
from mmengine.replay.verify import Divergence, VerifyReport, verify

__all__ = ["Divergence", "RequestLine", "StepLine", "VerifyReport", "request_lines", "step_lines", "verify"]
