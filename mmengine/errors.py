"""All errors that mmengine raises on purpose, with their codes, paths and exit codes.

    MMEngineError
    ├── ConfigError          settings that are out of range or contradict each other
    ├── ModelError           a model folder that is missing, damaged, or of an unknown kind
    ├── InvalidRequest       rejected before it is queued
    │   ├── InvalidMedia     an image or a video that cannot be used
    │   ├── SessionBusy      a request of the session is running; try again later
    │   └── QueueFull        too many requests wait already; try again later
    ├── RequestFailed        accepted, then ended with finish_reason "error"
    ├── ExecutorFailed       the device side of a step raised an error
    │   └── ExecutorLost     … and no step can run in this process any more
    ├── KeepFailed           answers, files or batches that a server stores cannot be written or read
    └── LogError
        ├── CorruptLog       bytes that are not a log, or a log damaged before its tail
        └── Diverged         a replayed decision differs from the logged decision

An error has a code for programs, the path to the invalid field, and a text for people. The code determines
the HTTP status, the exit code, and the error formats of the APIs.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import TypeVar

_E = TypeVar("_E", bound="MMEngineError")


class ErrorCode(StrEnum):
    """An error's kind, for programs. Logs and wire messages contain these values, so a value must never
    change.
    """

    # Invalid requests.
    INVALID_VALUE = "invalid_value"
    INVALID_TYPE = "invalid_type"
    INVALID_JSON = "invalid_json"
    MISSING_FIELD = "missing_field"
    UNKNOWN_FIELD = "unknown_field"
    UNSUPPORTED_FIELD = "unsupported_field"
    UNSUPPORTED_CONTENT = "unsupported_content"
    INVALID_GRAMMAR = "invalid_grammar"
    INVALID_STRUCTURED_OUTPUTS = "invalid_structured_outputs"
    INVALID_ADAPTER = "invalid_adapter"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    FILES_FULL = "files_full"
    # Invalid media in a request.
    INVALID_MEDIA = "invalid_media"
    MEDIA_NOT_FETCHED = "media_not_fetched"
    MEDIA_NOT_STORED = "media_not_stored"
    URL_NOT_FETCHED = "url_not_fetched"
    URL_NOT_ALLOWED = "url_not_allowed"
    # Invalid HTTP calls, and calls that the caller may not make.
    INVALID_API_KEY = "invalid_api_key"
    NO_LORA_ROOT = "no_lora_root"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    BODY_TIMEOUT = "body_timeout"
    BODY_COMPRESSED = "body_compressed"
    HEAD_TOO_LARGE = "head_too_large"
    REQUEST_TOO_LARGE = "request_too_large"
    FILE_TOO_LARGE = "file_too_large"
    LOG_TOO_LARGE = "log_too_large"
    CLIENT_LEFT = "client_left"
    # Requests for objects that do not exist, are in use, or are busy.
    NOT_FOUND = "not_found"
    UNKNOWN_URL = "unknown_url"
    MODEL_NOT_FOUND = "model_not_found"
    FILE_NOT_FOUND = "file_not_found"
    BATCH_NOT_FOUND = "batch_not_found"
    SESSION_NOT_FOUND = "session_not_found"
    PREVIOUS_RESPONSE_NOT_FOUND = "previous_response_not_found"
    PREVIOUS_RESPONSE_NOT_FINISHED = "previous_response_not_finished"
    NO_LOG = "no_log"
    NO_SESSIONS = "no_sessions"
    REQUEST_ID_IN_USE = "request_id_in_use"
    KEY_IN_USE = "key_in_use"
    KEY_REUSED = "key_reused"
    FILE_IN_USE = "file_in_use"
    SESSION_BUSY = "session_busy"
    SESSION_INDEX = "session_index"
    BATCH_NOT_CANCELLABLE = "batch_not_cancellable"
    # Temporary overload.
    QUEUE_FULL = "queue_full"
    KEY_SHARE_FULL = "key_share_full"
    BODIES_FULL = "bodies_full"
    UPLOADS_FULL = "uploads_full"
    LIVE_PAGES_FULL = "live_pages_full"
    # Accepted requests that failed.
    REQUEST_FAILED = "request_failed"
    CANCELLED = "cancelled"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    # Faults in settings, models, the engine or storage.
    INVALID_SETTING = "invalid_setting"
    INVALID_MODEL = "invalid_model"
    MODEL_NOT_FETCHED = "model_not_fetched"
    ENGINE_FAILED = "engine_failed"
    EXECUTOR_FAILED = "executor_failed"
    STORAGE_FAILED = "storage_failed"
    NOT_READY = "not_ready"
    SHUTTING_DOWN = "shutting_down"
    INVALID_LOG = "invalid_log"
    CORRUPT_LOG = "corrupt_log"
    DIVERGED = "diverged"
    INTERNAL_ERROR = "internal_error"


class FieldPath(tuple[str | int, ...]):
    """The path to a value in a request: keys and indices, outermost first. `path / key` appends a key.

    As text, a path has the notation of API errors, such as `messages[0].content[1]`. An unknown index is ""
    in the path and `[]` in the text.
    """

    __slots__ = ()

    def __new__(cls, *keys: str | int) -> "FieldPath":
        return super().__new__(cls, keys)

    def __getnewargs__(self) -> tuple[str | int, ...]:
        return tuple(self)

    def __truediv__(self, key: str | int) -> "FieldPath":
        return FieldPath(*self, key)

    def __str__(self) -> str:
        text = ""
        for key in self:
            text += f"[{key}]" if key == "" or isinstance(key, int) else f".{key}" if text else key
        return text


HERE = FieldPath()
# Placeholder for the field's name in an error's text. Each API fills in its own name for the field.
FIELD = "\N{SUBSTITUTE}"


class MMEngineError(Exception):
    """Base class for all errors that mmengine raises on purpose.

    `code`: the kind of error, for programs; each class has a default. `path`: the invalid field, or empty.
    `text`: the problem, the rule, and the remedy, for people. FIELD in the text stands for the field's name.
    """

    code = ErrorCode.ENGINE_FAILED

    def __init__(self, text: str, *, code: ErrorCode | None = None, path: Iterable[str | int] = ()):
        super().__init__(text)
        self.text, self.path = text, FieldPath(*path)
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        """Return the text with the field's name. In a batch, the prompt's or line's number comes first."""
        unit, path = "", self.path
        if path and path[0] in _UNITS:
            unit, path = f"{_UNITS[path[0]]} {path[1]}: ", FieldPath(*path[2:])
        return unit + self.text.replace(FIELD, in_words(path))

    def located(self: _E, path: Iterable[str | int]) -> _E:
        """Set the path if the error has none, and return the error."""
        self.path = self.path or FieldPath(*path)
        return self

    def within(self: _E, *keys: str | int) -> _E:
        """Put `keys` in front of the path, and return the error."""
        self.path = FieldPath(*keys, *self.path)
        return self


# A batch error's path begins with PROMPTS or LINES. The second key is the prompt's index, or the 1-based line
# number.
PROMPTS, LINES = "prompts", "lines"
_UNITS: dict[str | int, str] = {PROMPTS: "prompt", LINES: "line"}


def in_words(path: FieldPath) -> str:
    """Return a path in words, for a sentence: `message 0, part 1` for messages[0].content[1]."""
    match path:
        case ():
            return "the request"
        case ("messages", int(number), "content", int(part)):
            return f"message {number}, part {part}"
        case ("messages", int(number)):
            return f"message {number}"
    return str(path)


class ConfigError(MMEngineError, ValueError):
    """Settings that are out of range or contradict each other."""

    code = ErrorCode.INVALID_SETTING


class ModelError(MMEngineError):
    """A model folder that is missing, damaged, or of an unknown kind."""

    code = ErrorCode.INVALID_MODEL


class InvalidRequest(MMEngineError, ValueError):
    """A request that is rejected before it is queued."""

    code = ErrorCode.INVALID_VALUE


class InvalidMedia(InvalidRequest):
    """An image or a video that cannot be used."""

    code = ErrorCode.INVALID_MEDIA


class SessionBusy(InvalidRequest):
    """A request of the session is running."""

    code = ErrorCode.SESSION_BUSY


class QueueFull(InvalidRequest):
    """Too many requests wait already."""

    code = ErrorCode.QUEUE_FULL


class RequestFailed(MMEngineError):
    """An accepted request that ended with finish_reason "error"."""

    code = ErrorCode.REQUEST_FAILED


class ExecutorFailed(MMEngineError):
    """The device side of a step raised an error. Servers hide the text from clients, because a library's
    message may contain addresses and paths.
    """

    code = ErrorCode.EXECUTOR_FAILED


class ExecutorLost(ExecutorFailed):
    """The device side of a step raised an error, and this process cannot run any further step."""


class KeepFailed(MMEngineError):
    """Answers, files or batches that a server stores cannot be written or read."""

    code = ErrorCode.STORAGE_FAILED


class LogError(MMEngineError):
    """A log that cannot be written, or cannot be used by the command that reads the log."""

    code = ErrorCode.INVALID_LOG


class CorruptLog(LogError):
    """Bytes that are not a log, or a log damaged before its tail.

    `kind`: checksum, length, oversize, truncated, version, gap, link, end or unclosed. `log fsck` has an
    exit code for each kind.
    """

    code = ErrorCode.CORRUPT_LOG

    def __init__(self, text: str, kind: str = "checksum"):
        super().__init__(text)
        self.kind = kind


class Diverged(LogError):
    """A replayed decision differs from the logged decision."""

    code = ErrorCode.DIVERGED


BUG = 70  # Exit code after an unexpected exception (EX_SOFTWARE in sysexits.h).
# Exit codes for incomplete logs, by CorruptLog.kind.
NO_END = {"end": 13, "unclosed": 14, "truncated": 6}
# Exit codes by error code. All other errors have exit code 1 (docs/reference/cli.md).
EXIT_CODES = {
    ErrorCode.INVALID_SETTING: 2,
    ErrorCode.INVALID_MODEL: 2,
    ErrorCode.ENGINE_FAILED: 5,
    ErrorCode.EXECUTOR_FAILED: 5,
    ErrorCode.INTERNAL_ERROR: BUG,
    ErrorCode.DIVERGED: 3,
    ErrorCode.CORRUPT_LOG: 4,
}


def id_in_use(name: str) -> InvalidRequest:
    """Return the error for a request whose id belongs to another unfinished request."""
    text = f"the request id {name!r} is in use; choose another"
    return InvalidRequest(text, code=ErrorCode.REQUEST_ID_IN_USE, path=FieldPath("request_id"))


def in_one_line(error: BaseException, most: int = 300) -> str:
    """Return the error's class and its text's first line, cut to `most` characters."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:most]}"


def shown(value: object) -> str:
    """Return the repr of a caller's value for a message, cut to 80 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers with thousands of digits.
        return "a huge number"
    return text if len(text) <= 80 else f"{text[:77]}..."


def code_of(error: MMEngineError) -> int:
    """Return the exit code for a command that failed with `error`."""
    if isinstance(error, CorruptLog) and error.kind in ("end", "unclosed"):
        return NO_END[error.kind]
    if isinstance(error, InvalidRequest):
        return 2
    return EXIT_CODES.get(error.code, 1)
