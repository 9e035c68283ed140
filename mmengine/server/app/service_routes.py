"""Routes that generate no answer: models, tokenization, health, metrics and the version."""

import asyncio
import time
from collections.abc import Iterator

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from mmengine.errors import FIELD, ErrorCode, FieldPath, MMEngineError
from mmengine.serve.async_engine.served_engine import ServedEngine
from mmengine.serve.prompt.prompt import Prompt
from mmengine.serve.requests.vllm_metrics import VllmMetrics
from mmengine.server.chat.bodies import ChatBody, DetokenizeBody, TokenizeBody
from mmengine.server.chat.chat_reader import ChatReader
from mmengine.server.chat.field_tables import DETOKENIZE, TOKENIZE
from mmengine.server.chat.media_fetch import FetchMetrics
from mmengine.server.chat.parsed_request import Json
from mmengine.server.chat.token_texts import TokenTexts
from mmengine.server.http.admission import OWNER, Admission
from mmengine.server.http.body_fields import Fields, ignored_header
from mmengine.server.http.errors import ApiError, api_error, decode_body
from mmengine.server.http.metrics import FunctionCollector, HttpMetrics, vllm_http_families
from mmengine.server.http.model_names import ModelNames
from mmengine.server.http.token_id_lists import take_out
from mmengine.server.settings import ServerSettings
from mmengine.version import __version__

MAX_TOKENIZED = 2  # Maximum number of prompts that /tokenize processes at the same time.
MAX_DETOKENIZED = 2**20  # Maximum number of tokens in a call of /detokenize.
TOKENIZE_FIELDS, DETOKENIZE_FIELDS = Fields(TOKENIZE), Fields(DETOKENIZE)
decode_tokenize = msgspec.json.Decoder(TokenizeBody).decode
decode_detokenize = msgspec.json.Decoder(DetokenizeBody).decode


class ServiceRoutes:
    """The service routes. `reader` parses conversations in /tokenize bodies, as for chat completions."""

    def __init__(
        self,
        engine: ServedEngine,
        settings: ServerSettings,
        names: ModelNames,
        metrics: HttpMetrics,
        admission: Admission,
        texts: TokenTexts,
        fetches: FetchMetrics,
        reader: ChatReader,
    ):
        self._reader, self._ignore_unknown = reader, settings.unknown_fields == "ignore"
        self._engine, self._names, self._metrics, self._admission = engine, names, metrics, admission
        self._exposed = _exposed(engine, settings, names.model_names[0], metrics, fetches)
        self._created = int(time.time())
        self._processor = engine.processor
        self._texts = texts
        self._room = asyncio.Semaphore(MAX_TOKENIZED)

    async def models(self, request: Request) -> ASGIApp:
        return _json({"object": "list", "data": [self._model(name) for name in self._names.all_names]})

    async def model(self, request: Request) -> ASGIApp:
        name = request.path_params["name"]
        return _json(self._model(self._names.resolve(name)[0]))

    def _model(self, name: str) -> Json:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "mmengine",
            "root": self._names.model_names[0],
            "parent": None if name in self._names.model_names else self._names.model_names[0],
            "max_model_len": self._engine.config.max_model_len,
        }

    async def tokenize(self, request: Request) -> ASGIApp:
        with self._admission.reserve(request.scope[OWNER]) as reservation:
            data = await self._admission.bodies.read(request.scope, request.receive, reservation)
            async with self._room:
                return await asyncio.to_thread(self._tokenized, b"".join(data))

    def _tokenized(self, data: bytes) -> Response:
        ignored = TOKENIZE_FIELDS.check(data, ignore_unknown=self._ignore_unknown)
        body = decode_body(data, decode_tokenize)
        self._names.resolve(body.model)
        prompt = read_prompt(body, self._reader)
        try:
            tokens = prompt.prepare(self._processor).prompt_token_ids.tolist()
        except MMEngineError as error:
            raise api_error(error, TOKENIZE_FIELDS.names) from None
        found: Json = {
            "count": len(tokens),
            "max_model_len": self._engine.config.max_model_len,
            "tokens": tokens,
            "token_strs": [self._texts.of(token)[0] for token in tokens] if body.return_token_strs else None,
        }
        return _json(found, headers=ignored_header(ignored))

    async def detokenize(self, request: Request) -> ASGIApp:
        with self._admission.reserve(request.scope[OWNER]) as reservation:
            data = await self._admission.bodies.read(request.scope, request.receive, reservation)
            return await asyncio.to_thread(self._detokenized, b"".join(data))

    def _detokenized(self, data: bytes) -> Response:
        small, ids = take_out(data, b"tokens")
        ignored = DETOKENIZE_FIELDS.check(small, ignore_unknown=self._ignore_unknown)
        body, tokenizer = decode_body(small, decode_detokenize), self._processor.tokenizer
        self._names.resolve(body.model)
        tokens = ids.lists[0] if body.tokens == ids.stands and ids.lists else body.tokens
        if len(tokens) > MAX_DETOKENIZED:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"{FIELD} has {len(tokens)} ids; the limit is {MAX_DETOKENIZED}",
                FieldPath("tokens"),
            )
        if any(not 0 <= token < tokenizer.vocab_size for token in tokens):
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"{FIELD} must be 0 to {tokenizer.vocab_size - 1}",
                FieldPath("tokens"),
            )
        text = tokenizer.decode(tokens, skip_special_tokens=False)
        return _json({"prompt": text}, headers=ignored_header(ignored))

    async def live(self, request: Request) -> ASGIApp:
        return _json({"status": "alive"})

    async def ready(self, request: Request) -> ASGIApp:
        reasons = self._admission.reasons()
        found: Json = {"status": "not ready" if reasons else "ready", "reasons": list(reasons)}
        if not reasons:
            return _json(found)
        return _json(found, 503, {"retry-after": str(self._admission.retry_later_s())})

    async def metrics(self, request: Request) -> ASGIApp:
        text = await asyncio.to_thread(generate_latest, self._exposed)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def version(self, request: Request) -> ASGIApp:
        return _json({"version": __version__})


def _exposed(
    engine: ServedEngine,
    settings: ServerSettings,
    model_name: str,
    metrics: HttpMetrics,
    fetches: FetchMetrics,
) -> CollectorRegistry:
    """Return the registry with all metrics that /metrics shows."""

    def ours() -> Iterator[Metric]:
        # Read on every scrape, because a restarted engine has new metrics.
        yield from engine.metrics.collect()
        yield from metrics.collect()

    registry = CollectorRegistry(auto_describe=False)
    registry.register(FunctionCollector(ours))
    registry.register(FunctionCollector(fetches.collect))
    if settings.metrics_compat == "vllm":
        config = engine.config
        kept = {"block_size": config.block_size, "num_gpu_blocks": config.num_blocks - 1}
        registry.register(VllmMetrics(ours, model_name, kept))
        registry.register(FunctionCollector(lambda: vllm_http_families(metrics.collect())))
    return registry


def _json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def read_prompt(body: TokenizeBody, reader: ChatReader) -> Prompt:
    """Return the prompt for a completion or a chat completion with the body's fields. Raises ApiError."""
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(ErrorCode.INVALID_VALUE, "set either prompt or messages", FieldPath("prompt"))
    if body.messages is None:
        return Prompt(text=body.prompt, media_options={"local_files": False})
    chat = ChatBody(
        messages=body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
        tools=body.tools,
    )
    prompt, _ = reader.read_prompt(chat)
    if prompt.has_media:
        text = (
            f"{FIELD} with images or videos cannot be tokenized; the usage of a chat completion gives their "
            "number of tokens"
        )
        raise ApiError(ErrorCode.INVALID_VALUE, text, FieldPath("messages"))
    return prompt
