"""The engines that the `structured` benchmark compares: mmengine and the bare libraries."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from llguidance import LLMatcher

from benchmarks.structured.vocabulary import Vocabulary, tokenizer_of
from mmengine.request import GrammarRequest, Request, SamplingParams
from mmengine.structured_output.engines.llguidance.backend import LLGuidance
from mmengine.structured_output.engines.llguidance.json_schema_lark import schema_grammar
from mmengine.structured_output.request.spec import grammar_of, read_grammar
from mmengine.structured_output.rows.compiler import Compiler
from mmengine.structured_output.rows.rows import RowMatchers

try:
    import xgrammar
except ImportError:  # an optional extra; the other sides are measured without it
    xgrammar = None

NOBODY = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Case:
    """A schema with answers. `schema`: the schema as a user wrote it. `emitted`: the normalized schema.
    `grammar`: a GrammarRequest made from `emitted`.
    """

    name: str
    schema: str
    emitted: str
    grammar: GrammarRequest
    answers: list[list[int]]  # tokens

    @classmethod
    def of(cls, line: str, vocabulary: Vocabulary) -> "Case":
        given = json.loads(line)
        grammar = grammar_of({"type": "json_schema", "json_schema": {"schema": given["schema"]}})
        answers = [
            vocabulary.encode(json.dumps(answer, ensure_ascii=False, separators=(",", ":")))
            for answer in given["answers"]
        ]
        emitted = bytes(read_grammar(grammar).schema).decode()
        return cls(given["name"], json.dumps(given["schema"]), emitted, grammar, answers)


class Refused(Exception):
    """Raised if an engine refuses a schema."""


class Rows(Protocol):
    """Rows that advance together. After `fill`, `bits` (uint32 [n, words]) contains the rows' masks."""

    bits: np.ndarray

    def fill(self) -> None: ...

    def advance(self, token_ids: list[int]) -> None: ...


class Side(Protocol):
    name: str

    def compile(self, case: Case) -> Any:
        """Return the compiled grammar. Raises Refused."""

    def begin(self, compiled: Sequence[Any], said: Sequence[list[int]]) -> Rows:
        """Return a row for each grammar in `compiled`. Row i has consumed the tokens `said[i]`."""


class Ours:
    """mmengine: compiles on the compiler's threads, and fills and advances rows with RowMatchers."""

    name = "mmengine"

    def __init__(self, vocabulary: Vocabulary):
        self._vocab_size = len(vocabulary)
        special = frozenset(vocabulary.special_ids)
        self._backend = LLGuidance(
            lambda: vocabulary.tokens, vocabulary.encode, special, [vocabulary.eos], self._vocab_size
        )
        self._compiler = Compiler(self._backend.compile, deadline_s=600, cache_size=0)

    def compile(self, case: Case) -> Any:
        compilation = self._compiler.get(case.grammar)
        while not compilation.is_done:
            self._compiler.wait(1)
        if compilation.compiled is None:
            raise Refused(compilation.error)
        return compilation.compiled

    def begin(self, compiled: Sequence[Any], said: Sequence[list[int]]) -> Rows:
        return OurRows(self._matchers(compiled, said), len(said))

    def _matchers(self, compiled: Sequence[Any], said: Sequence[list[int]]) -> RowMatchers:
        by_request = {str(row): each for row, each in enumerate(compiled)}
        matchers = RowMatchers(self._backend, by_request.__getitem__, self._vocab_size)
        for row, tokens in enumerate(said):
            request = Request(str(row), NOBODY, SamplingParams())
            matchers.admit(row, request, np.array(tokens, np.int32))
        return matchers


class OurRows:
    def __init__(self, matchers: RowMatchers, count: int):
        self._matchers, self._rows = matchers, list(range(count))

    def fill(self) -> None:
        self.bits, errors = self._matchers.masks(self._rows)
        if errors:
            raise AssertionError(errors)

    def advance(self, token_ids: list[int]) -> None:
        _, errors = self._matchers.advance(self._rows, [[token] for token in token_ids])
        if errors:
            raise AssertionError(errors)


class Following(Ours):
    """mmengine's method for CPUs (runtime/sampling/lazy_masks.py), which computes no masks and only checks
    the sampled token.
    """

    name = "mmengine, following"

    def begin(self, compiled: Sequence[Any], said: Sequence[list[int]]) -> Rows:
        return FollowingRows(self._matchers(compiled, said), len(said))


class FollowingRows:
    # The mask allows all tokens, because `advance` checks the token.
    bits = np.full((1, 2**16), 0xFFFFFFFF, np.uint32)

    def __init__(self, matchers: RowMatchers, count: int):
        self._matchers, self._count = matchers, count

    def fill(self) -> None:
        pass

    def advance(self, token_ids: list[int]) -> None:
        for row, token in enumerate(token_ids):
            num_said, _ = self._matchers.consume_run(row, [token])
            if not num_said:
                raise AssertionError(f"row {row}: token {token} is not allowed")


class BareLLGuidance:
    """llguidance without its executor, because the executor is slower on a single core. `gated`: compile the
    normalized schema instead of the user's schema.
    """

    def __init__(self, vocabulary: Vocabulary, gated: bool):
        self.name = "llguidance" if gated else "llguidance, raw schema"
        self._gated = gated
        self._words = -(-len(vocabulary) // 32)
        self._tokenizer = tokenizer_of(vocabulary)

    def compile(self, case: Case) -> LLMatcher:
        bare = LLMatcher.grammar_from_json_schema
        grammar = schema_grammar(case.emitted) if self._gated else bare(case.schema)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise Refused(matcher.get_error())
        return matcher

    def begin(self, compiled: Sequence[LLMatcher], said: Sequence[list[int]]) -> Rows:
        matchers = [matcher.deep_copy() for matcher in compiled]
        for matcher, tokens in zip(matchers, said, strict=True):
            matcher.consume_tokens(tokens)
        bits = np.empty((len(matchers), self._words), np.uint32)
        return BareRows(matchers, bits)


class BareRows:
    def __init__(self, matchers: list[LLMatcher], bits: np.ndarray):
        self._matchers, self.bits = matchers, bits
        self._num_bytes = bits.strides[0]
        self._places = [bits.ctypes.data + row * self._num_bytes for row in range(len(bits))]

    def fill(self) -> None:
        for matcher, place in zip(self._matchers, self._places, strict=True):
            matcher.unsafe_compute_mask_ptr(place, self._num_bytes)

    def advance(self, token_ids: list[int]) -> None:
        for matcher, token in zip(self._matchers, token_ids, strict=True):
            matcher.consume_token(token)


class BareXGrammar:
    """xgrammar with its default options, on one thread, with the schema as the user wrote it."""

    name = "xgrammar, raw schema"

    def __init__(self, vocabulary: Vocabulary):
        self._vocab_size = len(vocabulary)
        info = xgrammar.TokenizerInfo(
            vocabulary.tokens, vocab_size=len(vocabulary), stop_token_ids=[vocabulary.eos]
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, case: Case) -> Any:
        try:
            return self._compiler.compile_json_schema(case.schema)
        except Exception as error:  # xgrammar raises several kinds
            raise Refused(str(error)) from None

    def begin(self, compiled: Sequence[Any], said: Sequence[list[int]]) -> Rows:
        matchers = [xgrammar.GrammarMatcher(each) for each in compiled]
        for matcher, tokens in zip(matchers, said, strict=True):
            for token in tokens:
                matcher.accept_token(token)
        bits = xgrammar.allocate_token_bitmask(len(matchers), self._vocab_size)
        return XRow(matchers[0], bits) if len(matchers) == 1 else XRows(matchers, bits)


class XRow:
    def __init__(self, matcher: Any, bits: Any):
        self._matcher, self._tensor, self.bits = matcher, bits, bits.numpy().view(np.uint32)

    def fill(self) -> None:
        self._matcher.fill_next_token_bitmask(self._tensor)

    def advance(self, token_ids: list[int]) -> None:
        self._matcher.accept_token(token_ids[0])


class XRows:
    def __init__(self, matchers: list[Any], bits: Any):
        self._matchers, self._tensor, self.bits = matchers, bits, bits.numpy().view(np.uint32)
        self._batch = xgrammar.BatchGrammarMatcher(max_threads=1)

    def fill(self) -> None:
        self._batch.batch_fill_next_token_bitmask(self._matchers, self._tensor)

    def advance(self, token_ids: list[int]) -> None:
        self._batch.batch_accept_token(self._matchers, token_ids)


def all_sides(vocabulary: Vocabulary) -> list[Side]:
    bare = [BareLLGuidance(vocabulary, gated) for gated in (True, False)]
    return [
        Ours(vocabulary),
        Following(vocabulary),
        *bare,
        *([BareXGrammar(vocabulary)] if xgrammar is not None else []),
    ]
