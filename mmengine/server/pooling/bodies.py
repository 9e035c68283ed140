"""The structs that declare the bodies of /v1/embeddings, /pooling, /v1/rerank and /score."""

from typing import Annotated, Literal

import msgspec

from mmengine.server.chat.bodies import MODEL, ItemOptions, Messages, Seconds
from mmengine.server.http.body_fields import supported, translated_field
from mmengine.server.http.errors import Json

_OPENAI, _VLLM = supported("as in OpenAI's API"), supported("as in vLLM's API")
Item = str | int | list[int] | Json
_ITEM = translated_field("a text, or an object with text, image or video, or with content parts")
Encoding = Literal["float", "base64"]


class PooledBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that all pooling routes share. None means that the field is absent or null."""

    model: Annotated[str | None, MODEL] = None
    truncate_prompt_tokens: Annotated[
        int | None,
        translated_field("maximum number of tokens of a text; longer texts are cut; -1: the model's limit"),
    ] = None
    instruction: Annotated[str | None, supported("the task in words, in place of the model's own")] = None
    mm_processor_kwargs: Annotated[
        ItemOptions | None, supported("limits on images and videos, such as max_pixels")
    ] = None
    priority: Annotated[int | None, supported("smaller values are scheduled first")] = None
    cache_salt: Annotated[str | None, supported("requests with different salts share no cache entries")] = (
        None
    )
    deadline_s: Annotated[Seconds | None, supported("seconds until the call ends with an error")] = None
    user: Annotated[str | None, supported("a name for the caller, which has no effect")] = None


class EmbeddingBody(PooledBody, frozen=True, kw_only=True):
    """The body of /v1/embeddings."""

    input: Annotated[
        str | list[Item] | Json | None,
        translated_field("an input (a text, token ids, or an object with image), or a list of inputs"),
    ] = None
    messages: Annotated[
        Messages | None, translated_field("a conversation in place of input, which may contain images")
    ] = None
    add_generation_prompt: Annotated[
        bool, translated_field("false: the prompt of messages ends without the assistant's opening")
    ] = True
    dimensions: Annotated[int | None, _OPENAI] = None
    encoding_format: Annotated[Encoding | None, _OPENAI] = None
    normalize: Annotated[bool | None, supported("false: the vectors are not scaled to length 1")] = None
    prompt_name: Annotated[str | None, supported("one of the prompts in the model's folder")] = None


class PoolingBody(EmbeddingBody, frozen=True, kw_only=True):
    """The body of /pooling."""

    task: Annotated[Literal["embed"] | None, translated_field("embed, the only task here")] = None


class RerankBody(PooledBody, frozen=True, kw_only=True):
    """The body of /v1/rerank."""

    query: Annotated[str | Json, _ITEM]
    documents: Annotated[list[str | Json], _ITEM]
    top_n: Annotated[int | None, supported("the number of documents in the answer; default: all")] = None
    return_documents: Annotated[
        bool | None, supported("false: the answer has the documents' indices without the documents")
    ] = None
    max_tokens_per_doc: Annotated[
        int | None, translated_field("the same as truncate_prompt_tokens, for query and document together")
    ] = None


class ScoreBody(PooledBody, frozen=True, kw_only=True):
    """The body of /score."""

    text_1: Annotated[str | list[str | Json] | Json | None, _VLLM] = None
    text_2: Annotated[str | list[str | Json] | Json | None, _VLLM] = None
    queries: Annotated[str | list[str | Json] | Json | None, supported("the same as text_1")] = None
    documents: Annotated[str | list[str | Json] | Json | None, supported("the same as text_2")] = None
