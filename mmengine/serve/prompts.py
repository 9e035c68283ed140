"""What callers pass, turned into what the engine takes: prompts, sampling options, core requests."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mmengine.errors import InvalidRequest
from mmengine.models.plugin import Prepared, Processor
from mmengine.request import Request, SamplingParams

MAX_ID_CHARS = 200
MAX_DEADLINE_S = 10**6
_FIELDS = frozenset(SamplingParams.__struct_fields__)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: chat `messages`, or a `text` that already holds its placeholders.

    `images` and `videos` fill placeholders that carry no data, in order. Relative paths are read
    under `base_folder`. `media_options`: pixel and frame limits for all media of the prompt.
    """

    messages: Sequence[dict[str, Any]] | None = None
    text: str | None = None
    images: Sequence[Any] = ()
    videos: Sequence[Any] = ()
    continue_final_message: bool = False
    base_folder: Path | None = None
    media_options: dict[str, Any] | None = field(default=None)

    @classmethod
    def of(cls, prompt: "Prompt | str | Sequence[dict[str, Any]]") -> "Prompt":
        """A prompt from a question (one user message), a list of messages, or a Prompt itself."""
        if isinstance(prompt, Prompt):
            return prompt
        if isinstance(prompt, str):
            return cls(messages=[{"role": "user", "content": prompt}])
        if isinstance(prompt, (list, tuple)) and all(isinstance(message, dict) for message in prompt):
            return cls(messages=prompt)
        raise InvalidRequest(
            "a prompt is a string, a list of messages with role and content, or a Prompt, "
            f"not {type(prompt).__name__}"
        )

    def prepare(self, processor: Processor, cache_salt: str = "") -> Prepared:
        """Tokens and patches. Raises InvalidRequest, InvalidMedia."""
        if (self.messages is None) == (self.text is None):
            raise InvalidRequest("a prompt needs either messages or text, and not both")
        media = {"images": self.images, "videos": self.videos, "media_options": self.media_options}
        if cache_salt:
            media["cache_salt"] = cache_salt
        if self.text is not None:
            return processor.prepare_text(self.text, **media)
        return processor.prepare(
            self.messages,
            add_generation_prompt=not self.continue_final_message,
            continue_final_message=self.continue_final_message,
            base_folder=self.base_folder,
            **media,
        )


@dataclass(frozen=True, slots=True)
class Options:
    """How to answer one prompt. `deadline_s`: seconds after which it is given up, 0 for never. `grammar`: the
    answer's form, as structured_output.spec.grammar_of writes it; None for free text. `reasoning`: whether
    the form begins behind the model's reasoning; None: where the prompt leaves that open."""

    sampling: SamplingParams = SamplingParams()
    request_id: str = ""
    priority: int = 0
    cache_salt: str = ""
    deadline_s: float = 0.0
    grammar: str | None = None
    reasoning: bool | None = None

    def check(self) -> None:
        """Raise InvalidRequest for the first value that is out of range."""
        self.sampling.check()
        named = isinstance(self.request_id, str) and self.request_id.isprintable()
        if not named or len(self.request_id) > MAX_ID_CHARS:
            raise InvalidRequest(f"a request id has at most {MAX_ID_CHARS} printable characters")
        if type(self.priority) is not int or abs(self.priority) >= 2**31:
            raise InvalidRequest(f"priority must be an integer of 32 bits, not {self.priority!r}")
        if not isinstance(self.cache_salt, str) or len(self.cache_salt) > MAX_ID_CHARS:
            raise InvalidRequest(f"cache_salt must be a string of at most {MAX_ID_CHARS} characters")
        deadline = self.deadline_s
        if type(deadline) not in (int, float) or not 0 <= deadline <= MAX_DEADLINE_S:
            raise InvalidRequest(f"deadline_s must lie in 0 to {MAX_DEADLINE_S} seconds, not {deadline!r}")
        if self.grammar is not None:
            _check_ends(self.sampling)


def _check_ends(sampling: SamplingParams) -> None:
    """Beside a grammar nothing else says where an answer ends: it would be cut, and count as complete."""
    for name in ("stop", "stop_token_ids", "ignore_eos", "min_tokens"):
        if getattr(sampling, name):
            raise InvalidRequest(
                f"{name} cannot go with response_format or grammar, which alone say where an answer ends; "
                "leave it out"
            )


def make_sampling(options: Mapping[str, Any]) -> SamplingParams:
    """Checked sampling parameters from keywords, where None means the default. Raises
    InvalidRequest, naming the field."""
    unknown = sorted(set(options) - _FIELDS)
    if unknown:
        known = ", ".join(sorted(_FIELDS))
        raise InvalidRequest(f"unknown sampling option {unknown[0]!r:.80}; known are {known}")
    values = {name: value for name, value in options.items() if value is not None}
    if isinstance(values.get("stop"), str):
        values["stop"] = (values["stop"],)
    try:
        sampling = msgspec.convert(values, SamplingParams, str_keys=True)  # JSON's keys are strings
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"bad sampling option: {error}") from None
    sampling.check()
    return sampling


def core_requests(request_id: str, prepared: Prepared, options: Options) -> list[Request]:
    """One request for each of the n answers. They share prompt, media and seed; the sample index
    makes their noise differ."""
    seed = options.sampling.seed
    sampling = msgspec.structs.replace(
        options.sampling, n=1, seed=secrets.randbits(63) if seed is None else seed
    )
    count = options.sampling.n
    return [
        Request(
            request_id=name,
            prompt_token_ids=np.asarray(prepared.prompt_token_ids, dtype=np.int32),
            sampling=sampling,
            media=tuple(media.item for media in prepared.media),
            sample_index=index,
            priority=options.priority,
            cache_salt=options.cache_salt,
            deadline_ns=int(options.deadline_s * 1e9),
            grammar=options.grammar,
            group=f"{request_id}/0" if index else "",
        )
        for index, name in enumerate(core_ids(request_id, count))
    ]


def core_ids(request_id: str, count: int) -> list[str]:
    """The ids by which the core knows the answers to one prompt."""
    return [request_id] if count == 1 else [f"{request_id}/{index}" for index in range(count)]


def request_ids() -> Callable[[], str]:
    """A source of ids that no other process hands out."""
    prefix, count = secrets.token_hex(4), 0

    def next_id() -> str:
        nonlocal count
        count += 1
        return f"{prefix}-{count}"

    return next_id
