"""Runs a server's first requests, before clients send theirs."""

import base64
import io
import secrets
from contextlib import suppress
from dataclasses import replace

from PIL import Image

from mmengine.errors import InvalidMedia, InvalidRequest, MMEngineError
from mmengine.serve.async_engine.served_engine import ServedEngine
from mmengine.serve.pooling.calls import EmbedCall, Jobs, ScoreCall, pool_options
from mmengine.serve.pooling.prompts import PoolInput
from mmengine.serve.prompt.prompt import Prompt
from mmengine.serve.requests.operator_log import operator_log

WARM_UP_TOKENS = 2  # One prefill step and one decode step.
WARM_UP_PIXELS = 64  # Width and height of the warm-up image.
_TEXT = "Hello"


async def warm_up(engine: ServedEngine, chat_template: str) -> None:
    """Run two short requests: a text completion, and a chat with structured output. The chat contains an
    image if the model accepts images. An embedding model or a reranker runs pooled requests instead.

    The requests compile kernels and create processes and tables, so that clients' first requests are fast. A
    model without a chat template runs only the text completion. The request ids in the log begin with
    `warm-up-`.
    """
    name = f"warm-up-{secrets.token_hex(4)}"
    if engine.pooled.task != "chat":
        await engine.pool(_pooled_jobs(engine, name))
        return
    text = Prompt(text=_TEXT)
    await engine.generate(text, max_tokens=WARM_UP_TOKENS, ignore_eos=True, request_id=f"{name}-text")
    content: list[dict[str, object]] = [{"type": "text", "text": _TEXT}]
    if engine.processor.max_image_pixels:
        content.insert(0, {"type": "image_url", "image_url": {"url": _picture()}})
    template = {"chat_template": chat_template} if chat_template else None
    options = {"local_files": False}
    prompt = Prompt([{"role": "user", "content": content}], media_options=options, template_options=template)
    # With max_digits 0, digits are unlimited, so the log gets no note about a limit.
    form: dict[str, object] = {"type": "json_object", "bounds": {"max_digits": 0}}
    try:
        await engine.generate(
            prompt, max_tokens=WARM_UP_TOKENS, response_format=form, request_id=f"{name}-chat"
        )
    except (InvalidRequest, InvalidMedia) as error:
        operator_log.warning("warm-up without structured output", reason=str(error))


async def warm_up_meanwhile(engine: ServedEngine, chat_template: str) -> None:
    """Run `warm_up` while the server handles calls.

    If the queue is full or the server shuts down, the warm-up requests fail. The errors are ignored, because
    clients' own calls report the same errors.
    """
    with suppress(MMEngineError):
        await warm_up(engine, chat_template)


def _pooled_jobs(engine: ServedEngine, name: str) -> Jobs:
    inputs: list[PoolInput] = [_TEXT]
    if engine.processor.max_image_pixels:
        inputs.append({"image": _picture()})
    if engine.pooled.task == "rerank":
        jobs = ScoreCall(engine.pooled, engine.width, [_TEXT], inputs).jobs(pool_options({}))
    else:
        jobs = EmbedCall(engine.pooled, engine.width, inputs).jobs(pool_options({}))
    return [
        (prompt, replace(options, request_id=f"{name}-{index}"))
        for index, (prompt, options) in enumerate(jobs)
    ]


def _picture() -> str:
    """Return a small grey PNG as a `data:` URL."""
    file = io.BytesIO()
    Image.new("RGB", (WARM_UP_PIXELS, WARM_UP_PIXELS), "grey").save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
