"""Bodies are read beside the event loop where that may take a millisecond."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

SMALL_BODY = 2**13  # bytes; what is larger may take a millisecond to read, and is read on a thread
LARGE_BODY = 2**20  # what is larger waits behind others of its kind alone
_T = TypeVar("_T")


class Parsers:
    """One thread for each of two sizes: several would wait for one another, and the event loop for all of
    them."""

    def __init__(self) -> None:
        self._one = ThreadPoolExecutor(1, "mmengine-parse")
        self._large = ThreadPoolExecutor(1, "mmengine-parse-large")

    async def run(self, num_bytes: int, work: Callable[[], _T]) -> _T:
        """What takes as long as a body of so many bytes is large. Raises what `work` does."""
        if num_bytes <= SMALL_BODY:
            return work()
        parser = self._large if num_bytes > LARGE_BODY else self._one
        return await asyncio.get_running_loop().run_in_executor(parser, work)
