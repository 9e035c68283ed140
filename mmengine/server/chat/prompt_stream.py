"""One prompt of a call: its stream, and what its answers say."""

from collections.abc import Callable
from typing import NamedTuple

from mmengine.core.executor import PromptLogprobs
from mmengine.errors import ErrorCode, InvalidRequest, QueueFull
from mmengine.models.plugin import Tokenizer
from mmengine.serve.stream.answer_record import AnswerSource
from mmengine.serve.text.choice_deltas import ArgumentError, ChoiceDeltas, Delta
from mmengine.serve.text.request_output import RequestOutput
from mmengine.server.chat.parsed_request import ParsedRequest
from mmengine.server.http.errors import cancelled_error, deadline_error, request_failed_error


class ChoiceUpdate(NamedTuple):
    """By a choice, of which the number is; with its last word why it ended."""

    number: int
    delta: Delta
    reason: str | None = None
    stop_reason: str | int | None = None


class PromptStream:
    """One prompt of a call, and its n answers; `first` is the index of the first of them. Of an output
    first `push`, then `end` where it has a `finish_reason`."""

    def __init__(self, stream: AnswerSource, parsed_request: ParsedRequest, tokenizer: Tokenizer, first: int):
        self.stream, self._asked, self._tokenizer, self.first = stream, parsed_request, tokenizer, first
        self._choices: list[ChoiceDeltas] = []
        self.indices = range(first, first + parsed_request.sampling.n)

    def begin(self) -> None:
        """The request was accepted: how its reasoning ends is known."""
        parsed_request = self._asked
        self._choices = [
            ChoiceDeltas(
                self._tokenizer,
                parsed_request.sampling,
                self.stream.reasoning,
                self.stream.grammar,
                show_reasoning=parsed_request.show_reasoning,
            )
            for _ in range(parsed_request.sampling.n)
        ]

    def push(self, output: RequestOutput) -> list[Delta]:
        """What is said up to the choice's end."""
        if self._asked.is_prompt_only:
            return []
        return self._choices[output.index].push(output.token_ids, output.logprobs)

    def argument_check(self, output: RequestOutput) -> Callable[[], tuple[ChoiceUpdate]] | None:
        """The `end` where arguments are looked at before it: for a thread, it may take long."""
        argument_check = self._choices[output.index].argument_check()
        return None if argument_check is None else lambda: (self.end(output, argument_check()),)

    def end(self, output: RequestOutput, errors: tuple[ArgumentError, ...] = ()) -> ChoiceUpdate:
        """The last word of a choice, of an output with a `finish_reason`. `errors`: what the look found.
        Raises ApiError, InvalidRequest and QueueFull for an answer that was given up."""
        choice, reason = self._choices[output.index], output.finish_reason or ""
        if reason not in ("stop", "length"):
            raise abort_error(self._asked, output)
        index = self.first + output.index
        if self._asked.is_prompt_only:
            return ChoiceUpdate(index, Delta(), "length")
        rest = choice.finish(errors)
        return ChoiceUpdate(index, rest, choice.end_reason(reason), choice.stop_reason(output.detail))

    @property
    def prompt_scores(self) -> PromptLogprobs | None:
        """Where asked for, and known at the end."""
        return self.stream.completion.prompt_scores if self.stream.completion else None

    def usage(self) -> tuple[int, int, int]:
        """Tokens of the answers, of their reasoning, and those of the prompt that were cached."""
        return (
            sum(choice.num_tokens for choice in self._choices),
            sum(choice.num_reasoning_tokens for choice in self._choices),
            self.stream.completion.num_cached_tokens if self.stream.completion else 0,
        )


def abort_error(parsed_request: ParsedRequest, output: RequestOutput) -> Exception:
    """Return the error of an answer that ended with a finish reason other than stop and length."""
    match output.code:
        case ErrorCode.QUEUE_FULL:
            return QueueFull(output.detail)
        case ErrorCode.DEADLINE_EXCEEDED:
            return deadline_error()
        case ErrorCode.INVALID_GRAMMAR:
            return InvalidRequest(output.detail, code=output.code)
        case ErrorCode.CANCELLED:
            return cancelled_error()
    return request_failed_error(parsed_request.request_id)
