"""Implements the grammar engine interface (engines/base.py) with llguidance."""

import os
from collections.abc import Callable, Iterable, Sequence
from ctypes import addressof, c_char
from functools import lru_cache, partial
from itertools import accumulate, repeat

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from mmengine.errors import ErrorCode, InvalidRequest
from mmengine.request import GrammarRequest
from mmengine.structured_output.closing.closer import Closer
from mmengine.structured_output.closing.closings import MAX_CLOSING_TOKENS, Closings
from mmengine.structured_output.closing.hints import hints_of
from mmengine.structured_output.engines.base import OfTokenizer
from mmengine.structured_output.engines.digit_notes import digit_notes
from mmengine.structured_output.engines.engine_errors import PANIC, describe_error, is_panic
from mmengine.structured_output.engines.llguidance.compile_errors import first_step_error, refuse_overlap
from mmengine.structured_output.engines.llguidance.json_schema_lark import schema_grammar
from mmengine.structured_output.engines.llguidance.lark_end_tokens import check_ends
from mmengine.structured_output.engines.llguidance.lark_text import quoted
from mmengine.structured_output.engines.llguidance.tag_grammar import grammars_of
from mmengine.structured_output.engines.llguidance.tool_calls_lark import call_grammars
from mmengine.structured_output.engines.unlimited_numbers import MAX_HELD
from mmengine.structured_output.json_schema.vocabulary.notes import Note
from mmengine.structured_output.request.spec import Choice, Grammar, JsonSchema, Lark, Regex, read_grammar
from mmengine.structured_output.request.structural_tags import StructuralTag
from mmengine.structured_output.request.tool_calls import ToolCalls

MAX_KEPT_CHARS = 256  # Maximum length of a forced text with cached tokens.
MAX_FORCED_CHARS = 4096  # Maximum length of a forced text that is encoded in a step.
MAX_SPELLINGS = 8192  # Maximum number of forced texts with cached tokens.
# Limits on llguidance's work. "Fuel" measures time: 1 ms is about 50,000 units while a matcher starts, and
# 14,000 units in a step. With llguidance's defaults, patterns such as [a-z]{1,255} would fail in the middle
# of an answer. Higher limits are safe for schemas, because normalization limits their patterns. A lexer state
# takes 1 to 2 kB.

# Maximum number of items in a row of the Earley parser's table. Each property that may come next takes four
# items.
MAX_ROW_ITEMS = 20_000
MAX_STEP_ITEMS = 200_000  # Maximum number of items for a mask.
START_FUEL = 3_000_000
STEP_FUEL = 2_000_000  # Fuel for a step with a schema.
TEXT_STEP_FUEL = 200_000  # Fuel for a step with a regex or Lark grammar (llguidance's default).
# llguidance's default. All texts of a grammar share this limit; see CompiledGrammar.renew.
MAX_LEXER_STATES = 250_000
# A matcher, the index of its first mask, and its draft tokens.
MaskRequest = tuple[LLMatcher, int, list[int]]
# llguidance's type stubs lack this method. Arguments: matcher, address, bytes per mask, draft tokens.
_FILL_WITH_DRAFTS: Callable[[LLMatcher, int, int, list[int]], None] = vars(LLMatcher)[
    "unsafe_compute_mask_ptr_with_draft_token"
]


class LLGuidance(OfTokenizer):
    """The llguidance backend. `num_threads` threads compute masks (default: 80 % of the CPUs)."""

    def __init__(
        self,
        token_bytes: Callable[[], Sequence[bytes]],
        encode: Callable[[str], list[int]],
        special_ids: frozenset[int],
        eos_token_ids: Sequence[int],
        vocab_size: int,
        num_threads: int | None = None,
    ):
        super().__init__(token_bytes, encode, special_ids, eos_token_ids, vocab_size)
        self._tokenizer: LLTokenizer | None = None
        self._special_names: dict[str, int] = {}  # Set together with `_tokenizer`.
        self._spellings: dict[tuple[int, bytes], list[int]] = {}
        self._schema_limits, self._text_limits = _limits(STEP_FUEL), _limits(TEXT_STEP_FUEL)
        threads = num_threads or _num_threads()
        # A single worker thread would be slower than the calling thread.
        self._executor = LLExecutor(threads) if threads > 1 else None

    def compile(self, grammar: GrammarRequest) -> "CompiledGrammar":
        try:
            return self._compile(grammar)
        except BaseException as failure:
            if not is_panic(failure):
                raise
            raise InvalidRequest(
                f"the grammar cannot be used: {describe_error(PANIC)}", code=ErrorCode.INVALID_GRAMMAR
            ) from None

    def _compile(self, grammar: GrammarRequest) -> "CompiledGrammar":
        found = read_grammar(grammar)
        make = self._prototypes(found, grammar.max_digits or 0)
        prototype = make()
        if grammar.max_digits and prototype.is_error():
            # A digit limit needs a Lark grammar, which may have too many rules. Try without the limit.
            make = self._prototypes(found, 0)
            prototype = make()
        if len(grammar.source) > MAX_HELD and not prototype.is_error():
            # Compute the slow first mask once without the GIL. Copies of the prototype reuse the work.
            prototype.compute_bitmask()
        error = prototype.get_error() if prototype.is_error() else ""
        # Normalization has already checked that some text matches a schema.
        if not error and not isinstance(found, JsonSchema):
            error = first_step_error(prototype)
        if error:
            refuse_overlap(grammar.source, error)
            raise InvalidRequest(
                f"the grammar cannot be used: {describe_error(error)}", code=ErrorCode.INVALID_GRAMMAR
            )
        if not grammar.closes:
            return CompiledGrammar(prototype, grammar.after, make)
        closings = Closings(self._words(), hints_of(grammar))
        path = closings.shortest(prototype)
        if path is None:
            raise InvalidRequest(
                f'on_truncation "close" is not possible: no answer with at most {MAX_CLOSING_TOKENS} tokens '
                "was found",
                code=ErrorCode.INVALID_GRAMMAR,
            )
        make_closer = partial(Closer, closings, path, self.eos_token_ids)
        closing = make_closer, len(grammar.after) + len(path)
        return CompiledGrammar(prototype, grammar.after, make, closing)

    def _prototypes(self, grammar: Grammar, max_digits: int) -> Callable[[], LLMatcher]:
        """Return a function that returns a new matcher for `grammar`."""
        is_text = isinstance(grammar, Regex | Choice | Lark) or (
            isinstance(grammar, ToolCalls) and any(tool.lark for tool in grammar.tools)
        )
        limits = self._text_limits if is_text else self._schema_limits
        tokens = self._tokens()  # sets the special tokens' names, which `_source_of` needs
        source = self._source_of(grammar, max_digits)
        return partial(LLMatcher, tokens, source, log_level=0, limits=limits)

    def notes(self, grammar: GrammarRequest) -> tuple[Note, ...]:
        """Return a note if the digit limit restricts numbers more than the schema does."""
        return digit_notes(grammar)

    def _source_of(self, grammar: Grammar, max_digits: int) -> str:
        """Return the grammar in llguidance's own format."""
        match grammar:
            case JsonSchema(schema=schema):
                return schema_grammar(bytes(schema).decode(), max_digits)
            case Regex(regex=regex):
                return LLMatcher.grammar_from_regex(regex)
            case Choice(choices=choices):
                literals = map(quoted, choices)
                # The choices form a single terminal, because alternatives in a rule would all be in the
                # parser's table at once.
                return LLMatcher.grammar_from_lark("start: ONE\nONE: " + " | ".join(literals))
            case Lark(lark=lark):
                check_ends(lark, self._special_names, self.eos_token_ids)
                return LLMatcher.grammar_from_lark(lark)
            case StructuralTag():
                return grammars_of(grammar, self._special_names, self.eos_token_ids, max_digits)
            case ToolCalls():
                return call_grammars(grammar, max_digits)

    def fill(
        self, matchers: Sequence[LLMatcher], bits: np.ndarray, drafts: Sequence[list[int]] | None = None
    ) -> None:
        if not matchers:
            return
        start, stride = addressof(c_char.from_buffer(bits.data)), bits.strides[0]
        places: Iterable[int] = range(len(matchers))
        if drafts is not None:
            places = accumulate((1 + len(ahead) for ahead in drafts), initial=0)
        asked = list(zip(matchers, places, drafts if drafts is not None else repeat([])))
        # Masks after drafts are computed with copies, because a matcher may return a wrong cached mask after
        # a rollback.
        copied = ((each.deep_copy() if ahead else each, place, ahead) for each, place, ahead in asked)
        copies = asked if drafts is None else list(copied)
        is_filled = False
        if self._executor is not None:
            try:
                _fill_together(self._executor, copies, (start, stride, len(bits)))
                is_filled = True
            except BaseException as failure:
                _raise_unless_panic(failure)
        if not is_filled:
            self._fill_alone(copies, (start, stride))
        if drafts is not None:
            broken = [each for each, (copy, _, ahead) in zip(asked, copies) if ahead and copy.is_error()]
            # Compute the failed masks again with the original matchers, so the originals report the error.
            self._fill_alone(broken, (start, stride))

    def _fill_alone(self, asked: Iterable[MaskRequest], where: tuple[int, int]) -> None:
        """Compute masks in this thread. `where` is (first mask's address, bytes per mask)."""
        start, stride = where
        for matcher, place, ahead in asked:
            try:
                if ahead:
                    _FILL_WITH_DRAFTS(matcher, start + place * stride, stride, ahead)
                else:
                    matcher.unsafe_compute_mask_ptr(start + place * stride, stride)
            except BaseException as failure:
                _raise_unless_panic(failure)
                self._break(matcher)

    def _break(self, matcher: LLMatcher) -> None:
        """Put the matcher into an error state. A failure in llguidance then ends only the text that caused
        the failure.
        """
        matcher.consume_token(self._vocab_size)  # No grammar allows this token.

    def allows(self, matcher: LLMatcher, token_id: int) -> bool:
        # If tokens are forced, a mask allows only the first forced token.
        forced = matcher.compute_ff_tokens()
        return token_id == forced[0] if forced else matcher.validate_tokens([token_id]) == 1

    def take(self, matcher: LLMatcher, token_id: int, last: int) -> bool:
        text = matcher.compute_ff_bytes()
        # If the forced bytes determine tokens, a mask allows only the first of these tokens.
        if text:
            known = self._spellings.get((last, text))
            if not known or known[0] != token_id:
                forced = self._spell(matcher, text, last)
                if forced and forced[0] != token_id:
                    return False
        return matcher.try_consume_tokens([token_id]) == 1

    def forced(self, matcher: LLMatcher, last: int) -> list[int]:
        text = matcher.compute_ff_bytes()
        if not text:
            return []
        known = self._spellings.get((last, text))
        return self._spell(matcher, text, last) if known is None else known

    def _spell(self, matcher: LLMatcher, text: bytes, last: int) -> list[int]:
        """Return and cache the forced tokens for the forced bytes `text` after the token `last`.

        The last tokens of `text` are left out, because later text could change them. The number of omitted
        tokens depends on the grammar. The cache is safe nevertheless: of two results for the same `text`, the
        longer begins with the shorter.
        """
        tokens = matcher.compute_ff_tokens()
        if len(text) <= MAX_KEPT_CHARS and len(self._spellings) < MAX_SPELLINGS:
            self._spellings[last, text] = tokens
        return tokens

    def advance(self, matchers: Sequence[LLMatcher], token_ids: Sequence[int]) -> None:
        if self._executor is not None:
            self._executor.consume_token_par(list(zip(matchers, token_ids, strict=True)))
            return
        for matcher, token_id in zip(matchers, token_ids, strict=True):
            matcher.consume_token(token_id)

    def _tokens(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._make_tokens()
            return self._tokenizer

    def _make_tokens(self) -> LLTokenizer:
        tokens = self._padded_tokens()
        special = sorted(token for token in self._special_ids if token < self._vocab_size)
        self._special_names = {tokens[token].decode(errors="replace"): token for token in special}
        wrapper = _Tokens(tokens, special, self.eos_token_ids[0], self._encode)
        return LLTokenizer(wrapper, n_vocab=self._vocab_size, eos_token=self.eos_token_ids)


class _Tokens(TokenizerWrapper):
    """The tokenizer attributes that llguidance reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], eos: int, encode: Callable[[str], list[int]]):
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, eos
        self._encode = encode
        self._encode_again = lru_cache(maxsize=4096)(encode)

    def __call__(self, text: str) -> list[int]:
        """Encode text. llguidance calls this method in every step with forced tokens, often with the same
        text.
        """
        if len(text) <= MAX_KEPT_CHARS:
            return self._encode_again(text)
        if len(text) <= MAX_FORCED_CHARS:
            return self._encode(text)
        # Encode only the beginning, because every step encodes the remaining text again. Leave out the tokens
        # at the end, because the following characters may change these tokens.
        beginning = text[:MAX_FORCED_CHARS]
        size = len(beginning[:-MAX_KEPT_CHARS].encode())
        found = self._encode(beginning)
        ends = accumulate(len(self.tokens[token]) for token in found)
        return [token for token, end in zip(found, ends, strict=True) if end <= size]


class CompiledGrammar:
    """A grammar that llguidance has compiled. Matchers are copies of `prototype`.

    `make` returns a new prototype. `closing`: (function that returns a Closer for a token budget, minimum
    budget).
    """

    def __init__(
        self,
        prototype: LLMatcher,
        after: tuple[int, ...],
        make: Callable[[], LLMatcher],
        closing: tuple[Callable[[int, int], Closer], int] | None = None,
    ):
        self._prototype, self.after, self._make = prototype, after, make
        self._make_closer: Callable[[int, int], Closer] | None
        self._make_closer, self.shortest = closing or (None, 0)

    def matcher(self) -> LLMatcher:
        return self._prototype.deep_copy()

    def renew(self, error: str) -> LLMatcher | None:
        """Return a new matcher if `error` says that the shared lexer states (MAX_LEXER_STATES) are used up,
        else None.
        """
        if "too many states" not in error:
            return None
        matcher = self._prototype.deep_copy()
        matcher.compute_bitmask()
        if matcher.is_error():
            self._prototype = self._make()
        return self._prototype.deep_copy()

    def closer(self, budget: int, reserve: int = 0) -> Closer | None:
        if self._make_closer is None:
            return None
        return self._make_closer(budget, max(0, min(reserve, budget - self.shortest)))


def _fill_together(executor: LLExecutor, asked: Sequence[MaskRequest], where: tuple[int, int, int]) -> None:
    """Compute masks with several threads. `where` is (masks' address, bytes per mask, number of masks)."""
    ahead = [each for each in asked if each[2]]
    alone = [(matcher, place) for matcher, place, drafts in asked if not drafts]
    if ahead:
        executor.unsafe_compute_mask_ptr_with_draft_token(ahead, *where)
    if alone:
        executor.unsafe_compute_mask_ptr(alone, *where)


def _raise_unless_panic(failure: BaseException) -> None:
    if not is_panic(failure):
        raise failure


def _limits(step_fuel: int) -> LLParserLimits:
    return LLParserLimits(
        max_items_in_row=MAX_ROW_ITEMS,
        step_max_items=MAX_STEP_ITEMS,
        initial_lexer_fuel=START_FUEL,
        step_lexer_fuel=step_fuel,
        max_lexer_states=MAX_LEXER_STATES,
        verbose_errors=False,
    )


def _num_threads() -> int:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(32, usable * 4 // 5)
