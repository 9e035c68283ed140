"""Bodies of /tokenize and /detokenize, with vLLM's names."""

import msgspec

from mmengine.errors import FIELD, ErrorCode, FieldPath
from mmengine.serve.prompt.prompt import Prompt
from mmengine.server.chat.bodies import ChatBody, DetokenizeBody, TokenizeBody
from mmengine.server.chat.chat_reader import ChatReader
from mmengine.server.chat.field_tables import DETOKENIZE, TOKENIZE
from mmengine.server.http.body_fields import Fields
from mmengine.server.http.errors import ApiError

TOKENIZE_FIELDS, DETOKENIZE_FIELDS = Fields(TOKENIZE), Fields(DETOKENIZE)


decode_tokenize = msgspec.json.Decoder(TokenizeBody).decode
decode_detokenize = msgspec.json.Decoder(DetokenizeBody).decode


def prompt_of(body: TokenizeBody, reader: ChatReader) -> Prompt:
    """The prompt of an answer to the same messages. Raises ApiError."""
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(ErrorCode.INVALID_VALUE, "give either prompt or messages", FieldPath("prompt"))
    if body.messages is None:
        return Prompt(text=body.prompt, media_options={"local_files": False})
    chat = ChatBody(
        messages=body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
        tools=body.tools,
    )
    prompt, _ = reader.prompt_of(chat)
    if prompt.has_media:
        text = f"{FIELD} with images or videos are not tokenized here; their usage says what they took"
        raise ApiError(ErrorCode.INVALID_VALUE, text, FieldPath("messages"))
    return prompt
