"""The door: what is asked of the engine becomes an event, or is refused."""

import numpy as np

from mmengine.config import EngineConfig
from mmengine.core.state import View
from mmengine.errors import InvalidRequest
from mmengine.events import vocabulary as ev
from mmengine.request import MediaItem, Request

MAX_ID_CHARS = 256
MAX_SALT_CHARS = 1024


def admit(view: View, asked: ev.Event) -> list[ev.Event]:
    """What becomes of an arrival, a cancel or a reset that this step sees."""
    match asked:
        case ev.Queued(request_id=name):
            if len(view.waiting) >= view.config.max_waiting:
                return [
                    ev.Finished(
                        name, "rejected", f"{view.config.max_waiting} requests wait already (max_waiting)"
                    )
                ]
            return [asked]
        case ev.GrammarReady(request_id=name) | ev.GrammarFailed(request_id=name):
            known = view.requests.get(name)
            waits = known is not None and known.waits_for_grammar and name not in view.grammar_failed
            return [asked] if waits else []
        case ev.Cancelled(request_id=name):
            known = view.requests.get(name)
            return [asked] if known is not None and not known.cancelled else []
        case _:
            return [asked]


def check_request(request: Request, config: EngineConfig) -> None:
    """Raise InvalidRequest for a request that could never run with these settings."""
    if not isinstance(request.request_id, str) or not 1 <= len(request.request_id) <= MAX_ID_CHARS:
        raise InvalidRequest(f"a request id must be a string of 1 to {MAX_ID_CHARS} characters")
    if not isinstance(request.cache_salt, str) or len(request.cache_salt) > MAX_SALT_CHARS:
        raise InvalidRequest(f"cache_salt must be a string of at most {MAX_SALT_CHARS} characters")
    if not -(2**31) <= request.priority < 2**31 or not 0 <= request.deadline_ns < 2**62:
        raise InvalidRequest("priority must fit 32 bits, and a deadline must lie in the future")
    if not 0 <= request.sample_index < 2**31:
        raise InvalidRequest(f"sample_index must lie in 0 to 2^31 - 1, not {request.sample_index}")
    request.sampling.check()
    check_content(request.prompt_token_ids, request.media, config)


def check_content(prompt: np.ndarray, media: tuple[MediaItem, ...], config: EngineConfig) -> None:
    """Raise InvalidRequest for what no state of these settings could hold: the prompt (int32 [n]) and
    the places of its media."""
    _check_prompt(prompt, config)
    _check_media(prompt, media, config)


def _check_prompt(prompt: np.ndarray, config: EngineConfig) -> None:
    if prompt.dtype != np.int32 or prompt.ndim != 1 or not len(prompt):
        raise InvalidRequest("the prompt is empty: give it at least one token")
    if int(prompt.min()) < 0:
        raise InvalidRequest(f"the prompt holds the token id {int(prompt.min())}; ids are not negative")
    if len(prompt) >= config.max_model_len:
        raise InvalidRequest(
            f"the prompt has {len(prompt)} tokens, but max_model_len is {config.max_model_len} for prompt "
            "and answer together; shorten it, use smaller images, or raise max_model_len"
        )


def _check_media(prompt: np.ndarray, media: tuple[MediaItem, ...], config: EngineConfig) -> None:
    if len(media) > config.max_media_per_request:
        raise InvalidRequest(
            f"{len(media)} images and videos in one request; max_media_per_request is "
            f"{config.max_media_per_request}"
        )
    end = 0
    for number, item in enumerate(media):
        end = _check_runs(item, number, end, len(prompt))
        for setting in ("encoder_budget", "encoder_cache_size"):
            if item.num_embeds > getattr(config, setting):
                raise InvalidRequest(
                    f"{item.modality} {number} needs {item.num_embeds} embeddings, but {setting} is "
                    f"{getattr(config, setting)}; use a smaller one, or raise {setting}"
                )


def _check_runs(item: MediaItem, number: int, end: int, num_prompt: int) -> int:
    """Runs must ascend, not overlap, and lie in the prompt; gives where the last one ends."""
    if not item.runs:
        raise InvalidRequest(f"{item.modality} {number} has no embeddings in the prompt")
    for start, length in item.runs:
        if start < end or length < 1 or start + length > num_prompt:
            raise InvalidRequest(
                f"{item.modality} {number} claims prompt tokens {start} to {start + length}, which overlap "
                f"other media or leave the prompt of {num_prompt} tokens"
            )
        end = start + length
    return end
