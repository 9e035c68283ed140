"""The xgrammar grammar engine, for grammars that xgrammar enforces exactly. See the setting
`grammar_backend`.

schema.py and regex.py write schemas and regexes as EBNF, without constructs that xgrammar drops or misreads.
This module is imported only on use, because xgrammar imports transformers.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import xgrammar

from mmengine.errors import ErrorCode, InvalidRequest
from mmengine.request import GrammarRequest
from mmengine.structured_output.engines.base import OfTokenizer
from mmengine.structured_output.engines.digit_notes import digit_notes
from mmengine.structured_output.engines.engine_errors import describe_error
from mmengine.structured_output.json_schema.vocabulary.notes import Note
from mmengine.structured_output.request.spec import Choice, Grammar, JsonSchema, Lark, Regex, read_grammar
from mmengine.structured_output.request.structural_tags import StructuralTag
from mmengine.structured_output.request.tool_calls import ToolCalls
from mmengine_xgrammar.order_notes import order_notes
from mmengine_xgrammar.regex import RegexRefused, parse_whole_regex, write_regex
from mmengine_xgrammar.rules import Rules
from mmengine_xgrammar.schema import schema_ebnf

MAX_FORCED = 64  # The search for forced text stops after this many bytes.
MAX_SPELLINGS = 64  # If more tokens are allowed, no text counts as forced.
SHARED_BYTES = 128 * 2**20  # Size in bytes of the mask cache that grammars share.


class XGrammar(OfTokenizer):
    _made: "tuple[xgrammar.GrammarCompiler, Vocabulary] | None" = None

    def compile(self, grammar: GrammarRequest) -> "CompiledGrammar":
        found = read_grammar(grammar)
        if grammar.closes:
            raise InvalidRequest(
                'on_truncation "close" needs the engine llguidance (grammar_backend)',
                code=ErrorCode.INVALID_GRAMMAR,
            )
        source = _ebnf_of(found, grammar.max_digits or 0)
        compiler, vocabulary = self._get_compiler()
        try:
            compiled = compiler.compile_grammar(source)
        except RuntimeError as error:
            raise InvalidRequest(
                f"the grammar cannot be used: {_describe_error(str(error))}", code=ErrorCode.INVALID_GRAMMAR
            ) from None
        return CompiledGrammar(compiled, vocabulary, grammar.after)

    def notes(self, grammar: GrammarRequest) -> tuple[Note, ...]:
        if grammar.kind != "json_schema":
            return ()
        return order_notes(grammar.source) + digit_notes(grammar, counts_in_long=True)

    def fill(
        self, matchers: Sequence["XMatcher"], bits: np.ndarray, drafts: Sequence[list[int]] | None = None
    ) -> None:
        words, place = bits.view(np.int32), 0
        for matcher, ahead in zip(matchers, drafts or [[]] * len(matchers), strict=True):
            matcher.fill(words, place, ahead)
            place += 1 + len(ahead)

    def allows(self, matcher: "XMatcher", token_id: int) -> bool:
        return matcher.validate_tokens([token_id]) == 1

    def take(self, matcher: "XMatcher", token_id: int, last: int) -> bool:
        return matcher.try_consume_tokens([token_id]) == 1

    def forced(self, matcher: "XMatcher", last: int) -> list[int]:
        return matcher.compute_ff_tokens()

    def advance(self, matchers: Sequence["XMatcher"], token_ids: Sequence[int]) -> None:
        for matcher, token in zip(matchers, token_ids, strict=True):
            matcher.consume_token(token)

    def _get_compiler(self) -> "tuple[xgrammar.GrammarCompiler, Vocabulary]":
        with self._lock:
            if self._made is None:
                # xgrammar treats a token without bytes as a special token.
                texts = self._texts(self._tokens_in_vocabulary())
                vocabulary = Vocabulary(texts, self._encode, self.eos_token_ids, self._vocab_size)
                info = xgrammar.TokenizerInfo(
                    texts, vocab_size=self._vocab_size, stop_token_ids=self.eos_token_ids
                )
                compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=SHARED_BYTES)
                self._made = compiler, vocabulary
            return self._made


class Vocabulary(NamedTuple):
    """The tokenizer's vocabulary. `texts`: each token's bytes, b"" for a special token. `encode`: a function
    from text to tokens.
    """

    texts: list[bytes]
    encode: Callable[[str], list[int]]
    eos_token_ids: list[int]
    size: int

    def only(self, words: np.ndarray) -> bytes:
        """Return the longest allowed token's bytes if all other allowed tokens are prefixes of these bytes,
        otherwise b"". `words`: the mask of allowed tokens.
        """
        found = np.flatnonzero(words)
        if len(found) > MAX_SPELLINGS:
            return b""
        tokens = [32 * at + bit for at in found.tolist() for bit in range(32) if words[at] >> bit & 1]
        if not tokens or len(tokens) > MAX_SPELLINGS or any(token >= len(self.texts) for token in tokens):
            return b""
        texts = [self.texts[token] for token in tokens]
        longest = max(texts, key=len)
        return longest if all(text and longest.startswith(text) for text in texts) else b""


class CompiledGrammar:
    shortest = 0

    def __init__(self, compiled: xgrammar.CompiledGrammar, vocabulary: Vocabulary, after: tuple[int, ...]):
        self._compiled, self._vocabulary, self.after = compiled, vocabulary, after

    def closer(self, budget: int, reserve: int = 0) -> None:
        return None

    def matcher(self) -> "XMatcher":
        return XMatcher(xgrammar.GrammarMatcher(self._compiled), self._vocabulary)

    def renew(self, error: str) -> None:
        return None


class XMatcher:
    """A row's grammar state. Implements the interface in mmengine/structured_output/matcher.py."""

    def __init__(self, inner: xgrammar.GrammarMatcher, vocabulary: Vocabulary):
        self._inner, self._vocabulary = inner, vocabulary
        self._error = ""

    def consume_tokens(self, token_ids: list[int]) -> bool:
        return all(self.consume_token(token) for token in token_ids)

    def consume_token(self, token_id: int) -> bool:
        if not self._error and not self._accept(token_id):
            self._error = f"token {token_id} is not allowed here"
        return not self._error

    def try_consume_tokens(self, token_ids: list[int]) -> int:
        """Consume tokens up to the first token that the grammar does not allow. Returns the number of
        consumed tokens. The matcher stays valid.
        """
        taken = 0
        while taken < len(token_ids) and self._may_follow() and self._accept(token_ids[taken]):
            taken += 1
        return taken

    def _accept(self, token_id: int) -> bool:
        """Consume a token, and return whether the grammar allows the token. Only EOS and tokens with text
        reach xgrammar. For other special tokens, xgrammar would print a line on stderr.
        """
        texts = self._vocabulary.texts
        in_text = token_id < len(texts) and texts[token_id]
        return bool(in_text or token_id in self._vocabulary.eos_token_ids) and self._inner.accept_token(
            token_id
        )

    def validate_tokens(self, token_ids: list[int]) -> int:
        """Return the number of tokens that `try_consume_tokens` would consume."""
        taken = self.try_consume_tokens(token_ids)
        if taken:
            self._inner.rollback(taken)
        return taken

    def rollback(self, num_tokens: int) -> None:
        self._inner.rollback(num_tokens)

    def compute_ff_tokens(self) -> list[int]:
        """Return the forced next tokens, as the tokenizer encodes the forced text. Omits the last token,
        because its encoding may depend on the text after it.
        """
        forced = self._forced()
        text = forced.decode(errors="ignore")
        tokens = self._vocabulary.encode(text)[:-1] if text else []
        return tokens[: self.validate_tokens(tokens)]

    def compute_ff_bytes(self) -> bytes:
        return self._forced()

    def _forced(self) -> bytes:
        """Return the forced next bytes, at most about MAX_FORCED. xgrammar's own search has no limit, and a
        schema can force a text with exponential length.
        """
        forced, steps = b"", 0
        words = np.zeros((1, -(-self._vocabulary.size // 32)), np.int32)
        while len(forced) < MAX_FORCED:
            self._fill(words, 0)
            longest = self._vocabulary.only(words[0])
            if not longest or not self._inner.accept_string(longest):
                break
            forced, steps = forced + longest, steps + 1
        if steps:
            self._inner.rollback(steps)
        return forced

    def fill(self, words: np.ndarray, place: int, ahead: Sequence[int] = ()) -> None:
        """Set `words[place]` (int32) to the mask of allowed next tokens. The mask is empty if the text is
        complete. The next entries get the masks after each token in `ahead`, up to the first token that is
        not allowed.
        """
        self._fill(words, place)
        taken = 0
        for token in ahead:
            if not self.try_consume_tokens([token]):
                break
            taken += 1
            self._fill(words, place + taken)
        if taken:
            self._inner.rollback(taken)

    def _fill(self, words: np.ndarray, place: int) -> None:
        if not self._may_follow():
            words[place] = 0
            return
        self._inner.fill_next_token_bitmask(words, place)
        if beyond := self._vocabulary.size % 32:  # Clear bits without a token.
            words[place, -1] &= (1 << beyond) - 1

    def _may_follow(self) -> bool:
        """Return whether xgrammar can compute a mask."""
        return not self._error and not self._inner.is_terminated()

    def compute_bitmask(self) -> bytes:
        """Return the mask of allowed next tokens: token t is bit t % 8 in byte t // 8."""
        words = np.zeros((1, -(-self._vocabulary.size // 32)), np.int32)
        self.fill(words, 0)
        return words.tobytes()

    def deep_copy(self) -> "XMatcher":
        copy = XMatcher(self._inner.fork(), self._vocabulary)
        copy._error = self._error
        return copy

    def is_accepting(self) -> bool:
        """Return whether the text may end here."""
        return not self._error and self._inner.is_completed()

    def is_stopped(self) -> bool:
        """Return whether no token may follow. Computes a mask, because xgrammar has no function for this
        test.
        """
        if not self._may_follow():
            return True
        if not self._inner.is_completed():
            return False
        allowed = np.frombuffer(self.compute_bitmask(), np.uint8).copy()
        for token in self._vocabulary.eos_token_ids:
            allowed[token // 8] &= 0xFF ^ 1 << token % 8
        return not allowed.any()

    def is_error(self) -> bool:
        return bool(self._error)

    def get_error(self) -> str:
        return self._error


def _ebnf_of(grammar: Grammar, max_digits: int) -> str:
    """Return the grammar as EBNF. Raises InvalidRequest for constructs that xgrammar would not enforce
    exactly.
    """
    match grammar:
        case JsonSchema(schema=schema):
            return schema_ebnf(bytes(schema).decode(), max_digits)
        case Regex(regex=regex):
            rules = Rules()
            try:
                return rules.text(write_regex(parse_whole_regex(regex), rules, in_json=False))
            except RegexRefused as error:
                raise InvalidRequest(
                    f"the grammar cannot be used: {error}; the default, llguidance, may support it",
                    code=ErrorCode.INVALID_GRAMMAR,
                ) from None
        case Choice(choices=choices):
            rules = Rules()
            return rules.text(rules.words(list(choices)))
        case Lark():
            raise InvalidRequest(
                "the grammar cannot be used: grammar_backend xgrammar does not read llguidance's Lark; "
                "use a regex, a choice or a schema, or the default grammar_backend",
                code=ErrorCode.INVALID_GRAMMAR,
            )
        case StructuralTag() | ToolCalls():
            raise InvalidRequest(
                "the grammar cannot be used: structural tags and tool calls are enforced by the default "
                "grammar_backend, llguidance, alone",
                code=ErrorCode.INVALID_GRAMMAR,
            )


def _describe_error(error: str) -> str:
    """Return xgrammar's error as a single line, without xgrammar's source position."""
    return describe_error(" ".join(error.split()).rpartition("error at ")[2] or error)
