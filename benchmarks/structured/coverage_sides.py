"""The engines that benchmarks/structured_coverage.py compares: mmengine, llguidance and xgrammar."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from time import process_time
from typing import Any, Protocol

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from msgspec.structs import replace

from benchmarks.structured.vocabulary import Bytes, Vocabulary, tokenizer_of
from mmengine.errors import InvalidRequest
from mmengine.request import GrammarRequest
from mmengine.structured_output.engines.backends import GRAMMAR_BACKENDS
from mmengine.structured_output.engines.llguidance.backend import LLGuidance
from mmengine.structured_output.engines.llguidance.json_schema_lark import schema_grammar
from mmengine.structured_output.json_schema.normalization import Bounds, normalize_schema
from mmengine.structured_output.request.spec import grammar_of

END = 256  # tokens are bytes, and this token ends a text
Accepts = Callable[[str], bool]


class Refused(Exception):
    """Raised if an engine refuses a schema. `keyword`: the unsupported keyword, or "" if unknown."""

    def __init__(self, why: str, keyword: str = ""):
        super().__init__(why)
        self.keyword = keyword


@dataclass(slots=True)
class Walk:
    """The CPU times of an answer, in seconds. `compile_s`: time for normalizing and compiling the schema.
    `masks_s`: for each token, the time to compute the mask and advance the matcher. `whole`: whether the
    masks allowed all tokens in the answer.
    """

    compile_s: float
    masks_s: list[float] = field(default_factory=list)
    whole: bool = True


class Side(Protocol):
    def judge(self, schema: Any) -> Accepts:
        """Return a function that accepts or rejects texts. Raises Refused."""

    def walk(self, schema: Any, answer: str) -> Walk:
        """Return the times for compiling the schema and for the tokens in `answer`. Raises Refused."""


def _accepts(prototype: LLMatcher) -> Accepts:
    def accepts(text: str) -> bool:
        matcher = prototype.deep_copy()
        for byte in text.encode():
            if matcher.is_stopped() or matcher.validate_tokens([byte]) != 1:
                return False
            matcher.consume_token(byte)
        return matcher.is_accepting()

    return accepts


class _OfLLGuidance:
    def __init__(self, vocabulary: Vocabulary | None):
        self._bytes = tokenizer_of(Bytes())
        self._vocabulary = vocabulary
        self._row = np.zeros((1, -(-len(vocabulary) // 32)), np.uint32) if vocabulary else None

    def _walk(self, compile_s: float, matcher: LLMatcher, answer: str, fill: Callable[[], None]) -> Walk:
        walk = Walk(compile_s)
        assert self._vocabulary is not None
        for token in self._vocabulary.encode(answer):
            begun = process_time()
            fill()
            walk.whole = bool(self._row[0, token >> 5] >> (token & 31) & 1)  # type: ignore[index]
            if not walk.whole:
                break
            matcher.consume_token(token)
            walk.masks_s.append(process_time() - begun)
        return walk


class Ours(_OfLLGuidance):
    def __init__(self, vocabulary: Vocabulary | None = None, ordered: int = 0):
        """Create the engine. `ordered`: in `judge`, objects with at most this many properties keep the
        schema's key order.
        """
        super().__init__(vocabulary)
        self._bounds = replace(Bounds.off(), ordered=ordered)
        if vocabulary is not None:
            special = frozenset(vocabulary.special_ids)
            self._backend = LLGuidance(
                lambda: vocabulary.tokens, vocabulary.encode, special, [vocabulary.eos], len(vocabulary), 1
            )
            # Compile once before the timing, because the first compilation converts the vocabulary.
            self._backend.compile(grammar_of({"type": "json_object"}))

    def judge(self, schema: Any) -> Accepts:
        try:
            text = normalize_schema(schema, self._bounds).text
        except InvalidRequest as error:
            raise Refused(str(error), getattr(error, "keyword", "")) from None
        matcher = LLMatcher(self._bytes, schema_grammar(text), log_level=0)
        if matcher.is_error():
            raise Refused(f"the grammar engine: {matcher.get_error().splitlines()[0]}")
        return _accepts(matcher)

    def walk(self, schema: Any, answer: str) -> Walk:
        begun = process_time()
        try:
            grammar = grammar_of({"type": "json_schema", "json_schema": {"schema": schema}})
            compiled = self._backend.compile(grammar)
        except InvalidRequest as error:
            raise Refused(str(error), getattr(error, "keyword", "")) from None
        compile_s = process_time() - begun
        matcher = compiled.matcher()
        return self._walk(compile_s, matcher, answer, lambda: self._backend.fill([matcher], self._row))


class BareLLGuidance(_OfLLGuidance):
    def __init__(self, vocabulary: Vocabulary | None = None):
        super().__init__(vocabulary)
        self._tokens = tokenizer_of(vocabulary) if vocabulary is not None else None

    def judge(self, schema: Any) -> Accepts:
        return _accepts(self._compile(schema, self._bytes))

    def walk(self, schema: Any, answer: str) -> Walk:
        begun = process_time()
        prototype = self._compile(schema, self._tokens)
        compile_s = process_time() - begun
        matcher = prototype.deep_copy()
        where, size = self._row.ctypes.data, self._row.strides[0]  # type: ignore[union-attr]
        return self._walk(compile_s, matcher, answer, lambda: matcher.unsafe_compute_mask_ptr(where, size))

    def _compile(self, schema: Any, tokenizer: LLTokenizer | None) -> LLMatcher:
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise Refused(matcher.get_error().splitlines()[0])
        return matcher


class BareXGrammar:
    """xgrammar with its default options, on one thread."""

    def __init__(self, vocabulary: Vocabulary | None = None):
        import xgrammar  # lazy: an optional extra

        self._library, self._vocabulary = xgrammar, vocabulary
        self._of_bytes = self._compiler(Bytes())
        self._of_tokens = None if vocabulary is None else self._compiler(vocabulary)

    def _compiler(self, vocabulary: Vocabulary) -> Any:
        info = self._library.TokenizerInfo(
            vocabulary.tokens, vocab_size=len(vocabulary), stop_token_ids=[vocabulary.eos]
        )
        return self._library.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def _compile(self, compiler: Any, schema: Any) -> Any:
        try:
            return compiler.compile_json_schema(json.dumps(schema))
        except Exception as error:  # xgrammar raises several kinds
            raise Refused(str(error).splitlines()[0] if str(error) else type(error).__name__) from None

    def judge(self, schema: Any) -> Accepts:
        compiled = self._compile(self._of_bytes, schema)

        def accepts(text: str) -> bool:
            matcher = self._library.GrammarMatcher(compiled)
            return all(matcher.accept_token(token) for token in [*text.encode(), END])

        return accepts

    def walk(self, schema: Any, answer: str) -> Walk:
        begun = process_time()
        compiled = self._compile(self._of_tokens, schema)
        walk = Walk(process_time() - begun)
        assert self._vocabulary is not None
        matcher = self._library.GrammarMatcher(compiled)
        mask = self._library.allocate_token_bitmask(1, len(self._vocabulary))
        for token in self._vocabulary.encode(answer):
            begun = process_time()
            matcher.fill_next_token_bitmask(mask)
            walk.whole = matcher.accept_token(token)
            if not walk.whole:
                break
            walk.masks_s.append(process_time() - begun)
        return walk


class OursByXGrammar:
    """mmengine with the grammar backend xgrammar. Only judges texts; `walk` raises Refused."""

    def __init__(self, vocabulary: Vocabulary | None = None):
        held = Bytes()
        self._backend = GRAMMAR_BACKENDS.load("xgrammar")(
            lambda: held.tokens, held.encode, frozenset(held.special_ids), (held.eos,), len(held)
        )

    def judge(self, schema: Any) -> Accepts:
        try:
            compiled = self._backend.compile(
                GrammarRequest("json_schema", normalize_schema(schema, Bounds.off()).text)
            )
        except InvalidRequest as error:
            raise Refused(str(error), getattr(error, "keyword", "")) from None

        def accepts(text: str) -> bool:
            matcher = compiled.matcher()
            return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()

        return accepts

    def walk(self, schema: Any, answer: str) -> Walk:
        raise Refused("this side is not timed")


def _in_order(vocabulary: Vocabulary | None, ordered: int) -> Ours:
    """Return mmengine with `Bounds.ordered` set to `ordered`. Only `judge` works; `vocabulary` is unused."""
    return Ours(None, ordered)


SIDES: dict[str, Callable[[Vocabulary | None], Side]] = {
    "mmengine": Ours,
    **{f"mmengine/ordered={least}": partial(_in_order, ordered=least) for least in (1, 4, 64)},
    "mmengine/xgrammar": OursByXGrammar,
    "llguidance": BareLLGuidance,
    "xgrammar": BareXGrammar,
}
