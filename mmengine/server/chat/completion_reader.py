"""Parses a /v1/completions body into a request."""

from collections.abc import Sequence

import msgspec

from mmengine.errors import FIELD, ErrorCode, FieldPath, InvalidRequest
from mmengine.models.plugin import Tokenizer
from mmengine.serve.prompt.prompt import Prompt, check_token_ids
from mmengine.server.chat.answer_boxes import refuse_text
from mmengine.server.chat.bodies import CompletionBody
from mmengine.server.chat.field_tables import COMPLETION
from mmengine.server.chat.parsed_request import (
    ParsedRequest,
    SamplingDefaults,
    build_request,
    check_logprobs,
    item_options,
    read_answer_format,
    read_sampling,
)
from mmengine.server.http.body_fields import Fields
from mmengine.server.http.errors import ApiError, api_error, decode_body
from mmengine.server.http.token_id_lists import NO_IDS, TokenIds, take_out
from mmengine.server.settings import ServerSettings

DEFAULT_MAX_TOKENS = 16  # OpenAI's default.
FIELDS = Fields(COMPLETION)


_decode = msgspec.json.Decoder(CompletionBody).decode


class CompletionReader:
    """Parses /v1/completions bodies. `max_prompts`: maximum number of prompts in a body. `max_prompt_tokens`:
    maximum number of tokens in a prompt.
    """

    def __init__(
        self,
        defaults: SamplingDefaults,
        tokenizer: Tokenizer,
        max_prompts: int,
        max_pixels: int,
        ignore_unknown: bool,
        max_schema_bytes: int = ServerSettings().max_schema_bytes,
        max_prompt_tokens: int = 2**24,
    ):
        self._defaults, self._max_prompts, self._max_schema_bytes = defaults, max_prompts, max_schema_bytes
        self._max_pixels, self._ignore_unknown = max_pixels, ignore_unknown
        self._tokenizer, self._max_prompt_tokens = tokenizer, max_prompt_tokens

    def read(self, data: bytes, request_id: str) -> ParsedRequest:
        """Parse a body. Long token id lists are decoded separately from the JSON. `request_id` is used unless
        the body has a request_id. Raises ApiError.
        """
        small, ids = take_out(data, b"prompt", may_nest=True)
        body, ignored = self._decoded(small)
        # `take_out` (token_id_lists.py) also removes lists from a nested field `prompt`. If this happened,
        # decode the unchanged body.
        if ids.lists and body.prompt != ids.stands:
            (body, ignored), ids = self._decoded(data), NO_IDS
        return self._build_request(body, ids, request_id, ignored)

    def _decoded(self, data: bytes) -> tuple[CompletionBody, list[str]]:
        """Return the decoded body, and the ignored fields' names."""
        ignored = FIELDS.check(data, ignore_unknown=self._ignore_unknown)
        return decode_body(data, _decode), ignored

    def _build_request(
        self, body: CompletionBody, ids: TokenIds, request_id: str, ignored: list[str]
    ) -> ParsedRequest:
        answer_format = read_answer_format(body, self._max_schema_bytes)
        if answer_format.has_boxes:
            refuse_text()
        check_logprobs("logprobs", body.logprobs)
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        is_prompt_only = max_tokens == 0
        if is_prompt_only and not body.echo:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"{FIELD}=0 requires echo=true; set echo, or a larger number",
                FieldPath("max_tokens"),
            )
        sampling = read_sampling(body, self._defaults, max_tokens or 1, body.logprobs, FIELDS)
        if body.echo and body.logprobs is not None:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=body.logprobs)
        options = item_options(body.mm_processor_kwargs, self._max_pixels)
        prompts = [self._prompt(given, options) for given in self._prompts(body.prompt, ids)]
        parsed_request = build_request(
            "completion", body, prompts, sampling, answer_format, request_id, ignored, FIELDS
        )
        return msgspec.structs.replace(
            parsed_request,
            logprobs=body.logprobs is not None,
            echo_texts=[self._text_of(prompt) for prompt in prompts] if body.echo else [],
            is_prompt_only=is_prompt_only,
            thinking_token_budget=body.thinking_token_budget,
        )

    def _text_of(self, prompt: Prompt) -> str:
        return prompt.text if prompt.text is not None else self._tokenizer.decode(prompt.token_ids or [])

    def _prompts(
        self, given: str | Sequence[str | int | list[int]], ids: TokenIds
    ) -> Sequence[str | Sequence[int]]:
        if isinstance(given, str):
            return [given]
        tokens = [each for each in given if isinstance(each, int)]
        if tokens and not ids.lists:
            if len(tokens) != len(given):
                raise ApiError(
                    ErrorCode.INVALID_VALUE,
                    f"{FIELD} mixes token ids with texts; send only token ids or only texts",
                    FieldPath("prompt"),
                )
            return [tokens]
        texts = [each for each in given if not isinstance(each, int)]
        prompts: Sequence[str | Sequence[int]] = ids.lists or texts
        if not 1 <= len(prompts) <= self._max_prompts:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"{FIELD} has {len(prompts)} prompts; send 1 to {self._max_prompts} prompts (max_prompts)",
                FieldPath("prompt"),
            )
        return prompts

    def _prompt(self, given: str | Sequence[int], options: dict[str, object]) -> Prompt:
        """Return the prompt for a text or token ids. Raises ApiError."""
        if isinstance(given, str):
            return Prompt(text=given, media_options=options)
        try:
            check_token_ids(given, self._max_prompt_tokens, self._tokenizer.vocab_size)
        except InvalidRequest as error:
            raise api_error(error, FIELDS.names) from None
        return Prompt(token_ids=given)
