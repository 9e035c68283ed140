"""Runs a live page's queries about the log. Each query runs in a separate process, and only one query runs at
a time.

`python -m mmengine.server.live.queries FOLDER why|trace|drafts REQUEST` writes the result to stdout.
"""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from mmengine.errors import ErrorCode, FieldPath, LogError, MMEngineError
from mmengine.events import vocabulary as ev
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.convert.perfetto import perfetto_lines
from mmengine.replay.queries.why import why
from mmengine.replay.timeline import fold, taken_tokens
from mmengine.server.http.errors import ApiError

MAX_ANSWER_BYTES = 256 * 2**20  # Maximum size of a result.
MAX_ASKED_S = 60.0  # Maximum seconds for a query.
NICENESS = 5  # The engine has priority.
_PIECE = 2**16
QUESTIONS = ("why", "trace", "drafts")


class LogQueries:
    """Runs queries about a log. Belongs to the event loop that creates it."""

    def __init__(self, folder: Path):
        self._folder, self._turn = folder, asyncio.Lock()

    async def answer(self, question: str, request_id: str) -> bytes:
        """Return a query's result as JSON. Raises ApiError."""
        async with self._turn:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "mmengine.server.live.queries", str(self._folder), question, request_id),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            try:
                async with asyncio.timeout(MAX_ASKED_S):
                    assert process.stdout is not None and process.stderr is not None
                    answer = await _all_of(process.stdout, MAX_ANSWER_BYTES)
                    wrong = await process.stderr.read(_PIECE)
                    code = await process.wait() if len(answer) <= MAX_ANSWER_BYTES else -1
            except TimeoutError:
                code, wrong = -1, b""
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        if code < 0:
            text = "the log is too large for the live page; use mmengine log why or mmengine log export"
            raise ApiError(ErrorCode.LOG_TOO_LARGE, text)
        if code:
            raise ApiError(ErrorCode.NOT_FOUND, wrong.decode(errors="replace").strip(), FieldPath("request"))
        return answer


async def _all_of(reader: asyncio.StreamReader, most: int) -> bytes:
    """Read to the stream's end, or until more than `most` bytes have been read."""
    pieces, count = list[bytes](), 0
    while count <= most and (piece := await reader.read(_PIECE)):
        pieces.append(piece)
        count += len(piece)
    return b"".join(pieces)


def drafts(folder: Path, request_id: str) -> list[int]:
    """Return a number for each output token: 1 for an accepted draft token, 0 for any other token. Raises
    LogError.
    """
    log = CheckedLog(folder)
    found: list[int] | None = None
    for state, record in fold(log):
        match record.event:
            case ev.Queued(request_id=name) if name == request_id:
                found = []
            case ev.Executed() if found is not None and request_id in state.requests:
                row = state.requests[request_id].row
                gained = dict(taken_tokens(state, record.event)).get(row) if row >= 0 else None
                if gained is not None and len(gained):
                    found += [1] * (len(gained) - 1) + [0]
    if found is None:
        raise LogError(f"{folder} has no request {request_id!r:.80}")
    return found


def lines_of(folder: Path, question: str, request_id: str) -> Iterator[str]:
    match question:
        case "why":
            yield msgspec.json.encode(why(folder, request_id)).decode()
        case "drafts":
            yield json.dumps(drafts(folder, request_id))
        case _:
            yield from perfetto_lines(folder)


def main() -> None:
    os.nice(NICENESS)
    folder, question, request_id = sys.argv[1:]
    try:
        for line in lines_of(Path(folder), question, request_id):
            sys.stdout.write(line + "\n")
    except MMEngineError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
