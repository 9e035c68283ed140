"""Opens an engine's log. If an earlier process wrote the log, the log's unfinished requests are resumed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmengine.config import EngineConfig
from mmengine.core.decide.scheduler import DECISION_VERSION
from mmengine.core.engine import EngineCore
from mmengine.core.executor import Executor
from mmengine.core.remote_blocks import RemoteBlocks
from mmengine.core.resume import Resume, ResumeState, read_resume_state
from mmengine.errors import LogError
from mmengine.events.log import LogWriter
from mmengine.events.retention import Retention
from mmengine.events.snapshots import SnapshotFolder
from mmengine.events.writer import SEGMENT_BYTES

MIN_PART_BYTES = 2**20
_SHOWN = 12  # characters of a fingerprint in an error message


@dataclass(slots=True)
class OpenLog:
    """A log that is open for writing.

    `resumed`: the state at the end of an existing log; None if the log is new.
    """

    folder: Path
    sink: LogWriter
    resumed: ResumeState | None = None

    def check_fingerprints(self, now: dict[str, str], resume: Resume | None) -> None:
        """Raise LogError if the model differs from the log's model.

        `now`: the current model's fingerprints. If `resume.force` is set, a different model is accepted.
        """
        if self.resumed is None:
            return
        before = self.resumed.last_fingerprints
        changed = [
            f"{name} (was {_short(before.get(name))}, is {_short(now.get(name))})"
            for name in sorted({*before, *now})
            if before.get(name) != now.get(name)
        ]
        if changed and not (resume is not None and resume.force):
            raise LogError(
                f"the log in {self.folder} was written with a different {', '.join(changed)}; an answer "
                "could mix tokens from both. Use the same model, or continue anyway with --force-resume"
            )
        self.resumed.fingerprints = now

    def core(
        self,
        config: EngineConfig,
        executor: Executor,
        fingerprints: dict[str, str],
        remote: RemoteBlocks | None = None,
    ) -> EngineCore:
        begin, every = self.sink.next_sequence, config.snapshot_bytes
        # Only segments before a snapshot can be deleted, so snapshots must be at least as frequent as
        # segments.
        every = _a_sixteenth(config.log_retain_bytes, every)
        snapshots = SnapshotFolder(self.folder, every, begin=begin, in_background=True) if every else None
        if self.resumed is None:
            return EngineCore(
                config,
                executor,
                sink=self.sink,
                fingerprints=fingerprints,
                snapshots=snapshots,
                remote=remote,
            )
        resumed = self.resumed
        resumed.state.config = config
        return EngineCore(
            config,
            executor,
            sink=self.sink,
            started=resumed.started,
            state=resumed.state,
            snapshots=snapshots,
            undelivered=None if snapshots is None else resumed.undelivered,
            remote=remote,
        )


def open_log(folder: Path, resume: Resume | None, config: EngineConfig, **options: Any) -> OpenLog:
    """Open the log in `folder`, and read an existing log's state. `options`: further arguments for LogWriter.

    Raises LogError if the folder has a log but `resume` is None, or if this build cannot continue the log.
    Raises ConfigError if `config` contradicts the settings in the log.
    """
    options["sync_always"] = config.log_sync == "always"
    options["retention"] = Retention(config.log_retain_bytes, config.log_retain_s)
    options.setdefault("segment_bytes", _a_sixteenth(config.log_retain_bytes, SEGMENT_BYTES))
    if resume is None:
        return OpenLog(folder, LogWriter(folder, **options))
    opened = OpenLog(folder, LogWriter(folder, reopen=resume.mode, **options))
    try:
        if opened.sink.next_sequence:
            opened.resumed = _resume_state_of(opened, resume, config)
    except BaseException:
        opened.sink.close()
        raise
    return opened


def _resume_state_of(opened: OpenLog, resume: Resume, config: EngineConfig) -> ResumeState:
    resumed = read_resume_state(opened.folder, resume)
    version = resumed.started.decision_version
    if version != DECISION_VERSION:
        raise LogError(
            f"the log in {opened.folder} was written under decision rules {version}, but this build has "
            f"rules {DECISION_VERSION}; finish it with mmengine {resumed.started.engine_version}, or choose "
            "another folder"
        )
    opened.sink.expect(resumed.undelivered.undelivered.copy())
    resumed.tell(opened.sink.recovery.cuts if opened.sink.recovery is not None else [])
    resumed.config_for(config)
    return resumed


def _a_sixteenth(kept_bytes: int, most: int) -> int:
    """Return a sixteenth of `kept_bytes`, at least 1 MiB and at most `most`. If `kept_bytes` is 0 (no limit),
    return `most`.
    """
    return min(most, max(MIN_PART_BYTES, kept_bytes // 16)) if kept_bytes else most


def _short(fingerprint: str | None) -> str:
    return "nothing" if fingerprint is None else fingerprint[:_SHOWN]
