"""Builds prompts for embedding models and rerankers in their training format.

Sources: Qwen3-Embedding's and Qwen3-Reranker's model cards, and the scripts in Qwen3-VL-Embedding's and
Qwen3-VL-Reranker's folders.
"""

import unicodedata
from collections.abc import Mapping, Sequence

from mmengine.errors import FIELD, FieldPath, InvalidRequest
from mmengine.serve.pooling.pooled_model import PooledModel
from mmengine.serve.prompt.framed_text import FramedText
from mmengine.serve.prompt.prompt import Prompt

# A text, token ids, a list of chat messages, a list of content parts, or a dict with text, image and video.
PoolInput = str | Sequence[object] | Mapping[str, object]
Inputs = str | Mapping[str, object] | Sequence[str | Sequence[object] | Mapping[str, object]]

DEFAULT_INSTRUCTION = "Represent the user's input."
RERANK_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
MEDIA_RERANK_INSTRUCTION = "Given a search query, retrieve relevant candidates that answer the query."
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_BEFORE = f"<|im_start|>system\n{JUDGE}<|im_end|>\n<|im_start|>user\n"
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
NOTHING = "NULL"  # replaces an empty input


def embed_prompt(
    model: PooledModel,
    given: PoolInput,
    *,
    instruction: str | None = None,
    prompt_name: str | None = None,
    keep: int = 0,
    media_options: dict[str, object] | None = None,
) -> Prompt:
    """Return the prompt for an input. The hidden state at the prompt's last token becomes the input's vector.

    `instruction` describes the task in words. `prompt_name` instead chooses a prompt from the model's list. A
    text is truncated to `keep` tokens, or not at all if `keep` is 0. Raises InvalidRequest.
    """
    if instruction is not None and prompt_name is not None:
        raise InvalidRequest("give instruction or prompt_name, not both", path=("instruction",))
    if messages := _messages_of(given):
        _refuse_keep(keep)
        return Prompt(messages=messages, media_options=media_options)
    if (token_ids := _token_ids_of(given)) is not None:
        return Prompt(framed=FramedText(token_ids=token_ids, keep=keep))
    if not model.has_media:
        if (text := _text_of(given)) is None:
            raise InvalidRequest(
                "an input is a text, token ids, or an object with text; this model embeds no images",
                path=("input",),
            )
        before = _text_before(model, instruction, prompt_name)
        return Prompt(framed=FramedText(before + text, is_framed=True, keep=keep, head=before))
    _refuse_keep(keep)
    system = _system(model, instruction, prompt_name)
    return Prompt(
        messages=[
            {"role": "system", "content": [{"type": "text", "text": system}]},
            {"role": "user", "content": _content(given)},
        ],
        media_options=media_options,
    )


def rerank_prompt(
    model: PooledModel,
    query: PoolInput,
    document: PoolInput,
    *,
    instruction: str | None = None,
    keep: int = 0,
    media_options: dict[str, object] | None = None,
) -> Prompt:
    """Return the prompt after which the model generates yes or no.

    The arguments and errors are the same as for `embed_prompt`.
    """
    if not model.has_media:
        pair = _text_of(query), _text_of(document)
        if None in pair:
            raise InvalidRequest(
                "a query or document is a text, or an object with text; this model ranks no images",
                path=("input",),
            )
        instruct = RERANK_INSTRUCTION if instruction is None else instruction
        head = f"<Instruct>: {instruct}\n<Query>: {pair[0]}\n<Document>:"
        return Prompt(framed=FramedText(f"{head} {pair[1]}", _BEFORE, _AFTER, keep=keep, head=head))
    _refuse_keep(keep)
    instruct = MEDIA_RERANK_INSTRUCTION if instruction is None else instruction
    content = [
        {"type": "text", "text": f"<Instruct>: {instruct}"},
        {"type": "text", "text": "<Query>:"},
        *_content(query),
        {"type": "text", "text": "\n<Document>:"},
        *_content(document),
    ]
    return Prompt(
        messages=[
            {"role": "system", "content": [{"type": "text", "text": JUDGE}]},
            {"role": "user", "content": content},
        ],
        media_options=media_options,
    )


def _text_before(model: PooledModel, instruction: str | None, prompt_name: str | None) -> str:
    if instruction is not None:
        return f"Instruct: {instruction}\nQuery:" if instruction else ""
    return model.prompts[_name(model, prompt_name)] if prompt_name or model.default_prompt else ""


def _system(model: PooledModel, instruction: str | None, prompt_name: str | None) -> str:
    if instruction is None:
        named = prompt_name or model.default_prompt
        instruction = model.prompts[_name(model, prompt_name)] if named else DEFAULT_INSTRUCTION
    instruction = instruction.strip()
    ends = instruction and unicodedata.category(instruction[-1]).startswith("P")
    return instruction if ends or not instruction else f"{instruction}."


def _name(model: PooledModel, prompt_name: str | None) -> str:
    name = prompt_name or model.default_prompt
    if name not in model.prompts:
        known = ", ".join(sorted(model.prompts)[:16]) or "none"
        raise InvalidRequest(
            f"{FIELD} {name[:100]!r} is not a prompt of this model; its prompts: {known}",
            path=FieldPath("prompt_name"),
        )
    return name


def _content(given: PoolInput) -> list[dict[str, object]]:
    """Return the parts of a user message. As in the models' training, media come before texts."""
    if isinstance(given, str):
        return [{"type": "text", "text": given or NOTHING}]
    parts: list[object]
    if isinstance(given, Mapping):
        listed = given.get("content")  # vLLM's format for a document with several parts
        parts = (
            listed
            if isinstance(listed, list)
            else [
                {"type": kind, kind: each}
                for kind in ("video", "image", "text")
                for each in _several(given.get(kind))
            ]
        )
    else:
        parts = list(given)
    found = [dict(part) for part in parts if isinstance(part, Mapping)]
    if len(found) < len(parts):
        raise InvalidRequest("an input is a text, token ids, or parts with a type", path=("input",))
    texts = [part for part in found if part.get("type") == "text"]
    media = [part for part in found if part.get("type") != "text"]
    return [*media, *texts] or [{"type": "text", "text": NOTHING}]


def _several(value: object) -> list[object]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def _text_of(given: PoolInput) -> str | None:
    """Return an input's text, or None if the input contains anything besides text."""
    if isinstance(given, Mapping) and set(given) <= {"text", "type"}:
        text = given.get("text")
        return text if isinstance(text, str) else None
    return given if isinstance(given, str) else None


def _messages_of(given: PoolInput) -> list[dict[str, object]]:
    """Return an input's chat messages, or [] if the input has no messages."""
    if isinstance(given, (str, Mapping)):
        return []
    found = [dict(each) for each in given if isinstance(each, Mapping) and "role" in each]
    return found if len(found) == len(given) else []


def _token_ids_of(given: PoolInput) -> list[int] | None:
    if isinstance(given, (str, Mapping)):
        return None
    found = [each for each in given if isinstance(each, int) and not isinstance(each, bool)]
    return found if len(found) == len(given) else None


def _refuse_keep(keep: int) -> None:
    if keep:
        raise InvalidRequest(
            f"{FIELD} is not supported for messages and for models of images; send shorter texts and smaller "
            "images",
            path=FieldPath("truncate_prompt_tokens"),
        )
