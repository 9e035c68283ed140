"""Turns calls for embeddings and scores into jobs, and the jobs' answers into results.

A job is a prompt with its options.

Both `Engine` and `AsyncEngine` run these jobs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

import numpy as np

from mmengine.errors import FieldPath, InvalidRequest
from mmengine.request import PREFILL, Pooling
from mmengine.serve.pooling.pooled_model import PooledModel
from mmengine.serve.pooling.prompts import Inputs, PoolInput, embed_prompt, rerank_prompt
from mmengine.serve.pooling.vectors import check_dimensions, cosine, embedding, log_odds, probability
from mmengine.serve.prompt.options import Options
from mmengine.serve.prompt.prompt import Prompt
from mmengine.serve.text.request_output import Completion

Job = tuple[Prompt, Options]
Jobs = list[Job]
EMBED = Pooling("embed")
INPUTS = "input"  # The first key in the path of an error. The input's index follows.


class PoolOptions(TypedDict, total=False):
    """Options for an embedding or scoring call, with the same meaning as in `Engine.submit`."""

    priority: int
    cache_salt: str
    tenant: str
    adapter: str
    deadline_s: float
    envelope: bytes


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A document in a ranking.

    `index` is the document's index in the call. `score` is a reranker's relevance from 0 to 1, or an
    embedding model's cosine between query and document, from -1 to 1.
    """

    index: int
    score: float
    document: PoolInput


def pool_options(options: PoolOptions) -> Options:
    """Return the options that all jobs of a call share. Each job adds its own `pooling`."""
    return Options(sampling=PREFILL, pooling=EMBED, **options)


@dataclass(frozen=True, slots=True)
class EmbedCall:
    """A call that requests an embedding vector for each input.

    `dimensions`: the length to which vectors are truncated (None: not truncated). `normalizes`: whether
    vectors are scaled to length 1 (None: the model's setting). `keep`: the number of tokens to which texts
    are truncated. With 0, a text that is too long for the model is refused.
    """

    model: PooledModel
    width: int
    inputs: Sequence[PoolInput]
    dimensions: int | None = None
    normalizes: bool | None = None
    instruction: str | None = None
    prompt_name: str | None = None
    keep: int = 0
    media_options: dict[str, object] | None = None

    def jobs(self, options: Options, first: int = 0) -> Jobs:
        """Return a job for each input. `first`: the index of the first input in error paths. Raises
        InvalidRequest with an input's index in the error's path.
        """
        jobs = []
        for index, job in enumerate(self.each_job(options), first):
            if isinstance(job, InvalidRequest):
                raise _of_input(job, index)
            jobs.append(job)
        if not jobs:
            raise InvalidRequest("the list of inputs is empty: send at least one", path=(INPUTS,))
        return jobs

    def each_job(self, options: Options) -> Iterator[Job | InvalidRequest]:
        """Yield a job for each input.

        For an invalid input, the InvalidRequest is yielded instead. An invalid call raises InvalidRequest.
        """
        self.model.check_embeds()
        check_dimensions(self.dimensions, self.width)
        job_options = replace(options, pooling=EMBED)
        for given in self.inputs:
            try:
                prompt = embed_prompt(
                    self.model,
                    given,
                    instruction=self.instruction,
                    prompt_name=self.prompt_name,
                    keep=self.keep,
                    media_options=self.media_options,
                )
            except InvalidRequest as error:
                yield error
            else:
                yield prompt, job_options

    def vectors(self, answers: Sequence[Completion]) -> list[np.ndarray]:
        """Return each input's vector, float32 [dimensions]."""
        normalizes = self.model.normalizes if self.normalizes is None else self.normalizes
        return [embedding(_vector(answer), self.dimensions, normalizes) for answer in answers]


@dataclass(frozen=True, slots=True)
class ScoreCall:
    """A call that requests a relevance score for each (query, document) pair.

    A single query is paired with all documents. A reranker reads query and document in a single prompt. An
    embedding model embeds them separately, and the score is the cosine between the two vectors.
    """

    model: PooledModel
    width: int
    queries: Sequence[PoolInput]
    documents: Sequence[PoolInput]
    instruction: str | None = None
    keep: int = 0
    media_options: dict[str, object] | None = None

    @property
    def pairs(self) -> list[tuple[PoolInput, PoolInput]]:
        """Return all (query, document) pairs in order. Raises InvalidRequest."""
        if not self.queries or not self.documents:
            raise InvalidRequest(
                "there is no query or no document: send at least one of each", path=(INPUTS,)
            )
        if len(self.queries) not in (1, len(self.documents)):
            raise InvalidRequest(
                f"{len(self.queries)} queries and {len(self.documents)} documents make no pairs: send one "
                "query, or as many queries as documents",
                path=(INPUTS,),
            )
        queries = list(self.queries) * (len(self.documents) if len(self.queries) == 1 else 1)
        return list(zip(queries, self.documents, strict=True))

    def jobs(self, options: Options) -> Jobs:
        """Return the call's jobs. Raises InvalidRequest, for example for a chat model."""
        pairs = self.pairs
        if self.model.task == "embed":
            jobs = self._embeds(self.queries).jobs(options)
            return jobs + self._embeds(self.documents).jobs(options, len(jobs))
        self.model.check_reranks()
        job_options = replace(options, pooling=Pooling("logits", self.model.tokens))
        return [(self._rerank_prompt(index, *pair), job_options) for index, pair in enumerate(pairs)]

    def _rerank_prompt(self, index: int, query: PoolInput, document: PoolInput) -> Prompt:
        try:
            return rerank_prompt(
                self.model,
                query,
                document,
                instruction=self.instruction,
                keep=self.keep,
                media_options=self.media_options,
            )
        except InvalidRequest as error:
            raise _of_input(error, index) from None

    def _embeds(self, inputs: Sequence[PoolInput]) -> EmbedCall:
        name = "query" if inputs is self.queries and "query" in self.model.prompts else None
        return EmbedCall(
            self.model,
            self.width,
            inputs,
            instruction=self.instruction if inputs is self.queries else None,
            prompt_name=name if self.instruction is None else None,
            keep=self.keep,
            media_options=self.media_options,
        )

    def scores(self, answers: Sequence[Completion], *, raw: bool = False) -> list[float]:
        """Return each pair's score.

        With `raw`, a reranker's score is its log-odds, not the probability.
        """
        if self.model.task != "embed":
            odds = [log_odds(_vector(answer)) for answer in answers]
            return odds if raw else [probability(each) for each in odds]
        vectors = [_vector(answer) for answer in answers]
        queries, documents = vectors[: len(self.queries)], vectors[len(self.queries) :]
        queries *= len(documents) if len(queries) == 1 else 1
        return [cosine(one, other) for one, other in zip(queries, documents, strict=True)]


def inputs_of(given: Inputs) -> list[PoolInput]:
    """Return a call's inputs as a list. A text or a dict is a single input."""
    return [given] if isinstance(given, (str, Mapping)) else list(given)


def ranked(
    documents: Sequence[PoolInput], scores: Sequence[float], top_n: int | None = None
) -> list[RankedDocument]:
    """Return at most `top_n` documents, highest score first. Documents with equal scores keep their order."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    return [RankedDocument(index, scores[index], documents[index]) for index in order[:top_n]]


def _of_input(error: InvalidRequest, index: int) -> InvalidRequest:
    """Return an error with the input's index in its path, if the error concerns an input."""
    if error.path[:1] == (INPUTS,):
        error.path = FieldPath(INPUTS, index)
    return error


def _vector(answer: Completion) -> np.ndarray:
    assert answer.vector is not None, "a pooled request that ends without an error has its vector"
    return answer.vector
