"""One prompt of a call: its stream, and what its answers say."""

from collections.abc import Callable
from typing import NamedTuple

from mmengine.core.executor import PromptLogprobs
from mmengine.errors import ErrorCode, InvalidRequest, QueueFull
from mmengine.models.plugin import Tokenizer
from mmengine.serve.stream.answer_record import AnswerSource
from mmengine.serve.text.choice_deltas import ArgumentError, ChoiceDeltas, Delta
from mmengine.serve.text.request_output import RequestOutput
from mmengine.server.chat.parsed_request import Asked
from mmengine.server.http.errors import cancelled, failed, late


class Said(NamedTuple):
    """By a choice, of which the number is; with its last word why it ended."""

    number: int
    delta: Delta
    reason: str | None = None
    stop_reason: str | int | None = None


class Turn:
    """One prompt of a call, and its n answers; `first` is the index of the first of them. Of an output
    first `push`, then `end` where it has a `finish_reason`."""

    def __init__(self, stream: AnswerSource, asked: Asked, tokenizer: Tokenizer, first: int):
        self.stream, self._asked, self._tokenizer, self.first = stream, asked, tokenizer, first
        self._choices: list[ChoiceDeltas] = []
        self.indices = range(first, first + asked.sampling.n)

    def begin(self) -> None:
        """The request was accepted: how its reasoning ends is known."""
        asked = self._asked
        self._choices = [
            ChoiceDeltas(
                self._tokenizer,
                asked.sampling,
                self.stream.reasoning,
                self.stream.grammar,
                show_reasoning=asked.show_reasoning,
            )
            for _ in range(asked.sampling.n)
        ]

    def push(self, output: RequestOutput) -> list[Delta]:
        """What is said up to the choice's end."""
        if self._asked.silent:
            return []
        return self._choices[output.index].push(output.token_ids, output.logprobs)

    def look(self, output: RequestOutput) -> Callable[[], tuple[Said]] | None:
        """The `end` where arguments are looked at before it: for a thread, it may take long."""
        look = self._choices[output.index].argument_check()
        return None if look is None else lambda: (self.end(output, look()),)

    def end(self, output: RequestOutput, errors: tuple[ArgumentError, ...] = ()) -> Said:
        """The last word of a choice, of an output with a `finish_reason`. `errors`: what the look found.
        Raises ApiError, InvalidRequest and QueueFull for an answer that was given up."""
        choice, reason = self._choices[output.index], output.finish_reason or ""
        if reason not in ("stop", "length"):
            raise given_up(self._asked, output)
        index = self.first + output.index
        if self._asked.silent:
            return Said(index, Delta(), "length")
        rest = choice.finish(errors)
        return Said(index, rest, choice.end_reason(reason), choice.stop_reason(output.detail))

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


def given_up(asked: Asked, output: RequestOutput) -> Exception:
    """Return the error of an answer that ended with a finish reason other than stop and length."""
    match output.code:
        case ErrorCode.QUEUE_FULL:
            return QueueFull(output.detail)
        case ErrorCode.DEADLINE_EXCEEDED:
            return late()
        case ErrorCode.INVALID_GRAMMAR:
            return InvalidRequest(output.detail, code=output.code)
        case ErrorCode.CANCELLED:
            return cancelled()
    return failed(asked.request_id)
