"""Engine's methods for embeddings, scores and reranking."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Unpack

import numpy as np

from mmengine.errors import MMEngineError
from mmengine.serve.batch.run_batch import Job, Result
from mmengine.serve.pooling.calls import (
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
from mmengine.serve.text.request_output import Completion, answer_to_prompt

if TYPE_CHECKING:  # importing mmengine.build imports torch
    from mmengine.build import Built


class PooledAnswers(ABC):
    """Adds `embed`, `score` and `rerank` to Engine.

    Each method steps the engine until all results are complete.
    """

    pooled: PooledModel
    built: "Built"

    @abstractmethod
    def run_batch(self, jobs: Iterable[Job | MMEngineError]) -> Iterator[Result]: ...

    def embed(
        self,
        inputs: Inputs,
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        instruction: str | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        media_options: dict[str, object] | None = None,
        **options: Unpack[PoolOptions],
    ) -> np.ndarray:
        """Return each input's embedding vector, float32 [n, dimensions].

        An input is a text, token ids, messages, or a dict with `text`, `image` and `video`. `inputs` may be a
        single string. Vectors are cut after `dimensions` values (default: not cut). `normalize` scales
        vectors to length 1 (default: the model's setting). `instruction` describes the task of the vectors.
        `prompt_name` selects an instruction from the model's own list instead. Texts are cut to
        `truncate_prompt_tokens` tokens. Raises InvalidRequest, for example for a reranker.
        """
        call = EmbedCall(
            self.pooled,
            self.built.spec.hidden_size,
            inputs_of(inputs),
            dimensions,
            normalize,
            instruction,
            prompt_name,
            truncate_prompt_tokens or 0,
            media_options,
        )
        return np.stack(call.vectors(self._pooled(call.jobs(pool_options(options)))))

    def embed_each(
        self,
        inputs: Sequence[PoolInput],
        *,
        dimensions: int | None = None,
        instruction: str | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        media_options: dict[str, object] | None = None,
    ) -> Iterator[tuple[int, np.ndarray | MMEngineError]]:
        """Yield (index, vector) for each input in order of completion. For an input that fails, yields
        (index, error). For the arguments, see `embed`. Raises InvalidRequest for a reranker.
        """
        call = EmbedCall(
            self.pooled,
            self.built.spec.hidden_size,
            inputs,
            dimensions,
            instruction=instruction,
            prompt_name=prompt_name,
            keep=truncate_prompt_tokens or 0,
            media_options=media_options,
        )
        for index, answer in self.run_batch(call.each_job(pool_options({}))):
            error = answer if isinstance(answer, MMEngineError) else answer.error()
            if error is not None:
                yield index, error
            else:
                assert isinstance(answer, Completion)
                yield index, call.vectors([answer])[0]

    def score(
        self,
        queries: Inputs,
        documents: Inputs,
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        raw: bool = False,
        **options: Unpack[PoolOptions],
    ) -> list[float]:
        """Return the relevance score for each (query, document) pair.

        A single query is paired with all documents. A reranker's score is the probability of "yes" rather
        than "no", or the log-odds with `raw`. An embedding model's score is the cosine between the two
        vectors. Raises InvalidRequest, for example for a chat model.
        """
        asked, found = inputs_of(queries), inputs_of(documents)
        call = ScoreCall(
            self.pooled,
            self.built.spec.hidden_size,
            asked,
            found,
            instruction=instruction,
            keep=truncate_prompt_tokens or 0,
        )
        return call.scores(self._pooled(call.jobs(pool_options(options))), raw=raw)

    def rerank(
        self,
        query: PoolInput,
        documents: Sequence[PoolInput],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        **options: Unpack[PoolOptions],
    ) -> list[RankedDocument]:
        """Return at most `top_n` documents, most relevant first. Raises the same errors as `score`."""
        scores = self.score(
            [query],
            documents,
            instruction=instruction,
            truncate_prompt_tokens=truncate_prompt_tokens,
            **options,
        )
        return ranked(documents, scores, top_n)

    def _pooled(self, jobs: Jobs) -> list[Completion]:
        answers = dict(self.run_batch(jobs))
        return [answer_to_prompt(answers[index], index, len(jobs) > 1) for index in range(len(jobs))]
