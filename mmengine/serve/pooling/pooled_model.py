"""Reads a model's task (chat, embedding or reranking) and its embedding prompts from files in the model's
folder. Refuses requests for other tasks.

The files have sentence-transformers' format: `modules.json`, a folder for each module, and
`config_sentence_transformers.json` with the prompts. The files are untrusted: their sizes are limited, and
their code is not run.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mmengine.checkpoint.files import open_regular, read_json
from mmengine.errors import ErrorCode, InvalidRequest, ModelError
from mmengine.models.plugin import Tokenizer

if TYPE_CHECKING:  # importing mmengine.build imports torch
    from mmengine.build import Built

Task = Literal["chat", "embed", "rerank"]
MODULES, PROMPTS = "modules.json", "config_sentence_transformers.json"
MAX_BYTES = 2**20  # maximum size of each file
MAX_MODULES, MAX_PROMPTS, MAX_PROMPT_CHARS = 16, 256, 8192
_PLACE = re.compile(r"[A-Za-z0-9_][\w.-]{0,127}", re.ASCII)
_RERANKER = re.compile(r"rerank", re.IGNORECASE)
YES, NO = "yes", "no"


@dataclass(frozen=True, slots=True)
class PooledModel:
    """A model's task, and its settings for pooled requests, which return a vector.

    `has_media`: True if prompts are chat messages with optional images, False if prompts are texts.
    `normalizes`: whether vectors are scaled to length 1 by default. `prompts`: prefixes for inputs, by name.
    `default_prompt`: the name of the prefix for calls without a prompt name. `tokens`: a reranker's token ids
    for "relevant" and optionally for "not relevant". The score comes from their logits.
    """

    task: Task = "chat"
    has_media: bool = False
    normalizes: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    tokens: tuple[int, ...] = ()

    def check_reranks(self) -> None:
        """Raise InvalidRequest if the model is not a reranker."""
        if self.task != "rerank":
            raise InvalidRequest(
                f"this model {_DOES[self.task]} and ranks no documents: serve a reranker, such as "
                "Qwen3-Reranker, or set task=rerank",
                code=ErrorCode.UNSUPPORTED_FIELD,
            )

    def check_embeds(self) -> None:
        """Raise InvalidRequest if the model cannot compute embeddings."""
        if self.task == "rerank":
            raise InvalidRequest(
                "this model ranks documents and gives no embeddings: serve an embedding model, or use "
                "/v1/rerank",
                code=ErrorCode.UNSUPPORTED_FIELD,
            )

    def check_chats(self) -> None:
        """Raise InvalidRequest if the model cannot generate text."""
        if self.task != "chat":
            raise InvalidRequest(
                f"this model {_DOES[self.task]} and gives no answers: serve a chat model, or use "
                f"{'/v1/rerank' if self.task == 'rerank' else '/v1/embeddings'}",
                code=ErrorCode.UNSUPPORTED_FIELD,
            )


_DOES = {"chat": "chats", "embed": "gives embeddings", "rerank": "ranks documents"}


def pooled_model_of(built: "Built") -> PooledModel:
    """Return the PooledModel for a built engine's model. Raises ModelError."""
    has_media, task = built.spec.has_encoder, built.config.task
    return read_pooled_model(built.folder, built.processor.tokenizer, has_media=has_media, task=task)


def read_pooled_model(
    folder: Path, tokenizer: Tokenizer, *, has_media: bool, task: Literal[Task, "auto"] = "auto"
) -> PooledModel:
    """Return the PooledModel for the model in `folder`. With `task="auto"`, the files determine the task.
    Raises ModelError for damaged files, and for any pooling except last-token pooling. A reranker's "yes" and
    "no" must be single tokens; otherwise ModelError is raised.
    """
    modules = _modules(folder)
    found = _task_of(folder, modules) if task == "auto" else task
    tokens: tuple[int, ...] = ()
    if found == "rerank":
        tokens = _score_tokens(folder, modules, tokenizer)
    elif found == "embed":
        _check_pooling(folder, modules)
    prompts, default = _prompts(folder)
    normalizes = not modules or any(kind == "Normalize" for kind, _ in modules)
    return PooledModel(found, has_media, normalizes, prompts, default, tokens)


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Return (class name, folder) for each module in `modules.json`, in order."""
    path = folder / MODULES
    if not folder.is_dir() or not path.is_file():
        return []
    try:
        with open_regular(path) as file:
            listed = json.loads(file.read(MAX_BYTES))
        pairs = [(str(each["type"]).rpartition(".")[2], str(each["path"])) for each in listed[:MAX_MODULES]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"{path} is not a list of modules ({error}); download the model again") from None
    for _, place in pairs:
        if place and not _PLACE.fullmatch(place):
            raise ModelError(f"{path} names the folder {place[:100]!r}, which is not a valid name")
    return pairs


def _task_of(folder: Path, modules: list[tuple[str, str]]) -> Task:
    kinds = {kind for kind, _ in modules}
    if "LogitScore" in kinds:
        return "rerank"
    if "Pooling" in kinds:
        return "embed"
    # Rerankers from before 2026 can only be recognized by name. A hub cache's path ends with the model's
    # name, "snapshots" and a commit.
    if not modules and any(_RERANKER.search(part) for part in folder.parts[-3:]):
        return "rerank"
    return "chat"


def _check_pooling(folder: Path, modules: list[tuple[str, str]]) -> None:
    place = next((place for kind, place in modules if kind == "Pooling"), None)
    if place is None:
        return
    config = read_json(folder / place / "config.json", max_bytes=MAX_BYTES)
    mode = config.get("pooling_mode")
    chosen = {str(mode)} if mode is not None else {name for name, value in config.items() if value is True}
    modes = {
        name.removeprefix("pooling_mode_") for name in chosen if mode or name.startswith("pooling_mode_")
    }
    if modes != {"lasttoken"}:
        raise ModelError(
            f"{folder / place} pools by {', '.join(sorted(modes)) or 'no known mode'}; only the last "
            "token's state "
            "(lasttoken) is supported"
        )


def _score_tokens(folder: Path, modules: list[tuple[str, str]], tokenizer: Tokenizer) -> tuple[int, ...]:
    place = next((place for kind, place in modules if kind == "LogitScore"), None)
    if place is not None:
        config = read_json(folder / place / "config.json", max_bytes=MAX_BYTES)
        ids = tuple(
            config[name] for name in ("true_token_id", "false_token_id") if config.get(name) is not None
        )
        if not ids or not all(type(token) is int and 0 <= token < tokenizer.vocab_size for token in ids):
            raise ModelError(f"{folder / place}/config.json names no valid true_token_id")
        return ids
    found: list[int] = []
    for word in (YES, NO):
        ids = tuple(tokenizer.encode(word))
        if len(ids) != 1:
            raise ModelError(
                f"a reranker needs a single token for {word!r}; this tokenizer needs {len(ids)} tokens"
            )
        found += ids
    return tuple(found)


def _prompts(folder: Path) -> tuple[dict[str, str], str]:
    path = folder / PROMPTS
    if not folder.is_dir() or not path.is_file():
        return {}, ""
    config = read_json(path, max_bytes=MAX_BYTES)
    given, default = config.get("prompts") or {}, config.get("default_prompt_name") or ""
    if not isinstance(given, dict) or len(given) > MAX_PROMPTS:
        raise ModelError(f"{path}: prompts must be an object with at most {MAX_PROMPTS} texts")
    prompts = {str(name): text for name, text in given.items() if text is not None}
    if not all(isinstance(text, str) and len(text) <= MAX_PROMPT_CHARS for text in prompts.values()):
        raise ModelError(f"{path}: a prompt must be a text of at most {MAX_PROMPT_CHARS} characters")
    if default and default not in prompts:
        raise ModelError(f"{path}: default_prompt_name names {str(default)[:100]!r}, which is no prompt")
    return prompts, str(default)
