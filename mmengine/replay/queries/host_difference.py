"""Finds the first scheduling call of a recorded log that differs from the rules of its host. The host is the
engine whose decisions the log contains, such as vLLM.
"""

from contextlib import suppress
from pathlib import Path

from mmengine.errors import LogError
from mmengine.events import vocabulary as ev
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.hosted.verify import verify_hosted
from mmengine.replay.verify_report import Divergence


def host_difference(folder: Path, started: ev.Started) -> Divergence | None:
    """Return the first call of a recorded log that differs from the rules of its host, or None.

    The log lacks the order of the host's decisions within a call, so whole calls are compared.
    """
    if not started.host:
        return None
    with suppress(LogError):
        return verify_hosted(CheckedLog(folder)).divergence
    return None
