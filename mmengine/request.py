"""A request as the scheduler sees it: prompt tokens, media, LoRA adapter, and the request's options."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Annotated, Literal

import msgspec
import numpy as np

from mmengine.errors import FIELD, ErrorCode, FieldPath, InvalidRequest, shown
from mmengine.repetition_detection import RepetitionDetection

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
# The token that completes a stop string may contain further text: by assumption, at most this many bytes.
STOP_OVERHANG = 16
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_BIAS = 100  # Largest absolute value in logit_bias and sequence_bias.
MAX_CHOICES = 64  # Largest n (answers to one prompt).
MAX_SUPPRESSED = 1024  # Largest number of tokens in suppress_tokens.
MAX_SEQUENCES = 256  # Largest number of sequences in bad_words_ids and sequence_bias together.
MAX_SEQUENCE_TOKENS = 16  # Largest number of tokens in a sequence of bad_words_ids or sequence_bias.
MAX_NGRAM = 64  # Largest no_repeat_ngram_size.
MAX_SEED = 2**63 - 1
CallFormat = Literal["json", "xml"]  # How a model's chat template writes tool calls.
MAX_AFTER = 256  # Largest number of tokens in GrammarRequest.after.


def check_unicode(path: Iterable[str | int], text: str) -> None:
    """Raise InvalidRequest, with `path`, if the text contains an unpaired surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{FIELD} holds an unpaired surrogate at character {error.start}; send valid Unicode", path=path
        ) from None


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling options. `temperature` 0 is greedy. If `seed` is None, a random seed is drawn at submit.

    `logprobs`: number of alternatives to report for each sampled token (None: off). `prompt_logprobs`: number
    of alternatives to report for each prompt token except the first. `n`: number of answers to the prompt;
    each answer has its own sample index.

    The sampler never samples a token in `suppress_tokens`, or a token that completes a sequence in
    `bad_words_ids`. With `no_repeat_ngram_size` n, the answer repeats no n-gram from the prompt or from
    itself. `sequence_bias` holds pairs (tokens, bias). The bias is added to the logit of the pair's last
    token if the pair's other tokens come directly before. With `stop_in_min_tokens`, a stop string also ends
    an answer shorter than `min_tokens`. `repetition_detection` ends an answer that repeats itself.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    suppress_tokens: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    no_repeat_ngram_size: int = 0
    typical_p: float = 1.0
    stop_in_min_tokens: bool = False
    prompt_logprobs: int | None = None
    repetition_detection: RepetitionDetection | None = None

    @property
    def min_stop_tokens(self) -> int:
        """Return how many tokens an answer needs before a stop string may end the answer."""
        return 0 if self.stop_in_min_tokens else self.min_tokens

    def check(self) -> None:
        """Raise InvalidRequest for the first field with a wrong type or out of range."""
        try:
            msgspec.convert(msgspec.to_builtins(self), SamplingParams)
        except (TypeError, msgspec.ValidationError) as error:
            text = f"a sampling option cannot be read: {error}"
            raise InvalidRequest(text, code=ErrorCode.INVALID_TYPE) from None
        self.check_ranges()

    def check_ranges(self) -> None:
        """Raise InvalidRequest for the first field out of range. All types must be right."""
        for name, least, most in _INT_RANGES:
            value = getattr(self, name)
            if not least <= value <= most:
                raise InvalidRequest(
                    f"{FIELD} must be an integer from {least} to {most}, not {shown(value)}",
                    path=FieldPath(name),
                )
        for name, low, high in _FLOAT_RANGES:
            value = getattr(self, name)
            if not low <= value <= high:  # NaN fails this test too.
                raise InvalidRequest(
                    f"{FIELD} must be a number from {low} to {high}, not {shown(value)}", path=FieldPath(name)
                )
        self._check_collections()

    def _check_collections(self) -> None:
        if self.repetition_detection is not None:
            self.repetition_detection.check()
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"{FIELD} {self.min_tokens} is larger than max_tokens {self.max_tokens}",
                path=FieldPath("min_tokens"),
            )
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise InvalidRequest(
                f"{FIELD} must lie in 0 to 2^63 - 1, not {shown(self.seed)}", path=FieldPath("seed")
            )
        for name in ("logprobs", "prompt_logprobs"):
            number = getattr(self, name)
            if number is not None and not 0 <= number <= MAX_LOGPROBS:
                raise InvalidRequest(
                    f"{FIELD} must lie in 0 to {MAX_LOGPROBS}, not {shown(number)}", path=FieldPath(name)
                )
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(
                f"{FIELD} holds at most {MAX_STOP_STRINGS} strings, not {len(self.stop)}",
                path=FieldPath("stop"),
            )
        for text in self.stop:
            if not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
                raise InvalidRequest(
                    f"{FIELD} must hold strings of 1 to {MAX_STOP_STRING_CHARS} characters",
                    path=FieldPath("stop"),
                )
            check_unicode(("stop",), text)
        for name, most in _MOST_TOKENS:
            if len(getattr(self, name)) > most:
                raise InvalidRequest(f"{FIELD} holds at most {most} tokens", path=FieldPath(name))
        for name in ("stop_token_ids", "logit_bias"):
            for token in getattr(self, name):
                if not 0 <= token < 2**31:
                    raise InvalidRequest(
                        f"{FIELD} names the token {shown(token)}, which is no id", path=FieldPath(name)
                    )
        for token, bias in self.logit_bias.items():
            if not abs(bias) <= MAX_BIAS:  # NaN fails this test too.
                raise InvalidRequest(
                    f"{FIELD} of token {token} must lie in -100 to 100, not {bias!r}",
                    path=FieldPath("logit_bias"),
                )
        self._check_sequences()

    def _check_sequences(self) -> None:
        if len(self.bad_words_ids) + len(self.sequence_bias) > MAX_SEQUENCES:
            raise InvalidRequest(
                f"{FIELD} and sequence_bias hold at most {MAX_SEQUENCES} sequences together",
                path=FieldPath("bad_words_ids"),
            )
        sequences = (*self.bad_words_ids, *(each for each, _ in self.sequence_bias))
        for sequence in sequences:
            if not 1 <= len(sequence) <= MAX_SEQUENCE_TOKENS:
                raise InvalidRequest(
                    f"a sequence of bad_words_ids or sequence_bias has 1 to {MAX_SEQUENCE_TOKENS} tokens, "
                    f"not {len(sequence)}",
                    path=FieldPath("bad_words_ids"),
                )
        for token in (*self.suppress_tokens, *(token for sequence in sequences for token in sequence)):
            if not 0 <= token < 2**31:
                raise InvalidRequest(
                    f"{FIELD}, bad_words_ids and sequence_bias name {shown(token)}, which is no token",
                    path=FieldPath("suppress_tokens"),
                )
        for _, bias in self.sequence_bias:
            if not abs(bias) <= MAX_BIAS:  # NaN fails this test too.
                raise InvalidRequest(
                    f"{FIELD} must lie in -{MAX_BIAS} to {MAX_BIAS}, not {bias!r}; "
                    "to ban a sequence, use bad_words_ids",
                    path=FieldPath("sequence_bias"),
                )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidRequest for a token id that a model with `vocab_size` logits does not have."""
        for name, tokens in (
            ("logit_bias", self.logit_bias),
            ("stop_token_ids", self.stop_token_ids),
            ("suppress_tokens", self.suppress_tokens),
            ("bad_words_ids", chain.from_iterable(self.bad_words_ids)),
            ("sequence_bias", chain.from_iterable(tokens for tokens, _ in self.sequence_bias)),
        ):
            highest = max(tokens, default=0)
            if highest >= vocab_size:
                raise InvalidRequest(
                    f"{FIELD} names the token {highest}, but this model's ids end at {vocab_size - 1}; take "
                    "ids of its own tokenizer",
                    path=FieldPath(name),
                )


# Options of a prefill-only request: the engine computes the prompt for a later request and samples nothing.
# Callers cannot send max_tokens 0, which is outside the range below.
PREFILL = SamplingParams(max_tokens=0)

_INT_RANGES = (
    ("max_tokens", 1, 10**7),
    ("min_tokens", 0, 10**7),
    ("top_k", 0, 10**7),
    ("n", 1, MAX_CHOICES),
    ("no_repeat_ngram_size", 0, MAX_NGRAM),
)
_MOST_TOKENS = (
    ("stop_token_ids", MAX_STOP_STRINGS),
    ("logit_bias", MAX_LOGIT_BIAS),
    ("suppress_tokens", MAX_SUPPRESSED),
)
_FLOAT_RANGES = (
    ("temperature", 0.0, 100.0),
    ("top_p", 1e-6, 1.0),
    ("min_p", 0.0, 1.0),
    ("typical_p", 1e-6, 1.0),
    ("repetition_penalty", 1e-2, 100.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
)


class MediaItem(msgspec.Struct, frozen=True, array_like=True):
    """An image or a video in a prompt, as the scheduler sees it.

    `mm_hash`: SHA-256 of the encoder's input. `runs`: (start, length) of each range of prompt positions that
    holds the item's embeddings, in ascending order; a video may have one run per temporal patch. `grid`:
    number of patches (t, h, w). `interval`: seconds between temporal patches, if positions depend on time.
    """

    mm_hash: bytes
    modality: str
    runs: tuple[tuple[int, int], ...]
    grid: tuple[int, int, int]
    interval: float | None = None

    @property
    def num_embeds(self) -> int:
        return sum(length for _, length in self.runs)

    @property
    def start(self) -> int:
        return self.runs[0][0]

    @property
    def end(self) -> int:
        start, length = self.runs[-1]
        return start + length

    def moved(self, by: int) -> "MediaItem":
        """Return the item moved by `by` positions towards the prompt's end."""
        return msgspec.structs.replace(self, runs=tuple((start + by, size) for start, size in self.runs))


_END = attrgetter("end")


def num_before(media: Sequence[MediaItem], position: int) -> int:
    """Return how many items end at or before `position`. The items are in prompt order."""
    return bisect_right(media, position, key=_END)


def run_start(media: Sequence[MediaItem], position: int) -> int:
    """Return the start of the embedding run that `position` splits, or else `position`."""
    index = num_before(media, position)
    if index < len(media):
        for start, length in media[index].runs:
            if start < position < start + length:
                return start
    return position


class Adapter(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter as the scheduler sees it, identified by its contents.

    `digest`: SHA-256 of the adapter's files. `num_bytes`: size of its packed matrices. `visual`: whether the
    adapter changes the encoder's output. `name`: the name in the request; no decision reads the name.
    """

    digest: bytes
    num_bytes: int
    visual: bool = False
    name: str = ""


_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
TokenIds = Annotated[tuple[_TokenId, ...], msgspec.Meta(max_length=MAX_AFTER)]


class GrammarRequest(msgspec.Struct, frozen=True, array_like=True):
    """An answer's grammar. Another process can compile the same grammar from these fields alone.

    structured_output/request/spec.py writes and reads `kind` and `source`. `after`: the grammar begins after
    these consecutive tokens, such as the end of reasoning; (): at the first token. `on_truncation`: at the
    token limit, "close" completes the answer, "length" cuts it off. `max_digits`: maximum number of digits in
    each part of a number, if the schema does not limit the number; 0: no maximum, None: the engine's setting.
    `field_confidence`: whether tokens get a TokenConfidence (token_confidence.py).
    """

    kind: str
    source: str
    after: TokenIds = ()
    on_truncation: Literal["length", "close"] = "length"
    max_digits: int | None = None
    field_confidence: bool = False

    @property
    def closes(self) -> bool:
        return self.on_truncation == "close"


class ThinkingBudget(msgspec.Struct, frozen=True, array_like=True):
    """Limits reasoning to `tokens` tokens. At the limit the engine emits `end`, and the answer continues.

    With `is_open`, the answer begins with reasoning. Otherwise, only an initial `start` begins reasoning.
    """

    tokens: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    is_open: bool
    start: TokenIds
    end: Annotated[TokenIds, msgspec.Meta(min_length=1)]


class Pooling(msgspec.Struct, frozen=True, array_like=True):
    """Selects what a prefill-only request returns about the prompt's last token.

    "embed": the hidden state after the final norm, float32 [hidden_size]. "logits": the logits of
    `token_ids`, float32.
    """

    kind: Literal["embed", "logits"]
    token_ids: Annotated[tuple[_TokenId, ...], msgspec.Meta(max_length=64)] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """A validated request: token ids (int32 [n]), media, and sampling options with a seed.

    `priority`: smaller is more important. `cache_salt`: separates tenants in the prefix cache and the encoder
    cache. `deadline_ns`: time from arrival to cancellation; 0: never. `group`: id of an earlier request with
    the same prompt; this request waits for the earlier request's prefill and shares the prompt's blocks.
    `envelope`: bytes that a server stores in the log with the request. `outputs`: int32 [m], first tokens of
    the answer, sampled by another engine; they count as output tokens, and sampling continues after them.
    `adapter`: the LoRA adapter; None: the base model. `tenant`: the request's owner; waiting requests of
    different tenants take turns. `pooling`: what a prefill-only request returns; None for a request that
    generates tokens.
    """

    request_id: str
    prompt_token_ids: np.ndarray
    sampling: SamplingParams
    media: tuple[MediaItem, ...] = ()
    sample_index: int = 0
    priority: int = 0
    cache_salt: str = ""
    deadline_ns: int = 0
    grammar: GrammarRequest | None = None
    group: str = ""
    envelope: bytes = b""
    thinking: ThinkingBudget | None = None
    outputs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    adapter: Adapter | None = None
    tenant: str = ""
    pooling: Pooling | None = None

    @property
    def visual_adapter(self) -> bytes:
        """Return the adapter's digest if the encoder's output depends on the adapter, else b""."""
        return self.adapter.digest if self.adapter is not None and self.adapter.visual else b""

    @property
    def is_prefill(self) -> bool:
        """Whether the engine only computes the prompt and samples no token."""
        return not self.sampling.max_tokens

    @property
    def closes(self) -> bool:
        """Whether the answer has a grammar and is completed when its budget ends."""
        return self.grammar is not None and self.grammar.closes

    @property
    def stop_reserve(self) -> int:
        """Return an upper limit for the tokens that a stop string cuts off: one token per byte."""
        longest = max((len(text.encode()) for text in self.sampling.stop), default=-STOP_OVERHANG)
        return longest + STOP_OVERHANG

    def budget(self, max_model_len: int) -> int:
        """Return the largest number of tokens that the answer may have."""
        return min(self.sampling.max_tokens, max_model_len - len(self.prompt_token_ids))
