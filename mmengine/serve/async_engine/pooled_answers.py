"""AsyncEngine's methods for embeddings, scores and reranking."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Unpack

import numpy as np

from mmengine.errors import MMEngineError
from mmengine.serve.pooling.calls import (
    INPUTS,
    EmbedCall,
    Jobs,
    PoolOptions,
    RankedDocument,
    ScoreCall,
    inputs_of,
    pool_options,
    ranked,
)
from mmengine.serve.pooling.pooled_model import PooledModel
from mmengine.serve.pooling.prompts import Inputs, PoolInput
from mmengine.serve.prompt.options import Options
from mmengine.serve.prompt.prompt import Prompt
from mmengine.serve.stream.request_stream import Stream
from mmengine.serve.text.request_output import Completion, require_success

OPEN_AT_ONCE = 128  # maximum number of open requests for a single call


class AsyncPooledAnswers(ABC):
    """Adds `embed`, `score` and `rerank` to AsyncEngine. `Engine` documents the arguments and errors."""

    @property
    @abstractmethod
    def pooled(self) -> PooledModel: ...

    @property
    @abstractmethod
    def width(self) -> int: ...

    @property
    @abstractmethod
    def max_open(self) -> int: ...

    @abstractmethod
    def stream_job(self, prompt: Prompt, options: Options) -> Stream: ...

    async def embed(
        self,
        inputs: Inputs,
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        instruction: str | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        **options: Unpack[PoolOptions],
    ) -> np.ndarray:
        """Return each input's embedding vector, float32 [n, dimensions]."""
        call = EmbedCall(
            self.pooled,
            self.width,
            inputs_of(inputs),
            dimensions,
            normalize,
            instruction,
            prompt_name,
            truncate_prompt_tokens or 0,
        )
        return np.stack(call.vectors(await self.pool(call.jobs(pool_options(options)))))

    async def score(
        self,
        queries: Inputs,
        documents: Inputs,
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        raw: bool = False,
        **options: Unpack[PoolOptions],
    ) -> list[float]:
        """Return the relevance score for each (query, document) pair."""
        asked, found = inputs_of(queries), inputs_of(documents)
        keep = truncate_prompt_tokens or 0
        call = ScoreCall(self.pooled, self.width, asked, found, instruction=instruction, keep=keep)
        return call.scores(await self.pool(call.jobs(pool_options(options))), raw=raw)

    async def rerank(
        self,
        query: PoolInput,
        documents: Sequence[PoolInput],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        **options: Unpack[PoolOptions],
    ) -> list[RankedDocument]:
        """Return at most `top_n` documents, most relevant to the query first."""
        scores = await self.score([query], documents, instruction=instruction, **options)
        return ranked(documents, scores, top_n)

    async def pool(self, jobs: Jobs) -> list[Completion]:
        """Return the answers to all jobs, in job order. At most OPEN_AT_ONCE jobs run concurrently.

        The first error cancels all remaining jobs, and is raised with the input's index.
        """
        room = asyncio.Semaphore(max(1, min(OPEN_AT_ONCE, self.max_open)))

        async def answer(index: int, prompt: Prompt, options: Options) -> Completion:
            async with room:
                try:
                    async with self.stream_job(prompt, options) as stream:
                        return require_success(await stream.completed())
                except MMEngineError as error:
                    raise (error.within(INPUTS, index) if len(jobs) > 1 else error) from None

        tasks = [asyncio.create_task(answer(index, *job)) for index, job in enumerate(jobs)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
