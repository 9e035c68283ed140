"""The first message to a following rank, before the log's first record."""

import msgspec

from mmengine.errors import MMEngineError, in_one_line


class Job(msgspec.Struct, frozen=True):
    """A following rank's job.

    `store`: the file through which the ranks connect. `timeout_s`: time after which a rank that misses an
    exchange counts as gone. `num_threads`: the setting.
    """

    rank: int
    size: int
    folder: str
    device: str
    dtype: str
    attention: str
    store: str
    timeout_s: float
    num_threads: int


encode = msgspec.msgpack.Encoder().encode
decode_job = msgspec.msgpack.Decoder(Job).decode


def error_sentence(error: BaseException) -> str:
    """Return a rank's error as a single line for the other ranks."""
    return str(error).partition("\n")[0] if isinstance(error, MMEngineError) else in_one_line(error)
