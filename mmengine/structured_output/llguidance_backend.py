"""Grammars by llguidance, for any tokenizer that knows the bytes of its tokens."""

import os
from collections.abc import Callable, Iterable, Sequence
from ctypes import addressof, c_char
from functools import lru_cache, partial
from itertools import accumulate

import msgspec
import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from mmengine.errors import InvalidRequest
from mmengine.structured_output.base import OfTokenizer
from mmengine.structured_output.closer import Closer
from mmengine.structured_output.closing import MAX_CLOSING_TOKENS, Vocabulary
from mmengine.structured_output.engine_words import in_our_words
from mmengine.structured_output.json_schema.refusal import SchemaRefused
from mmengine.structured_output.json_schema_lark import schema_grammar
from mmengine.structured_output.lark_ends import check_ends
from mmengine.structured_output.spec import Choice, Grammar, JsonSchema, Lark, Regex, read_grammar
from mmengine.structured_output.tag_grammar import grammars_of
from mmengine.structured_output.tags import StructuralTag

MAX_KEPT_CHARS = 256  # of a text whose tokens are kept
MAX_SPELLINGS = 8192  # of forced texts that are kept
MAX_ROW_ITEMS = 20_000  # of the parser's table: an object has four for each property that may come next
# A method that the stubs of llguidance leave out: (matcher, address, bytes of a mask, drafts).
_FILL_WITH_DRAFTS: Callable[[LLMatcher, int, int, list[int]], None] = vars(LLMatcher)[
    "unsafe_compute_mask_ptr_with_draft_token"
]


class LLGuidance(OfTokenizer):
    """`num_threads`: how many fill masks; by default four fifths of the CPUs."""

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
        self._vocabulary: Vocabulary | None = None
        self._special_names: dict[str, int] = {}  # filled with it
        self._spellings: dict[tuple[int, bytes], list[int]] = {}
        self._limits = LLParserLimits(verbose_errors=False, max_items_in_row=MAX_ROW_ITEMS)
        threads = num_threads or _num_threads()
        self._executor = LLExecutor(threads) if threads > 1 else None  # one thread is slower than none

    def compile(self, grammar: str) -> "CompiledGrammar":
        tokens = self._tokens()
        found = read_grammar(grammar)
        prototype = LLMatcher(tokens, self._source_of(found), log_level=0, limits=self._limits)
        error = prototype.get_error() if prototype.is_error() else ""
        if not error and not isinstance(found, JsonSchema):  # which the gate knows to have texts
            error = _first_step_error(prototype)
        if error:
            _refuse_overlap(grammar, error)
            raise InvalidRequest(f"the grammar cannot be used: {in_our_words(error)}")
        if found.on_truncation == "length":
            return CompiledGrammar(prototype, found.after)
        vocabulary = self._words()
        path = vocabulary.shortest(prototype)
        if path is None:
            raise InvalidRequest(
                f'on_truncation "close" cannot be kept: no answer of at most {MAX_CLOSING_TOKENS} tokens was '
                "found"
            )
        make_closer = partial(Closer, vocabulary, path, self.eos_token_ids)
        return CompiledGrammar(prototype, found.after, (make_closer, len(found.after) + len(path)))

    def _source_of(self, grammar: Grammar) -> str:
        """The grammar in llguidance's own form."""
        match grammar:
            case JsonSchema(schema=schema):
                return schema_grammar(bytes(schema).decode())
            case Regex(regex=regex):
                return LLMatcher.grammar_from_regex(regex)
            case Choice(choices=choices):
                literals = (msgspec.json.encode(choice).decode() for choice in choices)
                # one terminal: as alternatives of a rule they are all in the parser's table at once
                return LLMatcher.grammar_from_lark("start: ONE\nONE: " + " | ".join(literals))
            case Lark(lark=lark):
                check_ends(lark, self._special_names, self.eos_token_ids)
                return LLMatcher.grammar_from_lark(lark)
            case StructuralTag():
                return grammars_of(grammar, self._special_names, self.eos_token_ids)

    def fill(
        self, matchers: Sequence[LLMatcher], bits: np.ndarray, drafts: Sequence[list[int]] | None = None
    ) -> None:
        if not matchers:
            return
        start, stride = addressof(c_char.from_buffer(bits.data)), bits.strides[0]
        places: Iterable[int] = range(len(matchers))
        if drafts is not None:
            places = accumulate((1 + len(ahead) for ahead in drafts), initial=0)
        if self._executor is not None:
            _fill_together(self._executor, list(zip(matchers, places)), drafts, (start, stride, len(bits)))
            return
        for index, (matcher, place) in enumerate(zip(matchers, places)):
            if drafts is not None and (ahead := drafts[index]):
                _FILL_WITH_DRAFTS(matcher, start + place * stride, stride, ahead)
            else:
                matcher.unsafe_compute_mask_ptr(start + place * stride, stride)

    def allows(self, matcher: LLMatcher, token_id: int) -> bool:
        forced = matcher.compute_ff_tokens()  # where there are any, masks have but the first of them
        return token_id == forced[0] if forced else matcher.validate_tokens([token_id]) == 1

    def take(self, matcher: LLMatcher, token_id: int, last: int) -> bool:
        text = matcher.compute_ff_bytes()
        # Where bytes are forced, masks have but the first of these tokens, if there are any.
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
        """The tokens of what is forced: of the forced `text` those that a longer token cannot take up. So
        they depend on what else the grammar allows behind it, but one of two lists begins the other."""
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

    def _words(self) -> Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._texts(self._padded_tokens()))
            return self._vocabulary

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

    def _padded_tokens(self) -> list[bytes]:
        tokens = self._tokens_in_vocabulary()
        return tokens + [b""] * (self._vocab_size - len(tokens))


class _Tokens(TokenizerWrapper):
    """The attributes by which llguidance reads a tokenizer (its TokenizerWrapper)."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], eos: int, encode: Callable[[str], list[int]]):
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, eos
        self._encode = encode
        self._encode_again = lru_cache(maxsize=4096)(encode)

    def __call__(self, text: str) -> list[int]:
        """Asked in every step where something is forced, mostly for the same keys."""
        return self._encode_again(text) if len(text) <= MAX_KEPT_CHARS else self._encode(text)


class CompiledGrammar:
    """`closing`: what makes a Closer for a budget, and the least that this must be."""

    def __init__(
        self,
        prototype: LLMatcher,
        after: tuple[int, ...],
        closing: tuple[Callable[[int], Closer], int] | None = None,
    ):
        self._prototype, self.after = prototype, after
        self._make_closer: Callable[[int], Closer] | None
        self._make_closer, self.shortest = closing or (None, 0)

    def matcher(self) -> LLMatcher:
        return self._prototype.deep_copy()

    def closer(self, budget: int) -> Closer | None:
        return None if self._make_closer is None else self._make_closer(budget)


def _fill_together(
    executor: LLExecutor,
    placed: list[tuple[LLMatcher, int]],
    drafts: Sequence[list[int]] | None,
    where: tuple[int, int, int],
) -> None:
    """Fill masks by several threads. `placed`: matchers, and the index of the first mask of each. `where`:
    the address of the masks, the bytes of one, and how many there are."""
    if drafts is not None:
        ahead = [(*pair, each) for pair, each in zip(placed, drafts, strict=True) if each]
        placed = [pair for pair, each in zip(placed, drafts, strict=True) if not each]
        if ahead:
            executor.unsafe_compute_mask_ptr_with_draft_token(ahead, *where)
    if placed:
        executor.unsafe_compute_mask_ptr(placed, *where)


def _num_threads() -> int:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(32, usable * 4 // 5)


def _refuse_overlap(grammar: str, error: str) -> None:
    """SchemaRefused where the error is that keys may match two of the patterns of an object: the gate wrote
    beside them where they stand."""
    if not error.startswith("patternProperty regexes"):
        return
    waiting: list[object] = [msgspec.json.decode(grammar)]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            texts = each.get("patternProperties", ()) if "$comment" in each else ()
            if sum(f"/{text}/" in error for text in texts) > 1:
                why = f"{in_our_words(error)}; let no key match both"
                raise SchemaRefused("patternProperties", each["$comment"], why)
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each


def _first_step_error(matcher: LLMatcher) -> str:
    """Why no text can begin, so that it is known before the model runs: nothing is allowed, rules have no
    end, or a first step is beyond the limits. Empty when one can."""
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    if matcher.is_error():
        return matcher.get_error()
    ahead, allowed = matcher.deep_copy(), np.flatnonzero(bits)
    if len(allowed):
        first = int(allowed[0])
        ahead.consume_token(8 * first + int(np.flatnonzero(np.unpackbits(bits[first], bitorder="little"))[0]))
        if not ahead.is_error() and not ahead.is_stopped():
            ahead.compute_bitmask()
    return ahead.get_error() if ahead.is_error() else ""
