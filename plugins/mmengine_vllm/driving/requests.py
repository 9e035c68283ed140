"""Translates vLLM's requests into requests for mmengine's core."""

import hashlib
from collections.abc import Iterator

import numpy as np

from mmengine.errors import InvalidRequest
from mmengine.request import Adapter, GrammarRequest, MediaItem, Request, SamplingParams
from mmengine_vllm.request_facts import embedding_runs
from mmengine_vllm.vllm_object import VllmObject

# The core only knows that a request has a grammar. The grammar itself stays in vLLM's structured output
# manager.
VLLM_GRAMMAR = GrammarRequest("vllm", "{}")
NEVER_STOPS = -1


def engine_request(request: VllmObject, num_resets: int = 0) -> Request:
    """Return the request for the core. Raises InvalidRequest for a request that the core cannot run.

    `num_resets`: how often the encoder cache was reset. Each item's hash includes this number, so items
    cached before the last reset never match.
    """
    unsupported = next(_unsupported(request), None)
    if unsupported is not None:
        raise InvalidRequest(f"mmengine_vllm.Scheduler does not support {unsupported}")
    salt = request.cache_salt or ""
    if request.skip_reading_prefix_cache:
        salt = f"{salt}/{request.request_id}"  # no other request has this salt, so there are no cache hits
    return Request(
        request.request_id,
        np.array(request.prompt_token_ids, np.int32),
        SamplingParams(
            max_tokens=request.max_tokens, min_tokens=0, ignore_eos=eos_of(request) == NEVER_STOPS, seed=0
        ),
        tuple(media_items(request, num_resets)),
        priority=request.priority,
        cache_salt=salt,
        grammar=VLLM_GRAMMAR if request.use_structured_output else None,
        adapter=_adapter(request.lora_request),
    )


def eos_of(request: VllmObject) -> int:
    """Return the request's end-of-text token, or NEVER_STOPS."""
    token = request.sampling_params.eos_token_id
    return NEVER_STOPS if token is None else int(token)


def media_items(request: VllmObject, num_resets: int) -> Iterator[MediaItem]:
    """Yield the request's images and videos. An item's hash is derived from vLLM's identifier for the item's
    features, so equal items share a cache entry.
    """
    for feature in request.mm_features:
        position = feature.mm_position
        runs = embedding_runs(position)
        number = sum(length for _, length in runs)
        digest = hashlib.sha256(f"{num_resets}:{feature.identifier}".encode()).digest()
        yield MediaItem(digest, feature.modality, runs, (1, 2, 2 * number))


def _adapter(lora: VllmObject) -> Adapter | None:
    if lora is None:
        return None
    digest = hashlib.sha256(f"{lora.lora_int_id}:{lora.lora_name}:{lora.lora_path}".encode()).digest()
    return Adapter(digest, 1, name=lora.lora_name)


def _unsupported(request: VllmObject) -> Iterator[str]:
    if request.pooling_params is not None:
        yield "pooling requests"
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        yield "prompts as embeddings"
    if request.resumable:
        yield "streaming inputs (resumable requests)"
    if request.kv_transfer_params or getattr(request, "ec_transfer_params", None):
        yield "transfers of KV or encoder outputs"
