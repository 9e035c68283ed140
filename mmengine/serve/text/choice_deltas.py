"""Converts an answer's tokens to deltas: the pieces of text and tool calls in a stream.

The deltas depend only on the tokens, not on the steps that sampled them. So a stream that is sent again from
the log has the same deltas.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from mmengine.core.executor import CUT, REPETITION, REPETITION_CLOSED
from mmengine.events.vocabulary import ANSWERED
from mmengine.models.box_unit import Box
from mmengine.models.plugin import Tokenizer
from mmengine.request import GrammarRequest, SamplingParams
from mmengine.serve.text.detokenizer import TextStream, UntilStop
from mmengine.serve.text.field_confidence import answer_confidence
from mmengine.serve.text.reasoning import ReasoningTokens
from mmengine.serve.text.request_output import RequestOutput
from mmengine.serve.text.tool_call_parser import CallDelta, ToolCallParser
from mmengine.structured_output.field_confidence.fields import FieldConfidence
from mmengine.structured_output.json_schema.validation import find_violation
from mmengine.structured_output.request.tool_calls import calls_of
from mmengine.token_confidence import TokenConfidence

# (token id, logprob) for the sampled token, then for the most likely tokens.
Entry = tuple[tuple[int, float], ...]

# If an answer has more tokens, confidences are computed on another thread: 10,000 tokens take 0.1 s.
MANY_SCORED_TOKENS = 256
# vLLM's stop_reason for an answer that ended because of a repetition.
REPETITION_DETECTED = "repetition_detected"
# Values of `Choice.detail` for answers that a stop string may have ended.
_AT_STOP = ("string", CUT, "closed")


class ArgumentError(msgspec.Struct, frozen=True):
    """An error in a tool call's arguments. `call`: the tool call's index."""

    call: int
    message: str


class Delta(NamedTuple):
    """New text for an answer: content, reasoning, or a tool call's piece.

    `logprobs`: for the tokens since the previous delta. `num_tokens`: number of the answer's tokens so far.
    `call`: a tool call's new piece.
    `markers`: indices in `logprobs` of the tokens that begin or end reasoning; these tokens have no text.
    Only the last delta has `argument_errors` (for calls without an enforced schema) and `field_confidence`
    (if requested).
    """

    content: str = ""
    reasoning: str = ""
    logprobs: tuple[Entry, ...] = ()
    num_tokens: int = 0
    call: CallDelta | None = None
    argument_errors: tuple[ArgumentError, ...] = ()
    markers: tuple[int, ...] = ()
    field_confidence: dict[str, FieldConfidence] | None = None
    boxes: dict[str, Box] | None = None  # Set only by the server.


# (delta, finish_reason, stop_reason). Only the last delta has reasons.
ChoiceDelta = tuple[Delta, str | None, str | int | None]


class ChoiceDeltas:
    """Builds an answer's deltas.

    Stop strings do not apply to tool calls. With a `grammar`, they do not apply to reasoning either. With
    `show_reasoning` False, reasoning is counted but not shown.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        reasoning: ReasoningTokens,
        grammar: GrammarRequest | None = None,
        *,
        show_reasoning: bool = True,
    ):
        self._tokenizer, self._markers = tokenizer, reasoning
        self._stop, self._min_tokens = sampling.stop, sampling.min_stop_tokens
        self._has_form, self._closes = grammar is not None, grammar is not None and grammar.closes
        self._calls = calls = calls_of(grammar)
        self._show_reasoning = show_reasoning
        self._parser = None if calls is None else ToolCallParser(calls)
        # Applies stop strings to the text between tool calls.
        self._until = UntilStop(self._stop, self._closes)
        self._loose = {tool.name: tool for tool in calls.tools if not tool.is_enforced} if calls else {}
        # names and arguments of calls without enforced schemas
        self._loose_calls: dict[int, tuple[str, list[str]]] = {}
        self.num_tokens = self.num_reasoning_tokens = 0
        self._entries: list[Entry] = []  # logprobs of tokens without a delta yet
        self._marked: list[int] = []  # indices in `_entries` of reasoning marker tokens
        self._held: list[int] = []  # tokens that may be the beginning of a marker
        self._last = 0
        self._scored = grammar if grammar is not None and grammar.field_confidence else None
        # Not `grammar.after`: `Reasoning.settle` sets this field only in the engine's copy.
        self._after = reasoning.end if reasoning.is_open else ()
        self._confidences: list[TokenConfidence] = []  # entries for the last tokens in `_tokens`
        self._tokens: list[int] = []  # all tokens, if the request asks for confidences
        self._opens = bool(reasoning.start) and not reasoning.is_open  # the answer may begin with a marker
        self._reasons = reasoning.is_open
        # Whether the answer has neither reasoning nor tool calls.
        self._is_text = not (self._opens or self._reasons or calls)
        self._stream = self._new_stream()

    def _new_stream(self) -> TextStream:
        stop = () if self._parser is not None or (self._has_form and self._reasons) else self._stop
        min_tokens = max(0, self._min_tokens - self.num_tokens)
        return TextStream(self._tokenizer, stop=stop, min_tokens=min_tokens, closes=self._closes)

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text. With `grammar.closes`, later tokens complete the JSON
        value.
        """
        return self._stream.stopped or self._until.stopped

    @property
    def cut_off(self) -> str:
        """The stop string that ended the text, and the generated text after it."""
        return self._stream.cut_off or self._until.cut_off

    def take(self, output: RequestOutput) -> Iterator[ChoiceDelta]:
        """Yield the deltas for an output from the engine. The last delta is yielded only if the finish
        reason is in ANSWERED, not for a failed or aborted answer.
        """
        for delta in self.push(output.token_ids, output.logprobs, output.confidences):
            yield delta, None, None
        if (reason := output.finish_reason) in ANSWERED:
            look = self.argument_check()
            rest = self.finish(() if look is None else look())
            yield rest, self.end_reason(reason), self.stop_reason(output.detail)

    def push(
        self,
        token_ids: Sequence[int],
        entries: Sequence[Entry] | None = None,
        confidences: Sequence[TokenConfidence] | None = None,
    ) -> list[Delta]:
        """Return the deltas for these tokens."""
        found = []
        if self._scored is not None:
            self._tokens += token_ids
            self._confidences += confidences or ()
        if self._is_text and entries is None:
            for token in token_ids:
                self._last = token
                self.num_tokens += 1
                if text := self._stream.push((token,)):
                    found.append(Delta(text, "", (), self.num_tokens))
            return found
        for place, token in enumerate(token_ids):
            self._last = token
            if entries is not None:
                self._entries.append(entries[place])
            self.num_tokens += 1
            content, reasoning = self._take(token)
            if self._reasons:
                self.num_reasoning_tokens = self.num_tokens
            if reasoning and not self._show_reasoning:
                reasoning, self._entries, self._marked = "", [], []
            found += self._deltas(content, reasoning)
        return found

    def _deltas(self, content: str, reasoning: str = "") -> list[Delta]:
        """Return a delta for each piece of text or of a tool call, up to a stop string."""
        if self._parser is None:
            return [self._delta(content, reasoning)] if content or reasoning else []
        found = [self._delta("", reasoning)] if reasoning else []
        for piece in self._parser.push(content):
            if isinstance(piece, str):
                text = self._until.push(piece, counts=self.num_tokens > self._min_tokens)
            else:
                text = self._until.finish()
            if text:
                found.append(self._delta(text))
            if self._until.stopped:  # the text that completes a JSON value has no tool calls
                self._parser, self._stream = None, TextStream(self._tokenizer)
                break
            if not isinstance(piece, str):
                found.append(self._delta(call=piece))
                self._note(piece)
        return found

    def _delta(self, content: str = "", reasoning: str = "", call: CallDelta | None = None) -> Delta:
        entries, self._entries = tuple(self._entries), []
        markers, self._marked = tuple(self._marked), []
        return Delta(content, reasoning, entries, self.num_tokens, call, markers=markers)

    def _note(self, piece: CallDelta) -> None:
        """Collect the arguments of calls without an enforced schema, for `argument_check`."""
        if piece.name in self._loose:
            self._loose_calls[piece.number] = piece.name, []
        elif piece.number in self._loose_calls:
            self._loose_calls[piece.number][1].append(piece.arguments)

    @property
    def is_slow_to_finish(self) -> bool:
        """Whether `argument_check` and `finish` should run on another thread because they may take long."""
        return bool(self._loose_calls) or len(self._tokens) > MANY_SCORED_TOKENS

    def argument_check(self) -> Callable[[], tuple[ArgumentError, ...]] | None:
        """Return a function that checks the arguments of calls without an enforced schema, or None without
        such calls. Call this method at the answer's end. The function returns the errors and may run on any
        thread.
        """
        if not self._loose_calls:
            return None
        calls = {
            number: (self._loose[name].given, pieces) for number, (name, pieces) in self._loose_calls.items()
        }
        return partial(_argument_errors, calls)

    def finish(self, argument_errors: tuple[ArgumentError, ...] = ()) -> Delta:
        """Return the last delta, with the remaining text. `argument_errors`: the result of `argument_check`'s
        function.
        """
        text = self._stream.push(self._held) + self._stream.finish()
        self._held = []
        given = self._scored, self._tokens, self._confidences, self._after
        fields = answer_confidence(self._tokenizer, *given)
        if self._reasons:
            return self._delta("", text if self._show_reasoning else "")._replace(field_confidence=fields)
        if self._parser is not None:
            # `text` is at most an incomplete character, which neither begins nor ends a call.
            pieces = [*self._parser.push(text), self._parser.finish()]
            text = "".join(self._until.push(piece) for piece in pieces if isinstance(piece, str))
            text += self._until.finish()
        return self._delta(text)._replace(argument_errors=argument_errors, field_confidence=fields)

    def end_reason(self, reason: str) -> str:
        """Return OpenAI's finish_reason for the engine's finish reason, which must be in ANSWERED."""
        if reason == "stop" and self._parser is not None and self._parser.num_calls:
            return "stop" if self._calls is not None and self._calls.choice == "named" else "tool_calls"
        return reason

    def stop_reason(self, detail: str) -> str | int | None:
        """Return vLLM's stop_reason: the stop string or token that ended the answer, REPETITION_DETECTED, or
        None. `detail`: the last output's `detail`.
        """
        if detail in _AT_STOP:
            return self._stream.stopped_by or self._until.stopped_by or None
        if detail in (REPETITION, REPETITION_CLOSED):
            return REPETITION_DETECTED
        return self._last if detail == "token" else None

    def _take(self, token: int) -> tuple[str, str]:
        """Return the content and the reasoning that a token completes."""
        if not self._opens and not self._reasons:
            return self._stream.push((token,)), ""
        marker = self._markers.start if self._opens else self._markers.end
        self._held.append(token)
        if tuple(self._held) == marker:
            return "", self._cross()
        free = 0
        while tuple(self._held[free:]) != marker[: len(self._held) - free]:
            free += 1
        tokens, self._held = self._held[:free], self._held[free:]
        if not tokens:
            return "", ""
        if self._opens:  # an answer that does not begin with the marker has no reasoning
            self._opens = False
            tokens, self._held = tokens + self._held, []
            return self._stream.push(tokens), ""
        return "", self._stream.push(tokens)

    def _cross(self) -> str:
        """Enter or leave reasoning after a complete marker. Returns the remaining reasoning text."""
        count = len(self._entries)
        self._marked += range(max(0, count - len(self._held)), count)
        rest = self._stream.finish() if self._reasons else ""
        self._reasons, self._opens, self._held = self._opens, False, []
        self._stream = self._new_stream()
        return rest


def _argument_errors(calls: Mapping[int, tuple[msgspec.Raw, list[str]]]) -> tuple[ArgumentError, ...]:
    """Return the errors in calls' arguments. `calls`: (schema, text pieces) by call index."""
    found = []
    for number, (schema, pieces) in calls.items():
        violation = find_violation(msgspec.json.decode(schema), "".join(pieces))
        if violation:
            found.append(ArgumentError(number, violation))
    return tuple(found)
