"""Checks requests and other observations before they become events in the log."""

import msgspec
import numpy as np

from mmengine.config import EngineConfig
from mmengine.core.decide.content_checks import PROMPT, check_content
from mmengine.core.state.request_state import ASKED, SETTLED
from mmengine.core.state.sessions import IDLE
from mmengine.core.state.view import View
from mmengine.errors import FIELD, ErrorCode, FieldPath, InvalidRequest, shown
from mmengine.events import vocabulary as ev
from mmengine.request import (
    PREFILL,
    Adapter,
    Pooling,
    Request,
    SamplingParams,
    ThinkingBudget,
    check_unicode,
)

MAX_ID_CHARS = 256
MAX_SALT_CHARS = 1024
# Maximum number of prompt logprobs (prompt tokens times logprobs per token). They take 2 MiB in the log.
MAX_PROMPT_LOGPROBS = 2**18
MAX_DIGEST_BYTES = 64  # maximum length of an adapter's digest
MAX_ENVELOPE_BYTES = 2**20  # maximum size of the server's own data for a request in the log


def accept(view: View, observation: ev.Event) -> list[ev.Event]:
    """Return the events to log for an observation. The list is empty if the observation has no effect. A
    request that arrives while the queue is full gets FINISHED with the reason "rejected".
    """
    match observation:
        case ev.Queued(request_id=name):
            if len(view.waiting) >= view.config.max_waiting:
                return [
                    ev.Finished(
                        name,
                        "rejected",
                        f"{view.config.max_waiting} requests wait already (max_waiting)",
                        ErrorCode.QUEUE_FULL,
                    )
                ]
            return [view.grammar_slots.written(observation)]
        case ev.GrammarReady(request_id=name) | ev.GrammarFailed(request_id=name):
            req_state = view.requests.get(name)
            waits = req_state is not None and req_state.waits_for_grammar and name not in view.grammar_failed
            return [observation] if waits else []
        case ev.SessionOpened(session_id=name):
            return [] if name in view.sessions.all else [observation]
        case ev.Appended(session_id=name):
            session = view.sessions.all.get(name)
            return [observation] if session is not None and not session.live else []
        case ev.SessionClosed(session_id=name, reason=reason):
            session = view.sessions.all.get(name)
            is_over = session is not None and not (reason == IDLE and session.live)
            return [observation] if is_over else []
        case ev.Offered() | ev.Arrived() | ev.Lost():
            return [observation] if _is_awaited(view, observation) else []
        case ev.Cancelled(request_id=name):
            req_state = view.requests.get(name)
            return [observation] if req_state is not None and not req_state.cancelled else []
        case _:
            return [observation]


def _is_awaited(view: View, report: ev.Offered | ev.Arrived | ev.Lost) -> bool:
    """Return whether a request waits for this report from the block store, and the report fits the request's
    state.
    """
    req_state = view.requests.get(report.request_id)
    if req_state is None:
        return False
    match report:
        case ev.Offered():
            return req_state.store == ASKED
        case ev.Arrived(digests=digests):
            return 0 < len(digests) <= 8 * req_state.num_fetching and len(digests) % 8 == 0
    return req_state.store != SETTLED


def check_request(request: Request, config: EngineConfig, *, max_media: int | None = None) -> None:
    """Raise InvalidRequest if the request could never run with these settings. `max_media`: the session's
    limit for media items, if the request belongs to a session.
    """
    _check_text("request_id", request.request_id, 1, MAX_ID_CHARS)
    _check_text("cache_salt", request.cache_salt, 0, MAX_SALT_CHARS)
    _check_text("tenant", request.tenant, 0, MAX_ID_CHARS)
    _check_text("group", request.group, 0, MAX_ID_CHARS)
    if not isinstance(request.envelope, bytes) or len(request.envelope) > MAX_ENVELOPE_BYTES:
        raise InvalidRequest(f"the envelope of a request holds at most {MAX_ENVELOPE_BYTES} bytes")
    if request.thinking is not None:
        _check_thinking(request.thinking)
    _check_integer("priority", request.priority, -(2**31), 2**31 - 1)
    _check_integer("deadline_ns", request.deadline_ns, 0, 2**62 - 1)
    _check_integer("sample_index", request.sample_index, 0, 2**31 - 1)
    if not isinstance(request.sampling, SamplingParams):
        raise InvalidRequest(f"sampling must be SamplingParams, not {type(request.sampling).__name__}")
    _check_sampling(request)
    if not isinstance(request.prompt_token_ids, np.ndarray) or not isinstance(request.media, tuple):
        raise InvalidRequest(
            "the prompt must be an array of token ids, and media a tuple of items", path=PROMPT
        )
    check_content(request.prompt_token_ids, request.media, config, max_media)
    _check_prompt_logprobs(len(request.prompt_token_ids), request.sampling.prompt_logprobs)
    _check_outputs(request, config)
    if request.adapter is not None:
        _check_adapter(request.adapter, config)


def _check_adapter(adapter: Adapter, config: EngineConfig) -> None:
    if not isinstance(adapter, Adapter) or not 1 <= len(adapter.digest) <= MAX_DIGEST_BYTES:
        raise InvalidRequest(f"the digest of an adapter must have 1 to {MAX_DIGEST_BYTES} bytes")
    _check_text("adapter", adapter.name, 0, MAX_ID_CHARS)
    if not config.max_loras:
        raise InvalidRequest(
            f"adapter {adapter.name!r} is not supported: this engine takes no adapters; set max_loras",
            path=FieldPath("adapter"),
        )
    if not 0 <= adapter.num_bytes <= config.lora_bytes:
        raise InvalidRequest(
            f"adapter {adapter.name!r} takes {adapter.num_bytes} bytes; the limit for all loaded adapters is "
            f"{config.lora_bytes}; raise lora_bytes",
            path=FieldPath("adapter"),
        )


def _check_sampling(request: Request) -> None:
    if request.pooling is not None:
        _check_pooling(request)
    if not request.is_prefill:
        request.sampling.check()
        return
    if request.sampling != msgspec.structs.replace(PREFILL, seed=request.sampling.seed):
        raise InvalidRequest(
            f"{FIELD} 0 computes the prompt only: remove all other sampling options",
            path=FieldPath("max_tokens"),
        )
    if request.grammar is not None or len(request.outputs):
        raise InvalidRequest(
            f"{FIELD} 0 gives no answer: remove the grammar and the outputs", path=FieldPath("max_tokens")
        )


def _check_pooling(request: Request) -> None:
    pooling = request.pooling
    try:
        msgspec.convert(msgspec.to_builtins(pooling), Pooling)
    except (TypeError, msgspec.ValidationError) as error:
        raise InvalidRequest(f"{FIELD} is invalid: {error}", path=FieldPath("pooling")) from None
    assert pooling is not None
    if not request.is_prefill or bool(pooling.token_ids) != (pooling.kind == "logits"):
        raise InvalidRequest(
            f"{FIELD} needs max_tokens 0, and token ids for logits only", path=FieldPath("pooling")
        )


def check_session(event: ev.SessionOpened, config: EngineConfig) -> None:
    """Raise InvalidRequest if these settings do not allow the session."""
    _check_text("a session id", event.session_id, 1, MAX_ID_CHARS)
    _check_text("cache_salt", event.cache_salt, 0, MAX_SALT_CHARS)
    _check_integer("idle_ns", event.idle_ns, 0, 2**62 - 1)
    if not isinstance(event.envelope, bytes) or len(event.envelope) > MAX_ENVELOPE_BYTES:
        raise InvalidRequest(f"the envelope of a session holds at most {MAX_ENVELOPE_BYTES} bytes")
    if config.compat:
        raise InvalidRequest(
            f"compat {config.compat} does not support sessions; open them in an engine without it"
        )


def _check_outputs(request: Request, config: EngineConfig) -> None:
    outputs = request.outputs
    if not isinstance(outputs, np.ndarray) or outputs.dtype != np.int32 or outputs.ndim != 1:
        raise InvalidRequest(
            f"{FIELD} must be int32 [m]: the first tokens of the answer", path=FieldPath("outputs")
        )
    if not len(outputs):
        return
    if int(outputs.min()) < 0:
        raise InvalidRequest(
            f"{FIELD} hold the token id {int(outputs.min())}; ids are not negative", path=FieldPath("outputs")
        )
    budget = request.budget(config.max_model_len)
    if len(outputs) >= budget:
        raise InvalidRequest(
            f"{FIELD} are {len(outputs)} tokens, but the answer may have {budget}: no token is left",
            path=FieldPath("outputs"),
        )
    if request.sampling.prompt_logprobs is not None:
        raise InvalidRequest(
            f"{FIELD} came with the first of the outputs; leave out prompt_logprobs or the outputs",
            path=FieldPath("prompt_logprobs"),
        )


def _check_prompt_logprobs(num_tokens: int, asked: int | None) -> None:
    if asked is not None and num_tokens * (1 + asked) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"{FIELD} {asked} for {num_tokens} prompt tokens gives {num_tokens * (1 + asked)} logprobs; the "
            f"limit is {MAX_PROMPT_LOGPROBS}: lower prompt_logprobs, or send a shorter prompt",
            path=FieldPath("prompt_logprobs"),
        )


def _check_thinking(thinking: ThinkingBudget) -> None:
    try:
        msgspec.convert(msgspec.to_builtins(thinking), ThinkingBudget)
    except (TypeError, msgspec.ValidationError) as error:
        raise InvalidRequest(f"the budget of reasoning tokens is invalid: {error}") from None


def _check_text(name: str, value: str, shortest: int, longest: int) -> None:
    if not isinstance(value, str) or not shortest <= len(value) <= longest:
        raise InvalidRequest(
            f"{FIELD} must be a string of {shortest} to {longest} characters", path=FieldPath(name)
        )
    check_unicode((name,), value)


def _check_integer(name: str, value: int, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise InvalidRequest(
            f"{FIELD} must be an integer from {low} to {high}, not {shown(value)}", path=FieldPath(name)
        )
