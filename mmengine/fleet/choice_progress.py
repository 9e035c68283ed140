"""Collects outputs for a request's choices: outputs that an ingress has forwarded to the caller, and outputs
in replicas' logs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mmengine.core.executor import PromptLogprobs
from mmengine.core.undelivered_answers import ResumedAnswer
from mmengine.request import GrammarRequest, SamplingParams
from mmengine.serve.prompt.prompt import core_ids
from mmengine.serve.text.detokenizer import Stops
from mmengine.serve.text.request_output import Choice, Logprobs, RequestOutput, finish_detail
from mmengine.token_confidence import TokenConfidence, split_entries


@dataclass(slots=True)
class ChoiceProgress:
    """One choice's outputs that were forwarded to the caller."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: Logprobs | None = None
    confidences: list[TokenConfidence] | None = None
    last: RequestOutput | None = None  # set when the choice has ended

    def add(self, output: RequestOutput) -> None:
        self.token_ids += output.token_ids
        if output.logprobs is not None:
            self.logprobs = (self.logprobs or []) + output.logprobs
        if output.confidences is not None:
            self.confidences = (self.confidences or []) + output.confidences
        if output.finish_reason is not None:
            self.last = output

    def choice(self, *, has_form: bool) -> Choice:
        assert self.last is not None and self.last.finish_reason is not None
        reason = self.last.finish_reason
        detail = finish_detail(reason, self.last.detail, has_form=has_form)
        return Choice(
            self.index,
            "",
            self.token_ids,
            reason,
            detail,
            self.logprobs,
            self.last.after,
            code=self.last.code,
            confidences=self.confidences,
        )


def logged_outputs(
    request_id: str,
    sampling: SamplingParams,
    grammar: GrammarRequest | None,
    logs: Iterable[Mapping[str, ResumedAnswer]],
) -> list[RequestOutput]:
    """Return an output for each choice that has tokens or a finish reason in `logs`. The output begins with
    the choice's first token.

    `logs`: each replica's answers, by core id. Each choice has a core id. A choice that moved between
    replicas is in several logs.
    """
    names = core_ids(request_id, sampling.n)
    found = [[log[name] for log in logs if name in log] for name in names]
    given = (each.prompt_logprobs for answers in found for each in answers)
    scores = next((each for each in given if each is not None), None)
    after = Stops.of(sampling, grammar).after
    news: list[RequestOutput] = []
    for index, answers in enumerate(found):
        if not answers or (index == 0 and sampling.prompt_logprobs is not None and scores is None):
            continue  # the logs lack the choice or the prompt's logprobs: compute the choice again
        has_entries = sampling.logprobs is not None or (grammar is not None and grammar.field_confidence)
        news.append(_news(request_id, index, answers, has_entries, after, scores if index == 0 else None))
    return [each for each in news if each.token_ids or each.finish_reason]


def _news(
    request_id: str,
    index: int,
    answers: Sequence[ResumedAnswer],
    has_entries: bool,
    after: tuple[int, ...],
    scores: PromptLogprobs | None,
) -> RequestOutput:
    whole = next((each for each in answers if each.reason and not each.was_given_up), None)
    longest = whole or max(answers, key=lambda each: len(each.token_ids))
    token_ids, entries = list(longest.token_ids), None
    if has_entries:
        entries = _joined(answers)[: len(token_ids)]
        if len(entries) < len(token_ids):
            whole, token_ids = None, token_ids[: len(entries)]
    if whole is None:  # the last token may have ended the choice, so this token is computed again
        token_ids = token_ids[:-1]
        entries = None if entries is None else entries[: len(token_ids)]
    logprobs, confidences = split_entries(entries)
    reason, detail = (None, "") if whole is None else (whole.reason, whole.detail)
    return RequestOutput(
        request_id,
        index,
        "",
        token_ids,
        reason,
        after=after,
        logprobs=logprobs,
        detail=detail,
        code=None if whole is None else whole.code,
        prompt_scores=scores if token_ids else None,
        confidences=confidences,
    )


def _joined(answers: Sequence[ResumedAnswer]) -> Logprobs:
    """Join the logs' logprobs, with confidences, up to the first token whose logprobs no log has. Each log
    begins with the token at which its replica continued.
    """
    joined: Logprobs = []
    for each in sorted(answers, key=_num_given):
        if (given := _num_given(each)) <= len(joined):
            joined[given : given + len(each.logprobs or ())] = each.logprobs or []
    return joined


def _num_given(answer: ResumedAnswer) -> int:
    """Return how many output tokens the replica received with the request."""
    return len(answer.queued.outputs) // 4
