"""Which calls of a session come again, and the answer to a question that does: that of before."""

from dataclasses import replace

from mmengine.errors import ErrorCode, FieldPath
from mmengine.models.plugin import Processor
from mmengine.request import GrammarRequest
from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.serve.async_engine.sessions import AsyncSession, Ended
from mmengine.serve.prompt.options import make_options
from mmengine.serve.requests.sessions import SessionFacts
from mmengine.serve.stream.answer_record import StoredAnswer, StoredChoice
from mmengine.serve.text.detokenizer import Stops
from mmengine.server.chat.parsed_request import Asked
from mmengine.server.http.errors import ApiError
from mmengine.structured_output.request.fields import truncation_of
from mmengine.structured_output.request.spec import reasoning_of


def is_repeated(facts: SessionFacts, index: int | None) -> bool:
    """Whether a request became part of the session before: the last one, which is answered again. Raises
    ApiError for another place than the next."""
    if index is None or index == facts.num_requests:
        return False
    if index == facts.num_requests - 1:
        return True
    raise _refused(f"index is {index}, and the session has {facts.num_requests} requests: the next one's")


async def answered_before(
    engine: AsyncEngine, session: AsyncSession, facts: SessionFacts, asked: Asked
) -> StoredAnswer:
    """The answer that the session ends with, in the form that is asked for again. Raises ApiError where it
    cannot be told as it was."""
    if not facts.answer:
        raise _refused("the request of this index asked nothing")
    if asked.logprobs:
        raise _refused("a session does not keep the logprobs of its answers; ask again without them")
    ended = session.ended
    if ended is None or ended.number != facts.num_requests - 1:
        ended = _ended_as_asked(facts, asked, engine.processor)
    grammar = _grammar_of(asked)
    flag = reasoning_of(asked.form.response_format, asked.form.grammar)
    options = replace(make_options(asked.sampling, {}), grammar=grammar, reasoning=flag)
    reasoning = await engine.on_engine(
        lambda one: one.reasoning.tokens(options, one.sessions.question(session.session_id))
    )
    said = [StoredChoice(0, facts.answer, ended.reason, ended.detail, code=ended.code)]
    num_prompt = facts.num_tokens - len(facts.answer)
    prompted = (asked.request_id, asked.sampling, reasoning, grammar, ended.num_embeds, num_prompt)
    return StoredAnswer(*prompted, said, ended.num_cached_tokens, ended.num_drafts, ended.num_accepted)


def _grammar_of(asked: Asked) -> GrammarRequest | None:
    """What of the form decides how an answer is told that it led to: nothing is compiled again."""
    form, grammar = asked.form.response_format, asked.form.grammar
    if form is None and grammar is None:
        return None
    _, truncation = truncation_of(FieldPath("response_format"), form if form is not None else grammar or {})
    return GrammarRequest("", "", (), truncation)


def _ended_as_asked(facts: SessionFacts, asked: Asked, processor: Processor) -> Ended:
    """How an answer of the process before ended, which what is asked again says of most. Raises ApiError."""
    sampling, last = asked.sampling, facts.answer[-1]
    reason, detail = "length", ""
    if asked.form and (sampling.stop or len(facts.answer) >= sampling.max_tokens):
        raise _refused(
            "the process that gave this answer ended, and whether its form is complete is not known behind "
            "that; ask it as the next request"
        )
    if last in processor.eos_token_ids and not sampling.ignore_eos:
        reason, detail = "stop", "eos"
    elif last in sampling.stop_token_ids:
        reason, detail = "stop", "token"
    elif asked.form:  # nothing else ended it
        reason = "stop"
    else:
        stream = Stops.of(sampling, None).stream(processor.tokenizer)
        stream.push(facts.answer)
        if stream.stopped:
            reason, detail = "stop", "string"
    return Ended(facts.num_requests - 1, reason, detail)


def _refused(text: str) -> ApiError:
    return ApiError(ErrorCode.SESSION_INDEX, text, FieldPath("index"))
