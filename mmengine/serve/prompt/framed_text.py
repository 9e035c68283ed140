"""Turns a text into a prompt without a chat template, with the tokenizer's special tokens around the text."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmengine.errors import FIELD, ErrorCode, InvalidRequest
from mmengine.models.plugin import Prepared, Processor, Tokenizer
from mmengine.processing.chat.messages import MAX_TEXT_CHARS

CHARS_PER_TOKEN = 8  # The first attempt tokenizes this many characters for each wanted token.
# Tokens to add to the wanted count, because the cut can change the last word's tokens.
SPARE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class FramedText:
    """A text between the strings `before` and `after`. Only these strings may contain special tokens.

    `is_framed`: whether the tokenizer's post-processor adds its tokens, such as BOS or an end marker. `keep`:
    maximum token count for the whole prompt; a longer text is truncated. With 0, a prompt that is too long
    for the model is refused. `head`: the beginning of the text, which is never truncated. `token_ids` replace
    the text if given.
    """

    text: str = ""
    before: str = ""
    after: str = ""
    is_framed: bool = False
    keep: int = 0
    token_ids: Sequence[int] | None = None
    head: str = ""

    def prepare(self, processor: Processor) -> Prepared:
        """Return the prompt's tokens. Raises InvalidRequest if the text is too long or is not Unicode."""
        tokenizer = processor.tokenizer
        if len(self.text) > MAX_TEXT_CHARS:
            raise _too_long(f"{len(self.text)} characters > {MAX_TEXT_CHARS} maximum")
        begin = tokenizer.encode(self.before, allow_special=True) if self.before else []
        end = tokenizer.encode(self.after, allow_special=True) if self.after else []
        if self.is_framed:
            begin = [*getattr(tokenizer, "text_prefix", ()), *begin]
            end = [*end, *getattr(tokenizer, "text_suffix", ())]
        most = processor.max_prompt_tokens
        room = min(self.keep or most, most) - len(begin) - len(end)
        self._check_room(room, len(begin) + len(end), tokenizer)
        if self.token_ids is not None:
            ids = list(self.token_ids)
            if any(not 0 <= token < tokenizer.vocab_size for token in ids):
                text = f"the prompt contains token ids outside 0 to {tokenizer.vocab_size - 1}"
                raise InvalidRequest(text, path=("prompt",))
        else:
            exceeds = getattr(tokenizer, "exceeds", None)
            if not self.keep and exceeds is not None and exceeds(self.text, max(room, 0)):
                raise _too_long(f"more than {most} tokens > {most} maximum")
            ids = _first_tokens(tokenizer, self.text, room) if self.keep else tokenizer.encode(self.text)
        if len(ids) > room and not self.keep:
            raise _too_long(f"{len(begin) + len(ids) + len(end)} tokens > {most} maximum")
        ids = [*begin, *ids[: max(room, 0)], *end]
        if not ids:
            raise InvalidRequest("the text is empty and has no tokens: send a longer text", path=("prompt",))
        return Prepared(np.array(ids, np.int32), (), self.text)

    def _check_room(self, room: int, num_around: int, tokenizer: Tokenizer) -> None:
        """Raise InvalidRequest if a cut to `keep` tokens would remove all text after the head."""
        if not self.keep:
            return
        num_head = min(len(_first_tokens(tokenizer, self.head, max(room, 0))), max(room, 0))
        if room <= num_head:
            raise InvalidRequest(
                f"{FIELD} is {self.keep}, and the prompt has at least {num_around + num_head} tokens beside "
                "the text: raise it",
                path=("truncate_prompt_tokens",),
            )


def _first_tokens(tokenizer: Tokenizer, text: str, count: int) -> list[int]:
    """Return at least the first `count` tokens of a text. A long text is tokenized only in part, unless its
    tokens are unusually long.
    """
    length = CHARS_PER_TOKEN * (count + SPARE_TOKENS)
    while length < len(text):
        ids = tokenizer.encode(text[:length])
        if len(ids) >= count + SPARE_TOKENS:
            return ids
        length *= 2
    return tokenizer.encode(text)


def _too_long(what: str) -> InvalidRequest:
    return InvalidRequest(
        f"prompt is too long: {what}: shorten the text, or set truncate_prompt_tokens",
        code=ErrorCode.CONTEXT_LENGTH_EXCEEDED,
        path=("prompt",),
    )
