"""Defines the keyword options for a request, and converts them to validated Options.

`Engine`, `AsyncEngine` and lines in request files accept exactly the keywords in the typed dicts below. The
defaults are in `Options` and `SamplingParams`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import msgspec

from mmengine.decode_errors import decode_error
from mmengine.errors import FIELD, FieldPath, InvalidRequest, shown
from mmengine.repetition_detection import RepetitionDetection
from mmengine.request import (
    MAX_CHOICES,
    PREFILL,
    GrammarRequest,
    Pooling,
    SamplingParams,
    ThinkingBudget,
    check_unicode,
)
from mmengine.serve.prompt.option_names import advice_for_option
from mmengine.serve.prompt.session_turns import SessionPlace
from mmengine.serve.prompt.tools import ToolCallSpec
from mmengine.serve.prompt.vllm_options import VLLM_NAMES
from mmengine.structured_output.json_schema.vocabulary.notes import Note

MAX_ID_CHARS = 200
MAX_DEADLINE_S = 10**6
SHORTEST_DEADLINE_S = 1e-9  # the core's clock counts nanoseconds, and 0 means no deadline


class SamplingOptions(TypedDict, total=False):
    """SamplingParams' fields as keywords. None means the default."""

    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: dict[int, float] | None
    seed: int | None
    stop: str | tuple[str, ...] | list[str] | None
    stop_token_ids: tuple[int, ...] | list[int] | None
    ignore_eos: bool | None
    logprobs: int | None
    n: int | None
    suppress_tokens: tuple[int, ...] | list[int] | None
    bad_words_ids: tuple[tuple[int, ...], ...] | list[list[int]] | None
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] | list[tuple[list[int], float]] | None
    no_repeat_ngram_size: int | None
    typical_p: float | None
    stop_in_min_tokens: bool | None
    prompt_logprobs: int | None
    repetition_detection: RepetitionDetection | dict[str, int] | None


class CacheOptions(TypedDict, total=False):
    """Options that isolate a request or a session from other requests in caches and in the queue. Waiting
    requests from different tenants are scheduled in turns. The command `redact` does not remove the tenant
    from logs, so pass a hash, not a name.
    """

    cache_salt: str
    tenant: str
    adapter: str


class SessionOptions(CacheOptions, total=False):
    """Options for a new session. SessionSettings (serve/requests/sessions.py) documents them and has the
    defaults.
    """

    system: str
    length: int
    keep: int
    template_options: Mapping[str, object] | None
    envelope: bytes


class GenerateOptions(SamplingOptions, CacheOptions, total=False):
    """Options that a call may apply to many prompts.

    `thinking_token_budget` limits an answer's reasoning tokens. `response_format` or `grammar` sets the
    answer's format (docs/how-to/structured_output.md). vLLM's names for these options are also accepted
    (vllm_options.py).
    """

    priority: int
    thinking_token_budget: int | None
    response_format: Any
    grammar: Mapping[str, Any] | None
    structured_outputs: object
    guided_json: object
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None
    guided_json_object: bool | None
    guided_decoding_backend: str | None
    guided_whitespace_pattern: str | None
    structural_tag: object


class SubmitOptions(GenerateOptions, total=False):
    """Options for a single prompt.

    The fields have the same meaning as in Options. `calls`: the prompt's tools and their call format, set by
    chat/completion.py.
    """

    deadline_s: float
    calls: ToolCallSpec | None
    request_id: str
    envelope: bytes
    outputs: Sequence[int]
    sample_index: int


_SAMPLING = SamplingOptions.__optional_keys__
GENERATE = GenerateOptions.__optional_keys__ - _SAMPLING
LINE = GENERATE | {"deadline_s"}  # without request_id, since a line's `custom_id` is the request's id
SUBMIT = SubmitOptions.__optional_keys__ - _SAMPLING
FORM = frozenset({"response_format", "grammar", "calls", *VLLM_NAMES})


@dataclass(frozen=True, slots=True)
class Options:
    """A prompt's validated options.

    * `deadline_s`: seconds after which the request is aborted; 0 for no deadline.
    * `grammar`: the answer's grammar; None for free text. `notes`: remarks for the caller on the response
      format.
    * `reasoning`: whether the grammar begins after the model's reasoning; None if the prompt decides.
    * `max_length`, `min_length`: limits on the tokens in prompt and answer together; 0 for none. `of_prompt`
      converts them to limits on the answer.
    * `envelope`: the caller's bytes, which the log stores with the request.
    * `outputs`: the answer's first token ids, computed by another engine. This engine continues after
      these tokens.
    * `sample_index`: the answer's index if several answers to a prompt are requested separately. The sampling
      noise and the output index are then the same as in a single request with `n`.
    * `prepared_s`: seconds that the prompt's preparation took.
    * `thinking_token_budget`: maximum number of reasoning tokens; None or -1 for no limit. `thinking` is this
      limit together with the model's reasoning markers.
    * `adapter`: the LoRA adapter's name; "" for none.
    * `pooling`: which vector a pooled request computes.
    """

    sampling: SamplingParams = SamplingParams()
    request_id: str = ""
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    deadline_s: float = 0.0
    grammar: GrammarRequest | None = None
    reasoning: bool | None = None
    notes: tuple[Note, ...] = ()
    max_length: int = 0
    min_length: int = 0
    envelope: bytes = b""
    outputs: Sequence[int] = ()
    sample_index: int = 0
    prepared_s: float = 0.0
    thinking_token_budget: int | None = None
    thinking: ThinkingBudget | None = None
    adapter: str = ""
    pooling: Pooling | None = None
    place: SessionPlace | None = None  # how the prompt extends its session, if any

    @property
    def is_prefill(self) -> bool:
        """Whether the prompt is prefilled without generating an answer."""
        return self.sampling == PREFILL

    def at(self, place: SessionPlace, request_id: str) -> "Options":
        """Return the options for a session's request at `place`."""
        return replace(self, place=place, request_id=request_id)

    def after(self, seconds: float) -> "Options":
        """Return the options with `deadline_s` reduced by the `seconds` that preparation took."""
        left_s = max(self.deadline_s - seconds, SHORTEST_DEADLINE_S) if self.deadline_s else 0.0
        return replace(self, deadline_s=left_s, prepared_s=seconds)

    def check(self) -> None:
        """Raise InvalidRequest for the first value that is outside its range."""
        if not self.is_prefill:
            self.sampling.check()
        named = isinstance(self.request_id, str) and self.request_id.isprintable()
        if not named or len(self.request_id) > MAX_ID_CHARS:
            raise InvalidRequest(f"a request id has at most {MAX_ID_CHARS} printable characters")
        if type(self.priority) is not int or abs(self.priority) >= 2**31:
            raise InvalidRequest(
                f"{FIELD} must be an integer of 32 bits, not {self.priority!r}", path=FieldPath("priority")
            )
        if not isinstance(self.cache_salt, str) or len(self.cache_salt) > MAX_ID_CHARS:
            raise InvalidRequest(
                f"{FIELD} must be a string of at most {MAX_ID_CHARS} characters", path=FieldPath("cache_salt")
            )
        check_unicode(("cache_salt",), self.cache_salt)
        if not isinstance(self.tenant, str) or len(self.tenant) > MAX_ID_CHARS:
            raise InvalidRequest(
                f"{FIELD} must be a string of at most {MAX_ID_CHARS} characters", path=FieldPath("tenant")
            )
        check_unicode(("tenant",), self.tenant)
        if not isinstance(self.adapter, str) or len(self.adapter) > MAX_ID_CHARS:
            raise InvalidRequest(
                f"{FIELD} must be a name of at most {MAX_ID_CHARS} characters", path=FieldPath("adapter")
            )
        deadline = self.deadline_s
        if type(deadline) not in (int, float) or not 0 <= deadline <= MAX_DEADLINE_S:
            raise InvalidRequest(
                f"{FIELD} must lie in 0 to {MAX_DEADLINE_S} seconds, not {deadline!r}",
                path=FieldPath("deadline_s"),
            )
        budget = self.thinking_token_budget
        if budget is not None and (type(budget) is not int or not -1 <= budget < 2**31):
            raise InvalidRequest(
                f"{FIELD} must be a number of tokens, or -1 for no limit, not {shown(budget)}",
                path=FieldPath("thinking_token_budget"),
            )
        self._check_outputs()
        if self.grammar is not None:
            _check_ends(self.sampling)
            if self.grammar.field_confidence and self.grammar.closes and self.sampling.stop:
                raise InvalidRequest(
                    f"{FIELD} cannot go with field_confidence and on_truncation close, which replace the "
                    "text from a stop string on; leave out one of them",
                    path=FieldPath("stop"),
                )

    def _check_outputs(self) -> None:
        outputs = self.outputs
        if not isinstance(outputs, Sequence) or not all(
            type(token) is int and 0 <= token < 2**31 for token in outputs
        ):
            raise InvalidRequest(f"{FIELD} must be the answer's first token ids", path=FieldPath("outputs"))
        if outputs and self.sampling.n != 1:
            raise InvalidRequest(
                f"{FIELD} belong to one answer: submit a separate request for each further answer",
                path=FieldPath("outputs"),
            )
        index = self.sample_index
        if type(index) is not int or not 0 <= index < MAX_CHOICES:
            raise InvalidRequest(
                f"{FIELD} must be an integer from 0 to {MAX_CHOICES - 1}, not {shown(index)}",
                path=FieldPath("sample_index"),
            )
        if index and self.sampling.n != 1:
            raise InvalidRequest(
                f"{FIELD} belongs to a single answer: leave it out, or leave out n",
                path=FieldPath("sample_index"),
            )

    def of_prompt(self, num_tokens: int) -> "Options":
        """Return the options for a prompt with `num_tokens` tokens.

        Raises InvalidRequest if no token is left for the answer.
        """
        if not self.max_length and not self.min_length:
            return self
        sampling = self.sampling
        most = self.max_length - num_tokens if self.max_length else sampling.max_tokens
        if most < 1:
            raise InvalidRequest(
                f"max_length is {self.max_length}, but the prompt has {num_tokens} tokens: raise "
                "max_length, or set "
                "max_new_tokens, which counts the answer alone"
            )
        least = min(most, max(sampling.min_tokens, self.min_length - num_tokens))
        sampling = msgspec.structs.replace(sampling, max_tokens=most, min_tokens=least)
        return replace(self, sampling=sampling, max_length=0, min_length=0)


DEFAULT_OPTIONS = Options()


def _check_ends(sampling: SamplingParams) -> None:
    """Raise InvalidRequest for options that conflict with a grammar.

    `stop_token_ids`, `ignore_eos` and `min_tokens` conflict, because the grammar determines the answer's
    end. Options that exclude tokens conflict, because they might exclude every token that the grammar allows.
    """
    for name in ("stop_token_ids", "ignore_eos", "min_tokens"):
        if getattr(sampling, name):
            raise InvalidRequest(
                f"{FIELD} cannot go with a schema or a grammar, which alone decides where the answer ends; "
                "leave it out",
                path=FieldPath(name),
            )
    for name in ("suppress_tokens", "bad_words_ids", "no_repeat_ngram_size"):
        if getattr(sampling, name):
            raise InvalidRequest(
                f"{FIELD} cannot go with a schema or a grammar: it may exclude all tokens that the grammar "
                "allows; leave it out",
                path=FieldPath(name),
            )


def make_options(
    sampling: SamplingParams | None, keywords: Mapping[str, Any], taken: frozenset[str] = SUBMIT
) -> Options:
    """Return checked options from `keywords`. Only names in `taken` and sampling fields are accepted.

    Sampling parameters come from `sampling` or from keywords. `taken` is SUBMIT, LINE or GENERATE.
    serve/text/response_format.py parses the answer's format later, because a large schema takes seconds.
    Raises InvalidRequest.
    """
    fields = {name: value for name, value in keywords.items() if name not in taken}
    if sampling is not None and fields:
        raise InvalidRequest(f"give sampling or keywords, not both ({', '.join(sorted(fields))})")
    others = {name: keywords[name] for name in taken - FORM if name in keywords}
    return Options(make_sampling(fields) if sampling is None else sampling, **others)


def make_sampling(options: Mapping[str, Any]) -> SamplingParams:
    """Return checked sampling parameters from keywords. None means the default.

    Raises InvalidRequest with the field's name.
    """
    if not _SAMPLING.issuperset(options):
        unknown = min(set(options) - _SAMPLING)
        advice = advice_for_option(unknown, _SAMPLING)
        raise InvalidRequest(f"unknown sampling option {unknown!r:.80}; {advice}")
    values = {name: value for name, value in options.items() if value is not None}
    if isinstance(values.get("stop"), str):
        values["stop"] = (values["stop"],)
    try:
        # msgspec needs str_keys because the keys of JSON objects are strings.
        sampling = msgspec.convert(values, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        found = decode_error(error)
        raise InvalidRequest(f"{FIELD}: {found.text}", path=found.path[:1]) from None
    sampling.check_ranges()
    return sampling
