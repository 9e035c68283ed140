"""Turns the engine's outputs for a prompt into text updates for the prompt's choices."""

from collections.abc import Callable
from typing import NamedTuple

from mmengine.core.executor import PromptLogprobs
from mmengine.errors import ErrorCode, InvalidRequest, QueueFull
from mmengine.events.vocabulary import ANSWERED
from mmengine.models.plugin import Tokenizer
from mmengine.serve.stream.answer_record import AnswerSource
from mmengine.serve.text.choice_deltas import ArgumentError, ChoiceDeltas, Delta
from mmengine.serve.text.request_output import RequestOutput
from mmengine.server.chat.parsed_request import ParsedRequest
from mmengine.server.http.errors import cancelled_error, deadline_error, request_failed_error


class ChoiceUpdate(NamedTuple):
    """New output of the choice with index `number`. A choice's last update has `reason`, the finish
    reason.
    """

    number: int
    delta: Delta
    reason: str | None = None
    stop_reason: str | int | None = None


class PromptStream:
    """A prompt of a call, with its n choices. `first`: the index of the prompt's first choice in the call.

    The owner calls `push` for each output. If the output has a `finish_reason`, the owner then calls `end`.
    """

    def __init__(self, stream: AnswerSource, parsed_request: ParsedRequest, tokenizer: Tokenizer, first: int):
        self.stream, self._asked, self._tokenizer, self.first = stream, parsed_request, tokenizer, first
        self._choices: list[ChoiceDeltas] = []
        self._contents: list[list[str]] = []  # The choices' texts, if the call asks for boxes.
        self.indices = range(first, first + parsed_request.sampling.n)

    def begin(self) -> None:
        """Prepare the choices. Must run after the engine has accepted the prompt, when the tokens that end
        reasoning are known.
        """
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
        self._contents = [[] for _ in self._choices]

    def push(self, output: RequestOutput) -> list[Delta]:
        """Return the text deltas for an output. The text that `end` returns is not included."""
        if self._asked.is_prompt_only:
            return []
        deltas = self._choices[output.index].push(output.token_ids, output.logprobs, output.confidences)
        if self._asked.envelope.boxes is not None:
            self._contents[output.index] += [delta.content for delta in deltas]
        return deltas

    def slow_end(self, output: RequestOutput) -> Callable[[], tuple[ChoiceUpdate]] | None:
        """Return a function that another thread calls instead of `end`, or None if `end` is fast enough for
        the event loop.

        The function also checks the arguments of a finished choice's tool calls, and computes the fields'
        confidences and boxes. The function returns a tuple with `end`'s result.
        """
        choice = self._choices[output.index]
        if not choice.is_slow_to_finish and self._asked.envelope.boxes is None:
            return None
        argument_check = choice.argument_check()
        return lambda: (self.end(output, () if argument_check is None else argument_check()),)

    def end(self, output: RequestOutput, errors: tuple[ArgumentError, ...] = ()) -> ChoiceUpdate:
        """Return a choice's last update, for an output with a `finish_reason`.

        `errors`: the result of the argument check. Raises ApiError, InvalidRequest and QueueFull if the
        answer was aborted.
        """
        choice, reason = self._choices[output.index], output.finish_reason or ""
        if reason not in ANSWERED:
            raise abort_error(self._asked, output)
        index = self.first + output.index
        if self._asked.is_prompt_only:
            return ChoiceUpdate(index, Delta(), "length")
        rest = choice.finish(errors)
        if (plan := self._asked.envelope.boxes) is not None:
            rest = rest._replace(boxes=plan.boxes("".join([*self._contents[output.index], rest.content])))
        return ChoiceUpdate(index, rest, choice.end_reason(reason), choice.stop_reason(output.detail))

    @property
    def prompt_scores(self) -> PromptLogprobs | None:
        """The prompt's logprobs, if the call asks for them. None before the answer has ended."""
        return self.stream.completion.prompt_scores if self.stream.completion else None

    def usage(self) -> tuple[int, int, int]:
        """Return three token counts: output, reasoning, and cached prompt tokens."""
        return (
            sum(choice.num_tokens for choice in self._choices),
            sum(choice.num_reasoning_tokens for choice in self._choices),
            self.stream.completion.num_cached_tokens if self.stream.completion else 0,
        )


def abort_error(parsed_request: ParsedRequest, output: RequestOutput) -> Exception:
    """Return the error for an aborted answer, whose finish reason is not in ANSWERED."""
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
