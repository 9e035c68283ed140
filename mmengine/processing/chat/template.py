"""Renders the checkpoint's own chat template so that no user text can become a special token.

Before compilation, every special token in the template's source is replaced by a mark, a low-surrogate code
point. Valid Unicode text never contains a lone surrogate, and text with a lone surrogate is refused. Every
mark in the output therefore comes from the template. Message text that looks like a special token stays text.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path
from types import CodeType, MappingProxyType
from typing import Any

import jinja2
import jinja2.meta

from mmengine.bounded_files import read_bounded
from mmengine.checkpoint.model_files import has_model_file, is_gguf, read_model_json
from mmengine.errors import FIELD, InvalidRequest, ModelError
from mmengine.processing.chat.call_formats import call_format_of
from mmengine.processing.chat.content_parts import cut, in_parts, is_text_in_parts, joined, with_cut
from mmengine.processing.chat.environment import chat_environment
from mmengine.processing.chat.marks import CUT
from mmengine.processing.chat.role_tokens import replace_marked_roles, texts_around_roles, with_marked_roles
from mmengine.processing.chat.tokens import ChatTokenizer
from mmengine.request import CallFormat, check_unicode

MAX_RENDERED_CHARS = 2**24
MAX_TEMPLATE_BYTES = 2**20
TOKENIZER_CONFIG = "tokenizer_config.json"
_FIRST_MARK = 0xDC00
_MAX_MARKS = 0x400
NO_TEMPLATE = (  # The template of a model that was not trained to chat.
    "{{ raise_exception('it has none; set chat_template, or send a prompt without messages to "
    "/v1/completions') }}"
)
_PROBE = "probe text"
_NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@lru_cache(maxsize=8)
def _compiled(source: str) -> tuple[CodeType, frozenset[str]]:
    """Return a template's code and its undeclared variables.

    Compiling takes 15 ms. Engines of the same model and requests with the same chat_template share the code.
    """
    environment = chat_environment()
    with environment.counted():
        code = environment.compile(source)
        return code, frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))


class ChatTemplate:
    """A chat template, which is compiled once. `render` is thread-safe."""

    def __init__(
        self,
        source: str,
        names: Mapping[str, str],
        tokenizer: ChatTokenizer,
        origin: str,
        modalities: Sequence[str] = (),
    ) -> None:
        """Compile the template.

        `names`: maps the template's variables for special tokens, such as eos_token, to these tokens.
        `origin`: where the source comes from, for errors. `modalities`: the media that the model accepts.
        Raises ModelError for a template that does not compile; `check` finds errors in rendering.
        """
        source = source.removeprefix("\ufeff")  # An editor's byte order mark is no part of the prompt.
        self.source, self._names, self._tokenizer, self._origin = source, names, tokenizer, origin
        self._modalities = modalities
        around_roles = texts_around_roles(tokenizer.marked, self.source)
        listed = {*names.values(), *around_roles.values()}
        written = [token for token in tokenizer.marked if token in self.source or token in listed]
        if len(written) > _MAX_MARKS:
            raise ModelError(f"the chat template {origin} names {len(written)} special tokens, too many")
        written.sort(key=len, reverse=True)  # A token may contain a shorter token.
        self._marks = {token: chr(_FIRST_MARK + i) for i, token in enumerate(written)}
        self._tokens = {mark: token for token, mark in self._marks.items()}
        self._around_roles = {text: self._marks[token] for text, token in around_roles.items()}
        self._ids = {mark: tokenizer.marked[token] for mark, token in self._tokens.items()}
        self._mark_pattern = re.compile(f"([{chr(_FIRST_MARK)}-{chr(_FIRST_MARK + _MAX_MARKS - 1)}])")
        marked = self.source
        for token, mark in self._marks.items():
            marked = marked.replace(token, mark)
        self._variables = {name: self._marks.get(token, token) for name, token in names.items()}
        self._environment = environment = chat_environment()
        try:
            code, self.variables = _compiled(marked)
            with environment.counted():
                # Each rendering copies the globals, which is slow for Jinja's default, a ChainMap.
                copied = dict(environment.globals)
                self._template = jinja2.Template.from_code(environment, code, copied)
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError, MemoryError) as error:
            raise ModelError(f"the chat template {origin} does not compile: {str(error)[:300]}") from None

    @classmethod
    def of_folder(
        cls,
        folder: Path,
        tokenizer: ChatTokenizer,
        modalities: Sequence[str] = (),
        *,
        optional: bool = False,
    ) -> "ChatTemplate":
        """Return the template of a model's folder or GGUF file. `optional`: accept a model that has no
        template.
        """
        source = _find_source(folder)
        if source is None and not optional:
            places = "chat_template.jinja, chat_template.json or tokenizer_config.json"
            where = "tokenizer.chat_template" if is_gguf(folder) else places
            raise ModelError(f"{folder} has no chat template ({where})")
        config = read_model_json(folder, TOKENIZER_CONFIG) if has_model_file(folder, TOKENIZER_CONFIG) else {}
        return cls.of_source(source, config, tokenizer, f"in {folder}", modalities)

    @classmethod
    def of_source(
        cls,
        source: str | None,
        config: Mapping[str, object],
        tokenizer: ChatTokenizer,
        origin: str,
        modalities: Sequence[str] = (),
    ) -> "ChatTemplate":
        """Return a checked template. If `source` is None, the template refuses every chat.

        `config`: the contents of tokenizer_config.json, which contains the tokens for variables such as
        eos_token. For the remaining parameters, see the constructor. Raises ModelError.
        """
        template = cls(source or NO_TEMPLATE, _named_tokens(config), tokenizer, origin, modalities)
        if source:
            template.check()
        return template

    def with_source(self, source: str) -> "ChatTemplate":
        """Return a template with another source and with this template's special tokens. Raises
        InvalidRequest.
        """
        if len(source) > MAX_TEMPLATE_BYTES:
            text = f"{FIELD} is longer than {MAX_TEMPLATE_BYTES} characters"
            raise InvalidRequest(text, path=("chat_template",))
        check_unicode(("chat_template",), source)
        try:
            origin = "that was given"
            template = ChatTemplate(source, self._names, self._tokenizer, origin, self._modalities)
            with suppress(InvalidRequest):  # The template may refuse the messages of the check.
                template.check()
        except ModelError as error:
            raise InvalidRequest(error.text) from None
        return template

    @cached_property
    def call_format(self) -> CallFormat | None:
        """Return the format in which the template writes tool calls. Return None if the template shows no
        tools, or if the format is unknown.
        """
        return call_format_of(
            lambda messages, tools: self.readable(
                self.render(
                    messages,
                    add_generation_prompt=False,
                    continue_final_message=False,
                    variables={"tools": tools},
                )
            )
        )

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any] = _NO_VARIABLES,
    ) -> str:
        """Render the prompt, with marks for special tokens. Messages and variables must be plain, checked
        data.
        """
        if any(is_text_in_parts(message) for message in messages) and not self.reads_parts:
            messages = [joined(message) if is_text_in_parts(message) else message for message in messages]
        if any(isinstance(message.get("content"), str) for message in messages) and not self.reads_texts:
            messages = [in_parts(message) for message in messages]
        if continue_final_message:
            messages = with_cut(messages)
        rendered = self._rendered(messages, add_generation_prompt, variables)
        return cut(rendered) if continue_final_message else rendered

    @cached_property
    def reads_parts(self) -> bool:
        """Return whether the template reads a list of parts as a message's content.

        A template that reads only strings prints the list, leaves the list out, or fails. For such a
        template, `render` joins the text parts to a string.
        """
        rendered = self._probed([{"type": "text", "text": _PROBE}])
        return _PROBE in rendered and not re.search(f"{_PROBE}[\"']", rendered)

    @cached_property
    def reads_texts(self) -> bool:
        """Return whether the template reads a string as a message's content.

        A template that reads only lists of parts leaves a string out. For such a template, `render` converts
        the string to a text part.
        """
        return _PROBE in self._probed(_PROBE) or not self.reads_parts

    def _probed(self, content: str | list[dict[str, str]]) -> str:
        """Render a message with this content, or return "" if the template refuses the message."""
        try:
            return self._rendered([{"role": "user", "content": content}], False, _NO_VARIABLES)
        except InvalidRequest:
            return ""

    def _rendered(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        if self._around_roles:
            messages = with_marked_roles(messages)
        parts, length = [], 0
        try:
            with self._environment.counted():
                for part in self._stream(messages, add_generation_prompt, variables):
                    parts.append(part)
                    length += len(part)
                    if length > MAX_RENDERED_CHARS:
                        raise InvalidRequest(
                            f"the rendered prompt is longer than {MAX_RENDERED_CHARS} characters"
                        )
        except jinja2.TemplateError as error:
            detail = self.readable(str(error)).replace(CUT, "")[:300]
            raise InvalidRequest(f"the model's chat template refuses these messages: {detail}") from None
        except InvalidRequest:
            raise
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError):
            raise InvalidRequest(
                "the model's chat template cannot render these messages; check that each has a role and "
                "content of the usual shape"
            ) from None
        rendered = "".join(parts)
        return replace_marked_roles(rendered, self._around_roles) if self._around_roles else rendered

    def _stream(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> Iterator[str]:
        given = {"tools": None, "documents": None, **self._variables, **variables}
        given |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        return self._template.generate(given)

    def readable(self, rendered: str) -> str:
        """Replace the marks by the special tokens that they stand for."""
        return self._mark_pattern.sub(lambda found: self._tokens.get(found[0], found[0]), rendered)

    def split(self, rendered: str, max_special: int = 0) -> list[str | int]:
        """Split a rendered prompt at its special tokens. Return the texts and the special tokens' ids, in
        order. `max_special`: the maximum number of special tokens at which to split (0: no limit).
        """
        pieces = self._mark_pattern.split(rendered, max_special)
        return [self._ids[piece] if i % 2 else piece for i, piece in enumerate(pieces) if piece]

    def check(self) -> None:
        """Check that the template writes its special tokens as special tokens.

        Raises ModelError if the template assembles a special token from pieces, because such a token would
        silently become ordinary text. Raises InvalidRequest if the template refuses the test messages.
        """
        media = [{"type": modality} for modality in self._modalities]
        probe = [
            {"role": "user", "content": [*media, {"type": "text", "text": "a"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
            {"role": "user", "content": [{"type": "text", "text": "c"}]},
        ]
        rendered = self.render(probe, add_generation_prompt=True, continue_final_message=False)
        if self.split(rendered) != self._tokenizer.split(self.readable(rendered)):
            raise ModelError(
                f"the chat template {self._origin} builds special tokens from pieces, which is not "
                "supported: write each special token as a whole (only a message's role may be inserted)"
            )


def _find_source(folder: Path) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return read_bounded(path, MAX_TEMPLATE_BYTES).decode("utf-8-sig")
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ModelError(f"{path} is not UTF-8 text") from None
    for name in ("chat_template.json", "processor_config.json", TOKENIZER_CONFIG):
        found = read_model_json(folder, name).get("chat_template") if has_model_file(folder, name) else None
        if isinstance(found, list):  # Several named templates.
            named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
            found = named.get("default")
        if isinstance(found, str):
            return found
    return None


def _named_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """Return the special tokens by template variable, such as eos_token."""
    names = {}
    for name in _NAMED_TOKENS:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            names[name] = value
    return names
