"""Builds the records that transformers' pipeline returns: the prompt with the generated text or tokens."""

from mmengine.errors import InvalidRequest
from mmengine.models.plugin import Tokenizer
from mmengine.serve.pipeline.generation_keywords import Keywords
from mmengine.serve.pipeline.inputs import Chat, Message
from mmengine.serve.text.request_output import Choice, Completion

TENSORS, NEW_TEXT, FULL_TEXT = "TENSORS", "NEW_TEXT", "FULL_TEXT"  # transformers' ReturnType
RAW_TEXT = "RAW_TEXT"  # prompt and answer as one text, for any other return_type


def return_type(options: Keywords) -> str:
    """Return the kind of record that a call requests: TENSORS, NEW_TEXT, FULL_TEXT or RAW_TEXT."""
    kind = options.get("return_type")
    if kind is not None:
        name = str(getattr(kind, "name", ""))
        return name if name in (TENSORS, NEW_TEXT, FULL_TEXT) else RAW_TEXT
    if options.get("return_full_text") is not None:
        if options.get("return_tensors") is not None:
            raise InvalidRequest("return_full_text and return_tensors exclude each other")
        return FULL_TEXT if options["return_full_text"] else NEW_TEXT
    return TENSORS if options.get("return_tensors") is not None else FULL_TEXT


def continues(chat: Chat, continue_final: bool | None) -> bool:
    """Return whether the answer continues the chat's last message."""
    if continue_final is not None:
        return continue_final
    return bool(chat) and chat[-1].get("role") == "assistant"


Record = dict[str, object]


class Recorder:
    """Builds the records for a call's answers."""

    def __init__(self, tokenizer: Tokenizer, options: Keywords):
        self._tokenizer = tokenizer
        self._kind = return_type(options)
        self._continue_final: bool | None = options.get("continue_final_message")
        skip = options.get("skip_special_tokens")
        self._skip = True if skip is None else bool(skip)

    def records(self, shown: str | Chat, completion: Completion) -> list[Record]:
        """Return a record for each answer to the prompt `shown`."""
        return [self._record(shown, completion, choice) for choice in completion.choices]

    def _record(self, shown: str | Chat, completion: Completion, choice: Choice) -> Record:
        record: Record = {"input_text": shown}
        if self._kind == TENSORS:
            import torch  # lazy: if the engine uses torch, torch is already loaded

            ids = torch.tensor([*completion.prompt_token_ids.tolist(), *choice.token_ids])
            record["generated_token_ids"] = ids
        else:
            record["generated_text"] = self._generated(shown, completion, choice)
        return record if choice.logprobs is None else {**record, "logprobs": choice.logprobs}

    def _generated(self, shown: str | Chat, completion: Completion, choice: Choice) -> object:
        if self._kind == RAW_TEXT:
            return self._decode([*completion.prompt_token_ids.tolist(), *choice.token_ids])
        # transformers' answers include the stop string.
        text = self._decode(choice.token_ids)
        if self._kind == NEW_TEXT:
            return text
        if isinstance(shown, str):
            return shown + text
        if continues(shown, self._continue_final):
            return [*shown[:-1], _extended(shown[-1], text)]
        return [*shown, {"role": "assistant", "content": text}]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)


def _extended(message: Message, text: str) -> Message:
    """Return `message` with `text` appended."""
    content = message["content"]
    if isinstance(content, str):
        return {"role": message["role"], "content": content + text}
    last = {**content[-1], "text": content[-1].get("text", "") + text}
    return {"role": message["role"], "content": [*content[:-1], last]}
