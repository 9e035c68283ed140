"""The first message from rank 0 to another rank: the model to load, and how to connect."""

import msgspec

from mmengine.errors import MMEngineError, in_one_line


class Job(msgspec.Struct, frozen=True):
    """Tells each rank except rank 0 which model to load, and how to connect to the other ranks.

    `store`: the file through which the ranks connect. `timeout_s`: if an exchange waits longer than this for
    a rank, the rank counts as gone. `num_threads`: the setting num_threads.
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
    """Return an error as a single line, for a message to rank 0."""
    return str(error).partition("\n")[0] if isinstance(error, MMEngineError) else in_one_line(error)
