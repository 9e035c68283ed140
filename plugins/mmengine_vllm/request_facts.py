"""Translates vLLM's requests into the event QUEUED."""

import numpy as np

from mmengine.events import vocabulary as ev
from mmengine.request import PREFILL, Adapter, GrammarRequest, MediaItem, SamplingParams
from mmengine_vllm.contents import PseudoIds
from mmengine_vllm.vllm_object import VllmObject, read

_MOST_TOKENS = 10**7
_PLAIN_NUMBERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty")


def sampling_of(request: VllmObject, *, hides: bool) -> SamplingParams:
    """Return the sampling options that may affect scheduling. With `hides`, leave out stop tokens and the
    options in _PLAIN_NUMBERS.
    """
    theirs = request.sampling_params
    if theirs is None:
        return PREFILL
    numbers: dict[str, VllmObject] = {}
    for name in () if hides else _PLAIN_NUMBERS:
        if isinstance(value := getattr(theirs, name, None), (int, float)):
            numbers[name] = max(value, 0) if name == "top_k" else value
    return SamplingParams(
        max_tokens=min(max(1, int(request.max_tokens)), _MOST_TOKENS),
        min_tokens=int(getattr(theirs, "min_tokens", 0) or 0),
        ignore_eos=bool(getattr(theirs, "ignore_eos", False)),
        seed=0,
        stop_token_ids=() if hides else tuple(getattr(theirs, "stop_token_ids", None) or ())[:16],
        **numbers,
    )


def embedding_runs(position: VllmObject) -> tuple[tuple[int, int], ...]:
    """Return (start, length) for each run of embeddings in a media item's prompt range."""
    if position.is_embed is None:
        return ((position.offset, position.length),)
    mask = np.zeros(position.length + 2, np.int8)
    mask[1:-1] = np.asarray(position.is_embed).astype(np.int8)
    steps = np.diff(mask)
    starts, ends = np.flatnonzero(steps == 1), np.flatnonzero(steps == -1)
    return tuple(
        (position.offset + int(start), int(end - start)) for start, end in zip(starts, ends, strict=True)
    )


def media_of(request: VllmObject, contents: PseudoIds) -> tuple[MediaItem, ...]:
    """Return the request's media. An item's hash is a digest of vLLM's cache identifier."""
    items = []
    for feature in request.mm_features or ():
        runs = embedding_runs(feature.mm_position)
        if runs:
            size = sum(length for _, length in runs)
            key = contents.digest(feature.identifier)
            items.append(MediaItem(key, str(feature.modality), runs, (1, 1, size)))
    return tuple(items)


def grammar_of(request: VllmObject, contents: PseudoIds) -> GrammarRequest | None:
    """Return a GrammarRequest that contains only a hash of the grammar, or None without a grammar."""
    if not request.use_structured_output:
        return None
    asked = read(request, "sampling_params.structured_outputs")
    if asked is None:
        return None
    return GrammarRequest("vllm", contents.digest(repr(asked)).hex())


def adapter_of(request: VllmObject, contents: PseudoIds) -> Adapter | None:
    lora = request.lora_request
    if lora is None:
        return None
    name = str(lora.lora_name)
    return Adapter(contents.digest(f"{name} {lora.lora_int_id}"), 0, False, name)


def queued_of(request: VllmObject, contents: PseudoIds, *, hides: bool) -> ev.Queued:
    """Return QUEUED for a request, without its prompt. With `hides`, the event contains no user content."""
    return ev.Queued(
        request_id=request.request_id,
        prompt=b"",
        sampling=sampling_of(request, hides=hides),
        media=media_of(request, contents),
        priority=int(request.priority),
        cache_salt="" if hides else request.cache_salt or "",
        grammar=grammar_of(request, contents),
        adapter=adapter_of(request, contents),
    )
