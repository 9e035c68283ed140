"""Finds where an answer's reasoning ends, because the answer's grammar applies only after the reasoning.

To make a model reason, a chat template ends the prompt with a start marker such as <think>. The reasoning is
the generated text up to the end marker. The grammar applies to the text after the end marker.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np

from mmengine.errors import FIELD, FieldPath, InvalidRequest, shown
from mmengine.models.plugin import Tokenizer
from mmengine.request import MAX_AFTER, GrammarRequest, ThinkingBudget
from mmengine.serve.prompt.options import Options
from mmengine.structured_output.request.tool_calls import calls_of


class ReasoningTokens(NamedTuple):
    """The marker tokens that separate an answer's reasoning from its content.

    If `is_open`, reasoning begins with the answer's first token. Otherwise there is reasoning only if the
    answer begins with the tokens `start`. The tokens `end` end the reasoning. An empty tuple means that the
    model has no such marker.
    """

    is_open: bool = False
    start: tuple[int, ...] = ()
    end: tuple[int, ...] = ()


NO_REASONING = ReasoningTokens()


def spelled(marker: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return a marker's tokens, or () if the tokenizer cannot encode the marker in at most MAX_AFTER
    tokens.
    """
    ids = tokenizer.encode(marker, allow_special=True) if marker else []
    known = tokenizer.decode(ids, skip_special_tokens=False) == marker
    return tuple(ids) if known and len(ids) <= MAX_AFTER else ()


def reasoning_of(form: GrammarRequest, tokenizer: Tokenizer) -> ReasoningTokens:
    """Return the reasoning markers for an answer whose grammar `form` comes from `Reasoning.settle`."""
    if form.after:
        return ReasoningTokens(True, (), form.after)
    calls = calls_of(form)
    start, end = (calls and calls.reasoning) or ("", "")
    if not end:
        return NO_REASONING
    return ReasoningTokens(False, spelled(start, tokenizer), spelled(end, tokenizer))


class Reasoning:
    """A model's reasoning markers.

    With an empty `end`, the model does not reason. With an empty `start`, an answer has reasoning only if the
    option `reasoning` is True.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int], start: str, end: str):
        self._tokenizer, self._eos_token_ids = tokenizer, frozenset(eos_token_ids)
        self._start_text, self._end_text = start, end

    @cached_property
    def _end(self) -> tuple[int, ...]:
        return self._spelled(self._end_text)

    @cached_property
    def _start(self) -> tuple[int, ...]:
        return self._spelled(self._start_text)

    @property
    def can_end(self) -> bool:
        """Whether the engine can end an answer's reasoning by forcing the end marker."""
        return bool(self._end)

    def tokens(self, options: Options, prompt_token_ids: np.ndarray) -> ReasoningTokens:
        """Return the markers for an answer to this prompt (int32 [n]). Raises the same errors as `settle`."""
        form = self.settle(options, prompt_token_ids).grammar
        if form is not None:
            return reasoning_of(form, self._tokenizer)
        if not self._end:
            return NO_REASONING
        return ReasoningTokens(self.is_open_in(prompt_token_ids), self._start, self._end)

    @cached_property
    def _separators(self) -> np.ndarray:
        """Special tokens outside the markers. Reasoning has none, so each counts as the end of a message."""
        markers = self._tokenizer.encode(self._start_text + self._end_text, allow_special=True)
        return np.array(sorted(self._tokenizer.special_ids.difference(markers)), np.int32)

    def settle(self, options: Options, prompt_token_ids: np.ndarray) -> Options:
        """Return the options. If the grammar begins after reasoning, `grammar.after` is set to the end
        marker.

        Raises InvalidRequest if the grammar should begin after reasoning but the end marker is unknown.
        """
        if options.grammar is None or options.reasoning is False or options.grammar.after:
            return options
        if options.reasoning and not self._end:
            raise InvalidRequest(self._why_not())
        if not options.reasoning and not self.is_open_in(prompt_token_ids):
            return options
        return replace(options, grammar=msgspec.structs.replace(options.grammar, after=self._end))

    def with_budget(self, options: Options, prompt_token_ids: np.ndarray) -> Options:
        """Return the options. If a thinking_token_budget applies to this prompt, `thinking` is set.
        `options`: from `settle`.

        Raises InvalidRequest if the marker that ends reasoning is unknown.
        """
        budget = options.thinking_token_budget
        if budget is None or budget < 0:
            return options
        if not self._end:
            raise InvalidRequest(
                f"{FIELD} needs a marker that ends reasoning and that answers can contain; set "
                "reasoning_end to the model's marker, or leave the budget out",
                path=FieldPath("thinking_token_budget"),
            )
        is_open, start, end = self.tokens(options, prompt_token_ids)
        if not end or not (is_open or start):
            return options  # the answer has no reasoning
        return replace(options, thinking=ThinkingBudget(budget, is_open, start, end))

    def is_open_in(self, prompt_token_ids: np.ndarray) -> bool:
        """Return whether a prompt (int32 [n]) leaves reasoning open.

        Reasoning is open if the prompt's last message has a start marker without a later end marker. A start
        marker in an earlier message, such as a user's, does not count.
        """
        if not self._start_text or not self._end:
            return False
        borders = np.flatnonzero(np.isin(prompt_token_ids, self._separators))
        message = prompt_token_ids[borders[-1] + 1 if len(borders) else 0 :]
        text = self._tokenizer.decode(message.tolist(), skip_special_tokens=False)
        _, start, rest = text.rpartition(self._start_text)
        return bool(start) and self._end_text not in rest

    def _spelled(self, marker: str) -> tuple[int, ...]:
        """Return a marker's tokens.

        Returns () if the tokenizer has no tokens for the marker, or if an answer cannot contain these tokens.
        """
        ids = spelled(marker, self._tokenizer)
        return ids if self._eos_token_ids.isdisjoint(ids) else ()

    def _why_not(self) -> str:
        if not self._end_text:
            return "reasoning true needs a marker that ends reasoning, but the setting reasoning_end is empty"
        return (
            f"reasoning true needs reasoning_end, {shown(self._end_text)}, but this tokenizer has no tokens "
            "for it that an answer can contain; set reasoning_end to the model's marker"
        )
