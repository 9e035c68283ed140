"""Defines the prompts that callers pass, and converts prepared prompts to requests for the engine core."""

import itertools
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mmengine.errors import ErrorCode, InvalidRequest
from mmengine.models.plugin import Prepared, Processor
from mmengine.request import Adapter, Request
from mmengine.serve.prompt.framed_text import FramedText
from mmengine.serve.prompt.options import DEFAULT_OPTIONS, Options

MAX_LOOKED_AT = 1024  # maximum number of message parts that `has_media` examines
MEDIA_KEYS = frozenset({"image", "image_url", "video", "video_url"})


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt: chat `messages`, a `text` with media placeholders, `token_ids`, or `framed` (see FramedText).

    `images` and `videos` supply the data, in order, for placeholders and message parts without data. Relative
    paths are resolved against `base_folder`. `media_options` limits pixels and frames for all media in the
    prompt. For messages from untrusted clients, pass `media_options={"local_files": False}`, which refuses
    paths to files on this machine. `template_options` has further variables for the chat template.
    """

    messages: Sequence[dict[str, Any]] | None = None
    text: str | None = None
    images: Sequence[Any] = ()
    videos: Sequence[Any] = ()
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    base_folder: Path | None = None
    media_options: dict[str, Any] | None = field(default=None)
    template_options: Mapping[str, Any] | None = None
    token_ids: Sequence[int] | None = None
    framed: FramedText | None = None

    @classmethod
    def of(cls, prompt: "Prompt | str | Sequence[dict[str, Any]]") -> "Prompt":
        """Return a Prompt from a string (a single user message), a message list, or a Prompt."""
        if isinstance(prompt, Prompt):
            return prompt
        if isinstance(prompt, str):
            return cls(messages=[{"role": "user", "content": prompt}])
        if isinstance(prompt, (list, tuple)) and all(isinstance(message, dict) for message in prompt):
            return cls(messages=prompt)
        raise InvalidRequest(
            "a prompt is a string, a list of messages with role and content, or a Prompt, "
            f"not {type(prompt).__name__}; give token ids as Prompt(token_ids=…)"
        )

    @property
    def has_media(self) -> bool:
        """Whether the prompt has images or videos, so that its preparation may take long.

        Only the first MAX_LOOKED_AT parts are examined. A prompt with more parts counts as having media.
        """
        if any(_has_some(given) for given in (self.images, self.videos)):
            return True
        messages = self.messages if isinstance(self.messages, (list, tuple)) else ()
        contents = [message.get("content") for message in messages if isinstance(message, (dict, Mapping))]
        parts = itertools.chain.from_iterable(each for each in contents if isinstance(each, (list, tuple)))
        looked_at = itertools.islice(parts, MAX_LOOKED_AT)
        return any(not _is_text(part) for part in looked_at) or next(parts, None) is not None

    @property
    def processor_options(self) -> dict[str, Any] | None:
        """The media options without `urls`, for a processor. Only prompt_media.py reads `urls`."""
        options = self.media_options
        if not isinstance(options, (dict, Mapping)):
            return options
        return {name: value for name, value in options.items() if name != "urls"}

    def prepare(self, processor: Processor, options: Options = DEFAULT_OPTIONS) -> Prepared:
        """Return the prompt's tokens and patches. Raises InvalidRequest, InvalidMedia."""
        # These keywords are passed only if they are set, because a processor may not support them.
        salt: dict[str, Any] = {"cache_salt": options.cache_salt} if options.cache_salt else {}
        template: dict[str, Any] = {}
        if self.template_options:
            template = {"template_options": self.template_options}
        if [self.text, self.messages, self.token_ids, self.framed].count(None) != 3:
            raise InvalidRequest("a prompt needs one of messages, text and token ids")
        if self.framed is not None:
            return self.framed.prepare(processor)
        if self.token_ids is not None:
            return _of_tokens(self.token_ids, processor)
        if self.text is not None:
            return processor.prepare_text(
                self.text,
                images=self.images,
                videos=self.videos,
                media_options=self.processor_options,
                **salt,
            )
        assert self.messages is not None
        return processor.prepare(
            self.messages,
            images=self.images,
            videos=self.videos,
            add_generation_prompt=self.add_generation_prompt and not self.continue_final_message,
            continue_final_message=self.continue_final_message,
            base_folder=self.base_folder,
            media_options=self.processor_options,
            **salt,
            **template,
        )


PromptInput = Prompt | str | list[dict[str, Any]]  # the types that `Prompt.of` accepts


def prompts_of(prompts: PromptInput | Iterable[PromptInput]) -> Iterator[Prompt]:
    """Yield a prompt for each element. A string, a Prompt or a message list is a single prompt.

    Raises InvalidRequest for a dict, for bytes, and for an object that is not iterable.
    """
    is_chat = isinstance(prompts, (list, tuple)) and all(isinstance(each, dict) for each in prompts)
    is_many = isinstance(prompts, Iterable) and not isinstance(prompts, (str, bytes, bytearray, Mapping))
    given: Any = prompts
    if is_many and not (is_chat and given):
        yield from map(Prompt.of, given)
    else:
        yield Prompt.of(given)


def _of_tokens(token_ids: Sequence[int], processor: Processor) -> Prepared:
    check_token_ids(token_ids, processor.max_prompt_tokens, processor.tokenizer.vocab_size)
    return Prepared(np.array(token_ids, np.int32), (), "")


def check_token_ids(token_ids: Sequence[int], max_tokens: int, vocab_size: int) -> None:
    """Raise InvalidRequest for a prompt that is too long or has token ids outside the vocabulary."""
    if len(token_ids) > max_tokens:
        raise InvalidRequest(
            f"prompt is too long: {len(token_ids)} tokens > {max_tokens} maximum: shorten it",
            code=ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            path=("prompt",),
        )
    if any(type(token) is not int or not 0 <= token < vocab_size for token in token_ids):
        text = f"the prompt contains token ids outside 0 to {vocab_size - 1}"
        raise InvalidRequest(text, path=("prompt",))


def _has_some(given: object) -> bool:
    """Return whether `given` has images or videos. Calling `bool(given)` would fail for a NumPy array."""
    return given is not None and not (isinstance(given, (list, tuple)) and not given)


def _is_text(part: object) -> bool:
    return (
        isinstance(part, (dict, Mapping))
        and part.get("type", "text") == "text"
        and not MEDIA_KEYS & part.keys()
    )


def core_requests(
    request_id: str, prepared: Prepared, options: Options, adapter: Adapter | None = None
) -> list[Request]:
    """Return a core request for each answer.

    The requests share the prompt, the media and the seed. The sample index gives each request different
    sampling noise.
    """
    seed = options.sampling.seed
    sampling = msgspec.structs.replace(
        options.sampling, n=1, seed=secrets.randbits(63) if seed is None else seed
    )
    count = options.sampling.n
    return [
        Request(
            request_id=name,
            prompt_token_ids=np.asarray(prepared.prompt_token_ids, dtype=np.int32),
            sampling=msgspec.structs.replace(sampling, prompt_logprobs=None) if index else sampling,
            media=tuple(media.item for media in prepared.media),
            sample_index=options.sample_index + index,
            priority=options.priority,
            cache_salt=options.cache_salt,
            tenant=options.tenant,
            deadline_ns=int(options.deadline_s * 1e9),
            grammar=options.grammar,
            group=f"{request_id}/0" if index else "",
            envelope=options.envelope,
            thinking=options.thinking,
            outputs=np.asarray(options.outputs, dtype=np.int32),
            adapter=adapter,
            pooling=options.pooling,
        )
        for index, name in enumerate(core_ids(request_id, count))
    ]


def core_ids(request_id: str, count: int) -> list[str]:
    """Return the ids under which the core runs the `count` answers to a prompt."""
    return [request_id] if count == 1 else [f"{request_id}/{index}" for index in range(count)]


def request_ids() -> Callable[[], str]:
    """Return a function that generates request ids from this process's random prefix and a counter."""
    prefix, count = secrets.token_hex(4), 0

    def next_id() -> str:
        nonlocal count
        count += 1
        return f"{prefix}-{count}"

    return next_id
