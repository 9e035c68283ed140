"""Turns a text into a prompt without a chat template, with the tokenizer's special tokens around the text."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmengine.errors import FIELD, ErrorCode, InvalidRequest
from mmengine.models.plugin import Prepared, Processor
from mmengine.processing.chat.messages import MAX_TEXT_CHARS


@dataclass(frozen=True, slots=True)
class FramedText:
    """A text between the strings `before` and `after`. Only these strings may contain special tokens.

    `is_framed`: whether the tokenizer's post-processor adds its tokens, such as BOS or an end marker. `keep`:
    maximum token count for the whole prompt, to which the text is cut. With 0, a prompt that is too long for
    the model is refused. `token_ids` replace the text if given.
    """

    text: str = ""
    before: str = ""
    after: str = ""
    is_framed: bool = False
    keep: int = 0
    token_ids: Sequence[int] | None = None

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
        if self.keep and room < 1:
            raise InvalidRequest(
                f"{FIELD} is {self.keep}, and {len(begin) + len(end)} tokens stand around the text: raise it",
                path=("truncate_prompt_tokens",),
            )
        if self.token_ids is not None:
            ids = list(self.token_ids)
            if any(not 0 <= token < tokenizer.vocab_size for token in ids):
                text = f"the prompt contains token ids outside 0 to {tokenizer.vocab_size - 1}"
                raise InvalidRequest(text, path=("prompt",))
        else:
            exceeds = getattr(tokenizer, "exceeds", None)
            if not self.keep and exceeds is not None and exceeds(self.text, max(room, 0)):
                raise _too_long(f"more than {most} tokens > {most} maximum")
            ids = tokenizer.encode(self.text)
        if len(ids) > room and not self.keep:
            raise _too_long(f"{len(begin) + len(ids) + len(end)} tokens > {most} maximum")
        ids = [*begin, *ids[: max(room, 0)], *end]
        if not ids:
            raise InvalidRequest("the text is empty and has no tokens: send a longer text", path=("prompt",))
        return Prepared(np.array(ids, np.int32), (), self.text)


def _too_long(what: str) -> InvalidRequest:
    return InvalidRequest(
        f"prompt is too long: {what}: shorten the text, or set truncate_prompt_tokens",
        code=ErrorCode.CONTEXT_LENGTH_EXCEEDED,
        path=("prompt",),
    )
