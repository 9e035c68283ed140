"""What a rank that follows is told before the first record of the log."""

import msgspec

from mmengine.errors import MMEngineError, in_one_line


class Job(msgspec.Struct, frozen=True):
    """`store`: the file at which the ranks meet. `timeout_s`: after which a rank that does not come to an
    exchange counts as gone. `num_threads`: the setting."""

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


def sentence(error: BaseException) -> str:
    """An error of one rank for the others, in one line."""
    return str(error).partition("\n")[0] if isinstance(error, MMEngineError) else in_one_line(error)
