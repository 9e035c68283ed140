"""Parses the bodies for embeddings, pooled states, rankings and scores into jobs for the engine, and renders
the results as response bodies.
"""

import base64
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import msgspec
import numpy as np

from mmengine.errors import FIELD, ErrorCode, FieldPath, InvalidRequest
from mmengine.serve.async_engine.served_engine import ServedEngine
from mmengine.serve.pooling.calls import EmbedCall, Jobs, ScoreCall, pool_options, ranked
from mmengine.serve.pooling.prompts import PoolInput, embed_prompt
from mmengine.serve.prompt.options import Options
from mmengine.serve.prompt.prompt import Prompt
from mmengine.serve.text.request_output import Completion
from mmengine.server.chat.bodies import ChatBody
from mmengine.server.chat.chat_reader import ChatReader
from mmengine.server.http.body_fields import Fields, fields_of
from mmengine.server.http.errors import ApiError, api_error, decode_body
from mmengine.server.http.model_names import ModelNames
from mmengine.server.pooling.bodies import EmbeddingBody, PooledBody, PoolingBody, RerankBody, ScoreBody
from mmengine.server.pooling.pooled_request import CONVERSATION, Places, PooledRequest, listed
from mmengine.server.pooling.schemas import (
    EmbeddingItem,
    Embeddings,
    EmbeddingUsage,
    PooledItem,
    PooledList,
    RankedItem,
    Ranking,
    ScoreItem,
    Scores,
)
from mmengine.server.settings import ServerSettings

# Marks pooling requests in the log. A process that resumes the log cancels them, because clients cannot
# reattach to them.
ENVELOPE = b'{"pooled":true}'
_B = TypeVar("_B", bound=PooledBody)
_E = TypeVar("_E", bound=EmbeddingBody)
_Given = str | list[str | dict[str, object]] | dict[str, object] | None


class PooledBodyType(Generic[_B]):
    """A body's struct, with its decoder and its field table."""

    def __init__(self, kind: type[_B]):
        self.fields = Fields(fields_of(kind))
        self._decoder = msgspec.json.Decoder(kind)

    def read(self, data: bytes, *, ignore_unknown: bool) -> tuple[_B, list[str]]:
        """Return the decoded body, and the ignored fields' names. Raises ApiError."""
        ignored = self.fields.check(data, ignore_unknown=ignore_unknown)
        return decode_body(data, self._decoder.decode), ignored


EMBEDDING, POOLING = PooledBodyType(EmbeddingBody), PooledBodyType(PoolingBody)
RERANK, SCORE = PooledBodyType(RerankBody), PooledBodyType(ScoreBody)


class PooledReader:
    """Parses pooling calls. `chat`: parses conversations, with the server's limits on media."""

    def __init__(self, engine: ServedEngine, names: ModelNames, chat: ChatReader, settings: ServerSettings):
        self._model, self._width, self._names, self._chat = engine.pooled, engine.width, names, chat
        self._max_inputs, self._max_tokens = settings.max_inputs, engine.config.max_model_len - 1
        self._ignore_unknown = settings.unknown_fields == "ignore"

    def embeddings(self, data: bytes, name: str, options: Options) -> PooledRequest:
        """Parse a /v1/embeddings body. Thread-safe. Raises ApiError."""
        return self._embeddings(EMBEDDING, data, name, options)

    def pooling(self, data: bytes, name: str, options: Options) -> PooledRequest:
        """Parse a /pooling body. Thread-safe. Raises ApiError."""
        return self._embeddings(POOLING, data, name, options)

    def _embeddings(
        self, kind: PooledBodyType[_E], data: bytes, name: str, options: Options
    ) -> PooledRequest:
        body, ignored = kind.read(data, ignore_unknown=self._ignore_unknown)
        model, options = self._options(body, options)
        inputs, places = self._inputs(body), Places(listed("input", body.input))
        if body.messages is not None:
            places = Places([CONVERSATION], len(list(inputs[0])) - len(body.messages))
        call = EmbedCall(
            self._model,
            self._width,
            inputs,
            body.dimensions,
            body.normalize,
            body.instruction,
            body.prompt_name,
            self._keep(body),
            body.mm_processor_kwargs,
        )
        jobs = self._jobs(call.jobs, options, kind, places)
        if body.messages is not None and not body.add_generation_prompt:
            jobs = [(replace(prompt, add_generation_prompt=False), each) for prompt, each in jobs]
        encode = _base64 if body.encoding_format == "base64" else _numbers

        def render(answers: Sequence[Completion]) -> bytes:
            values = [encode(vector) for vector in call.vectors(answers)]
            created, usage = int(time.time()), _usage(answers)
            if kind is POOLING:
                pooled = [PooledItem(index, value) for index, value in enumerate(values)]
                return msgspec.json.encode(PooledList(f"pool-{name}", created, model, pooled, usage))
            items = [EmbeddingItem(index, value) for index, value in enumerate(values)]
            return msgspec.json.encode(Embeddings(f"embd-{name}", created, model, items, usage))

        return PooledRequest(jobs, render, places, kind.fields.names, ignored)

    def _inputs(self, body: EmbeddingBody) -> list[PoolInput]:
        if (body.input is None) == (body.messages is None):
            raise ApiError(ErrorCode.INVALID_VALUE, "set either input or messages", FieldPath("input"))
        if body.messages is not None:
            return [self._conversation(body)]
        given = body.input
        if isinstance(given, (str, dict)):
            return [given]
        assert given is not None
        numbers = [each for each in given if isinstance(each, int)]
        if numbers and len(numbers) == len(given):
            return [numbers]
        if numbers:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"{FIELD} mixes token ids with texts; send only token ids or only texts",
                FieldPath("input"),
            )
        self._check_count("input", len(given))
        return [each for each in given if not isinstance(each, int)]

    def _conversation(self, body: EmbeddingBody) -> list[dict[str, object]]:
        """Return the body's messages. If the model embeds images and the client sent no system message, add
        the model's system message.
        """
        messages: list[dict[str, object]] = list(body.messages or ())
        if not self._model.has_media or any(each.get("role") == "system" for each in messages):
            return messages
        empty = embed_prompt(
            self._model, "", instruction=body.instruction, prompt_name=body.prompt_name
        ).messages
        return [*(empty or ())[:1], *messages]

    def rerank(self, data: bytes, name: str, options: Options) -> PooledRequest:
        """Parse a /v1/rerank body. Thread-safe. Raises ApiError."""
        body, ignored = RERANK.read(data, ignore_unknown=self._ignore_unknown)
        model, options = self._options(body, options)
        self._check_count("documents", len(body.documents))
        for field, limit in (("top_n", body.top_n), ("max_tokens_per_doc", body.max_tokens_per_doc)):
            if limit is not None and limit < 1:
                text = f"{FIELD} must be 1 or more, not {limit}"
                raise ApiError(ErrorCode.INVALID_VALUE, text, field)
        call = self._scores([body.query], body.documents, body, body.max_tokens_per_doc)
        places = self._pairs([FieldPath("query")], listed("documents", body.documents))
        if body.truncate_prompt_tokens is None:
            places = places._replace(limit="max_tokens_per_doc")
        jobs, shows = self._jobs(call.jobs, options, RERANK, places), body.return_documents is not False

        def render(answers: Sequence[Completion]) -> bytes:
            results = [
                RankedItem(one.index, one.score, _shown(body.documents[one.index]) if shows else None)
                for one in ranked(body.documents, call.scores(answers), body.top_n)
            ]
            return msgspec.json.encode(Ranking(f"rerank-{name}", model, results, _usage(answers)))

        return PooledRequest(jobs, render, places, RERANK.fields.names, ignored)

    def score(self, data: bytes, name: str, options: Options) -> PooledRequest:
        """Parse a /score body. Thread-safe. Raises ApiError."""
        body, ignored = SCORE.read(data, ignore_unknown=self._ignore_unknown)
        model, options = self._options(body, options)
        first, given = _either("queries", body.queries, "text_1", body.text_1)
        second, others = _either("documents", body.documents, "text_2", body.text_2)
        queries, documents = _several(given), _several(others)
        self._check_count(first, len(queries))
        self._check_count(second, len(documents))
        call = self._scores(queries, documents, body)
        places = self._pairs(listed(first, given), listed(second, others))
        jobs = self._jobs(call.jobs, options, SCORE, places)

        def render(answers: Sequence[Completion]) -> bytes:
            items = [ScoreItem(index, score) for index, score in enumerate(call.scores(answers))]
            created, usage = int(time.time()), _usage(answers)
            return msgspec.json.encode(Scores(f"score-{name}", created, model, items, usage))

        return PooledRequest(jobs, render, places, SCORE.fields.names, ignored)

    def _scores(
        self,
        queries: Sequence[PoolInput],
        documents: Sequence[PoolInput],
        body: PooledBody,
        most: int | None = None,
    ) -> ScoreCall:
        keep = self._keep(body) or most or 0
        media = body.mm_processor_kwargs
        return ScoreCall(self._model, self._width, queries, documents, body.instruction, keep, media)

    def _options(self, body: PooledBody, options: Options) -> tuple[str, Options]:
        """Return the served model name, and the engine options for the body's requests."""
        model, adapter = self._names.resolve(body.model)
        mine = pool_options({})
        mine = replace(
            mine,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or options.cache_salt,
            tenant=options.tenant,
            deadline_s=body.deadline_s or 0.0,
            adapter=adapter,
            envelope=ENVELOPE,
        )
        try:
            mine.check()
        except InvalidRequest as error:
            raise api_error(error, EMBEDDING.fields.names) from None
        return model, mine

    def _pairs(self, queries: list[FieldPath], documents: list[FieldPath]) -> Places:
        """Return the body field from which each job in a ScoreCall comes. An embedding model has a job per
        query and per document; a reranker has a job per pair.
        """
        return Places([*queries, *documents] if self._model.task == "embed" else documents)

    def _jobs(
        self,
        make: Callable[[Options], Jobs],
        options: Options,
        kind: PooledBodyType[_B],
        places: Places,
    ) -> Jobs:
        jobs: Jobs = []
        try:
            for prompt, each in make(options):
                jobs.append((self._checked(prompt), each))
        except (InvalidRequest, ApiError) as error:
            raise places.api_error(error, kind.fields.names, index=len(jobs)) from None
        return jobs

    def _checked(self, prompt: Prompt) -> Prompt:
        """Apply the server's limits on images and URLs to a conversation. Other prompts are returned
        unchanged.
        """
        if prompt.messages is None:
            return prompt
        body = ChatBody(messages=list(prompt.messages), mm_processor_kwargs=prompt.media_options)
        read, _ = self._chat.read_prompt(body)
        return read

    def _keep(self, body: PooledBody) -> int:
        """Return the token limit to which longer texts are cut, or 0 for no limit. Raises ApiError."""
        given = body.truncate_prompt_tokens
        if given is not None and given != -1 and not 1 <= given <= self._max_tokens:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"{FIELD} must be -1 or 1 to {self._max_tokens}, not {given}",
                FieldPath("truncate_prompt_tokens"),
            )
        return self._max_tokens if given == -1 else given or 0

    def _check_count(self, name: str, count: int) -> None:
        if not 1 <= count <= self._max_inputs:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"{FIELD} has {count} entries; send 1 to {self._max_inputs} entries (max_inputs)",
                FieldPath(name),
            )


def _usage(answers: Sequence[Completion]) -> EmbeddingUsage:
    count = sum(len(answer.prompt_token_ids) for answer in answers)
    return EmbeddingUsage(count, count)


def _numbers(vector: np.ndarray) -> list[float] | str:
    return [float(value) for value in vector]


def _base64(vector: np.ndarray) -> list[float] | str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _either(name: str, given: _Given, other_name: str, other: _Given) -> tuple[str, _Given]:
    """Return the name and the value of the field that is set. Raises ApiError if both are set."""
    if given is not None and other is not None:
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            f"{other_name} and {name} are two names of one field: leave one out",
            FieldPath(other_name),
        )
    return (other_name, other) if given is None else (name, given)


def _several(given: _Given) -> list[PoolInput]:
    return [] if given is None else list(given) if isinstance(given, list) else [given]


def _shown(document: str | dict[str, object]) -> dict[str, object]:
    return {"text": document} if isinstance(document, str) else document
