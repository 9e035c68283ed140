"""Routes beside those of answers: models, tokens, health, metrics, version."""

import asyncio
from collections.abc import Iterator
from typing import TypeVar

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from mmengine.errors import MMEngineError
from mmengine.serve.async_engine import AsyncEngine
from mmengine.serve.prompts import Prompt
from mmengine.serve.vllm_metrics import VllmMetrics
from mmengine.server.admission import OWNER, Admission
from mmengine.server.asked import Json, now
from mmengine.server.errors import ApiError, api_error, undecodable
from mmengine.server.http_metrics import HttpMetrics, Several, instrumented
from mmengine.server.media import FetchMetrics
from mmengine.server.openapi import document
from mmengine.server.settings import ServerSettings
from mmengine.server.token_requests import DetokenizeBody, TokenizeBody
from mmengine.server.token_texts import TokenTexts
from mmengine.version import __version__

MAX_TOKENIZED = 2  # prompts that are tokenized at once for /tokenize
MAX_DETOKENIZED = 2**20  # tokens of one call of /detokenize


_T = TypeVar("_T", TokenizeBody, DetokenizeBody)


class OtherRoutes:
    def __init__(
        self,
        engine: AsyncEngine,
        settings: ServerSettings,
        names: tuple[str, ...],
        metrics: HttpMetrics,
        admission: Admission,
        texts: TokenTexts,
        fetches: FetchMetrics,
    ):
        self._engine, self._names, self._metrics, self._admission = engine, names, metrics, admission
        self._exposed = _exposed(engine, settings, names[0], metrics, fetches)
        self._created = now()
        self._processor = engine.processor
        self._texts = texts
        self._room = asyncio.Semaphore(MAX_TOKENIZED)

    async def models(self, request: Request) -> ASGIApp:
        return _json({"object": "list", "data": [self._model(name) for name in self._names]})

    async def model(self, request: Request) -> ASGIApp:
        name = request.path_params["name"]
        if name not in self._names:
            raise ApiError(
                404,
                f"the model {name[:256]!r} is not served here; there is {', '.join(self._names)}",
                "model",
                "model_not_found",
            )
        return _json(self._model(name))

    def _model(self, name: str) -> Json:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "mmengine",
            "root": self._names[0],
            "max_model_len": self._engine.config.max_model_len,
        }

    async def tokenize(self, request: Request) -> ASGIApp:
        with self._admission.holding(request.scope[OWNER]) as held:
            data = await self._admission.bodies.read(request.scope, request.receive, held)
            async with self._room:
                return await asyncio.to_thread(self._tokenized, b"".join(data))

    def _tokenized(self, data: bytes) -> Response:
        body = _read(data, TokenizeBody)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", "prompt")
        if body.prompt is not None:
            prompt = Prompt(text=body.prompt, media_options={"local_files": False})
        else:
            add = body.add_generation_prompt
            prompt = Prompt(
                messages=body.messages,
                add_generation_prompt=True if add is None else add,
                continue_final_message=bool(body.continue_final_message),
                media_options={"local_files": False},
                template_options=body.chat_template_kwargs,
            )
        if prompt.has_media:
            raise ApiError(
                400,
                "messages with images or videos are not tokenized here; their usage says what they took",
                "messages",
            )
        try:
            tokens = prompt.prepare(self._processor).prompt_token_ids.tolist()
        except MMEngineError as error:
            raise api_error(error, frozenset({"messages", "prompt"})) from None
        found: Json = {
            "count": len(tokens),
            "max_model_len": self._engine.config.max_model_len,
            "tokens": tokens,
            "token_strs": [self._texts.of(token)[0] for token in tokens] if body.return_token_strs else None,
        }
        return _json(found)

    async def detokenize(self, request: Request) -> ASGIApp:
        with self._admission.holding(request.scope[OWNER]) as held:
            data = await self._admission.bodies.read(request.scope, request.receive, held)
            return await asyncio.to_thread(self._detokenized, b"".join(data))

    def _detokenized(self, data: bytes) -> Response:
        body, tokenizer = _read(data, DetokenizeBody), self._processor.tokenizer
        if len(body.tokens) > MAX_DETOKENIZED:
            raise ApiError(400, f"at most {MAX_DETOKENIZED} tokens are taken", "tokens")
        if any(not 0 <= token < tokenizer.vocab_size for token in body.tokens):
            raise ApiError(400, f"tokens lie in 0 to {tokenizer.vocab_size - 1}", "tokens")
        return _json({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)})

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

    async def openapi(self, request: Request) -> ASGIApp:
        return Response(await asyncio.to_thread(document), media_type="application/json")

    async def version(self, request: Request) -> ASGIApp:
        return _json({"version": __version__})


def _exposed(
    engine: AsyncEngine,
    settings: ServerSettings,
    model_name: str,
    metrics: HttpMetrics,
    fetches: FetchMetrics,
) -> CollectorRegistry:
    """All that /metrics tells."""

    def ours() -> Iterator[Metric]:
        yield from engine.metrics.collect()  # another one, when another engine has taken over
        yield from metrics.collect()

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Several(ours))
    registry.register(Several(fetches.collect))
    if settings.metrics_compat == "vllm":
        config = engine.config
        kept = {"block_size": config.block_size, "num_gpu_blocks": config.num_blocks - 1}
        registry.register(VllmMetrics(ours, model_name, kept))
        registry.register(Several(lambda: instrumented(metrics.collect())))
    return registry


def _json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def _read(data: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise undecodable(error) from None
