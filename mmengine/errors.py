"""Every error that mmengine raises on purpose.

    MMEngineError
    ├── ConfigError          settings that are out of range or contradict each other
    ├── ModelError           a model folder that is missing, damaged, or of an unknown kind
    ├── InvalidRequest       refused at the door: it never became work
    │   ├── InvalidMedia     an image or a video that cannot be used
    │   ├── SessionBusy      a request of the session is on its way; try again later
    │   └── QueueFull        too many requests wait already; try again later
    ├── RequestFailed        accepted, then ended with finish_reason "error"
    ├── ExecutorFailed       the device side of a step raised
    │   └── ExecutorLost     … and no step can run in this process any more
    ├── KeepFailed           answers, files or batches that a server keeps cannot be written or read
    └── LogError
        ├── CorruptLog       bytes that are no log, or a log damaged before its tail
        └── Diverged         a decision derived again differs from the logged one

A message is one sentence or two: what is wrong, where, and what to do.
"""


class MMEngineError(Exception):
    """Base of all errors raised on purpose; its text is meant for the user."""


class ConfigError(MMEngineError, ValueError):
    pass


class ModelError(MMEngineError):
    pass


class InvalidRequest(MMEngineError, ValueError):
    pass


class InvalidMedia(InvalidRequest):
    pass


class SessionBusy(InvalidRequest):
    pass


class QueueFull(InvalidRequest):
    pass


class RequestFailed(MMEngineError):
    pass


class ExecutorFailed(MMEngineError):
    pass


class ExecutorLost(ExecutorFailed):
    pass


class KeepFailed(MMEngineError):
    pass


class LogError(MMEngineError):
    pass


class CorruptLog(LogError):
    """`kind`: checksum, length, oversize, truncated, version, gap, link, end or
    unclosed; `log fsck` has an exit code
    for each."""

    def __init__(self, text: str, kind: str = "checksum"):
        super().__init__(text)
        self.kind = kind


# Exit codes for a log without its end, whichever verb looks at it.
NO_END = {"end": 13, "unclosed": 14, "truncated": 6}


class Diverged(LogError):
    pass


def in_one_line(error: BaseException, most: int = 300) -> str:
    """What kind of error it is, and at most `most` characters of its first line: libraries append pages."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:most]}"


def shown(value: object) -> str:
    """A stranger's value in a message: short, whatever it is."""
    try:
        text = repr(value)
    except ValueError:  # Python prints no integer of thousands of digits
        return "a huge number"
    return text if len(text) <= 80 else f"{text[:77]}..."


def code_of(error: MMEngineError) -> int:
    """The exit code of a command that an error ends."""
    match error:
        case InvalidRequest() | ConfigError():
            return 2
        case Diverged():
            return 3
        case CorruptLog(kind="end" | "unclosed" as kind):
            return NO_END[kind]
        case CorruptLog():
            return 4
    return 1
