"""Recognises a repetition of a session's last call, and returns that call's answer again."""

from dataclasses import replace

from mmengine.core.executor import REPETITION
from mmengine.errors import ErrorCode, FieldPath
from mmengine.models.plugin import Processor
from mmengine.request import GrammarRequest
from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.serve.async_engine.sessions import AnswerFacts, AsyncSession
from mmengine.serve.prompt.options import make_options
from mmengine.serve.requests.sessions import SessionFacts
from mmengine.serve.stream.stored_answer import StoredAnswer, StoredChoice
from mmengine.serve.text.detokenizer import Stops
from mmengine.server.chat.parsed_request import ParsedRequest
from mmengine.server.http.errors import ApiError
from mmengine.structured_output.request.fields import truncation_of
from mmengine.structured_output.request.spec import reasoning_of


def is_repeated(facts: SessionFacts, index: int | None) -> bool:
    """Return whether a call with this index repeats the session's last request. A call without an index
    (None) is never a repetition. Raises ApiError if the index is neither the last request's nor the next
    request's.
    """
    if index is None or index == facts.num_requests:
        return False
    if index == facts.num_requests - 1:
        return True
    raise _refused(f"index is {index}; the session's next index is {facts.num_requests}")


async def repeat_answer(
    engine: AsyncEngine, session: AsyncSession, facts: SessionFacts, parsed_request: ParsedRequest
) -> StoredAnswer:
    """Return the session's last answer, so that the repeated call gets this answer again. Raises ApiError if
    the answer cannot be reproduced.
    """
    if not facts.answer:
        raise _refused("the request at this index only appended content, so it has no answer to repeat")
    if parsed_request.logprobs:
        raise _refused(
            "a session does not store the logprobs of its answers; repeat the call without logprobs"
        )
    form = parsed_request.answer_format.response_format
    if form is not None and form.get("field_confidence"):
        raise _refused("a session does not store confidences; repeat the call without field_confidence")
    ended = session.last_answer
    if ended is None or ended.number != facts.num_requests - 1:
        ended = _ended_as_asked(facts, parsed_request, engine.processor)
    grammar = _grammar_of(parsed_request)
    flag = reasoning_of(parsed_request.answer_format.response_format, parsed_request.answer_format.grammar)
    options = replace(make_options(parsed_request.sampling, {}), grammar=grammar, reasoning=flag)
    reasoning = await engine.on_engine(
        lambda one: one.reasoning.tokens(options, one.sessions.question(session.session_id))
    )
    said = [StoredChoice(0, facts.answer, ended.reason, ended.detail, code=ended.code)]
    num_prompt = facts.num_tokens - len(facts.answer)
    prompted = (
        parsed_request.request_id,
        parsed_request.sampling,
        reasoning,
        grammar,
        ended.num_embeds,
        num_prompt,
    )
    return StoredAnswer(*prompted, said, ended.num_cached_tokens, ended.num_drafts, ended.num_accepted)


def _grammar_of(parsed_request: ParsedRequest) -> GrammarRequest | None:
    """Return a grammar request with only the settings that affect streaming."""
    form, grammar = parsed_request.answer_format.response_format, parsed_request.answer_format.grammar
    if form is None and grammar is None:
        return None
    _, truncation = truncation_of(FieldPath("response_format"), form if form is not None else grammar or {})
    return GrammarRequest("", "", (), truncation)


def _ended_as_asked(facts: SessionFacts, parsed_request: ParsedRequest, processor: Processor) -> AnswerFacts:
    """Return how a recovered answer ended, derived from its tokens and the repeated call's options. Raises
    ApiError if the reason cannot be derived.
    """
    sampling, last = parsed_request.sampling, facts.answer[-1]
    detection = sampling.repetition_detection
    reason, detail = "length", ""
    may_be_cut = bool(sampling.stop or detection) or len(facts.answer) >= sampling.max_tokens
    if parsed_request.answer_format and may_be_cut:
        raise _refused(
            "the server restarted, and it is unknown whether this answer was complete; send the question "
            "again with the next index"
        )
    if last in processor.eos_token_ids and not sampling.ignore_eos:
        reason, detail = "stop", "eos"
    elif last in sampling.stop_token_ids:
        reason, detail = "stop", "token"
    elif parsed_request.answer_format:  # The only remaining reason: the format was complete.
        reason = "stop"
    elif detection and detection.repeats(facts.answer):
        reason, detail = "repetition", REPETITION
    else:
        stream = Stops.of(sampling, None).stream(processor.tokenizer)
        stream.push(facts.answer)
        if stream.stopped:
            reason, detail = "stop", "string"
    return AnswerFacts(facts.num_requests - 1, reason, detail)


def _refused(text: str) -> ApiError:
    return ApiError(ErrorCode.SESSION_INDEX, text, FieldPath("index"))
