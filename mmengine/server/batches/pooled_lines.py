"""Runs batch lines for embeddings and scores.

The log contains no embeddings or scores, so after a restart, the lines that the output files lack are
computed again.
"""

import asyncio
from concurrent.futures import Executor
from dataclasses import replace
from typing import NamedTuple

from mmengine.errors import MMEngineError
from mmengine.request import PREFILL
from mmengine.serve.async_engine.served_engine import ServedEngine
from mmengine.serve.prompt.options import Options
from mmengine.server.http.admission import Admission
from mmengine.server.pooling.reader import PooledReader, PooledRequest

POOLED_ENDPOINTS = ("/v1/embeddings", "/v1/rerank", "/v1/score")


class PooledLines(NamedTuple):
    """Parses and computes lines. Smaller priority values are scheduled first. A line with a value below
    `priority` gets the value `priority`.
    """

    engine: ServedEngine
    reader: PooledReader
    admission: Admission
    priority: int

    async def read(
        self, endpoint: str, body: bytes, name: str, owner: str, parser: Executor
    ) -> PooledRequest:
        """Parse a line's body in the executor `parser`. Raises ApiError."""
        options = Options(
            sampling=PREFILL,
            cache_salt=self.admission.salt_of(owner),
            tenant=self.admission.tenant_of(owner),
        )
        by_endpoint = self.reader.embeddings, self.reader.rerank, self.reader.score
        read = by_endpoint[POOLED_ENDPOINTS.index(endpoint)]
        call = await asyncio.get_running_loop().run_in_executor(parser, read, body, name, options)
        jobs = [
            (prompt, replace(each, priority=max(each.priority, self.priority))) for prompt, each in call.jobs
        ]
        return replace(call, jobs=jobs)

    async def answer(self, call: PooledRequest, parser: Executor) -> bytes:
        """Compute a line, and return the response's body. Raises ApiError."""
        try:
            answers = await self.engine.pool(call.jobs)
        except MMEngineError as error:
            raise call.api_error(error) from error
        return await asyncio.get_running_loop().run_in_executor(parser, call.render, answers)
