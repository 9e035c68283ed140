"""transformers' image-text-to-text pipeline, with the same calls and the same results.

    pipe = pipeline("image-text-to-text", model="Qwen/Qwen3-VL-4B-Instruct")
    pipe(text=messages, max_new_tokens=64)                 # a chat
    pipe(text=[messages, other_messages])                  # many chats, batched
    pipe(images=image, text="<|vision_start|>…", return_full_text=False)

All prompts of a call are batched continuously, so `batch_size` is taken and has no meaning.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmengine.errors import ConfigError, InvalidRequest
from mmengine.serve.answers import Completion, succeeded
from mmengine.serve.batching import run_batch
from mmengine.serve.engine import Engine
from mmengine.serve.generation import is_generation_option, sampling_from_generation
from mmengine.serve.options import Options
from mmengine.serve.pipeline_inputs import Chat, group_inputs, single_input
from mmengine.serve.prompts import Prompt
from mmengine.serve.structured import response_format_of

TASK = "image-text-to-text"
TENSORS, NEW_TEXT, FULL_TEXT = 0, 1, 2  # transformers' ReturnType
_ENGINE_OPTIONS = ("config", "log", "attention")
_CALL_OPTIONS = frozenset(
    {
        "generate_kwargs",
        "max_new_tokens",
        "return_full_text",
        "return_tensors",
        "return_type",
        "stop_sequence",
        "continue_final_message",
        "skip_special_tokens",
        "clean_up_tokenization_spaces",
        "processor_kwargs",
        "batch_size",
        "num_workers",
        "timeout",
        "response_format",
        "grammar",
    }
)


@dataclass(frozen=True, slots=True)
class _Call:
    """What a call asks for, beside its prompts."""

    options: Options
    media_options: dict[str, Any] | None
    continue_final: bool | None
    return_type: int
    skip_special_tokens: bool


@dataclass(frozen=True, slots=True)
class _Input:
    """One prompt as it was given (`shown`), and as the engine takes it."""

    shown: str | Chat
    prompt: Prompt


class Pipeline:
    """A pipeline on `model`: a folder, a hub id, an Engine, or None for the embedded checkpoint.

    `device`: "cpu", "cuda", …, or transformers' number (-1 is the CPU). `dtype`: a name or a torch
    dtype. Further keywords are defaults for every call, or Engine's (config, log, attention).
    Raises ModelError, ConfigError, and InvalidRequest for a keyword that it does not know.

    It is also a `pipeline_class` for transformers:

        transformers.pipeline("image-text-to-text", model=mmengine.Engine(folder), pipeline_class=Pipeline)

    Given a folder or a hub id in place of the Engine, transformers first loads its own model of it,
    which this class lets go of again.
    """

    # transformers.pipeline reads these: it shall load none of its own processing.
    _load_processor = False
    _load_image_processor = False
    _load_video_processor = False
    _load_feature_extractor = False
    _load_tokenizer = False

    def __init__(
        self,
        task: str = TASK,
        model: Any = None,
        *,
        device: Any = None,
        dtype: Any = None,
        torch_dtype: Any = None,
        **options: Any,
    ):
        if task != TASK:
            raise ConfigError(f"mmengine has the task {TASK!r} only, not {task!r}")
        engine_options = {name: options.pop(name) for name in _ENGINE_OPTIONS if name in options}
        self._defaults = options
        self._check_names(options)
        self._is_owner = not isinstance(model, Engine)
        if isinstance(model, Engine):
            self.engine = model
        else:
            self.engine = Engine(
                _model_name(model),
                device=_device_name(device),
                dtype=_dtype_name(dtype if dtype is not None else torch_dtype),
                **engine_options,
            )
        self.task = task

    def __call__(self, images: Any = None, text: Any = None, **options: Any) -> Any:
        """Answer one prompt or many; the forms are those of transformers' pipeline:

        - `text=chat` or `images=chat`, a list of messages: a list with one record an answer;
        - a list of chats, or of strings: a list of such lists;
        - `images=` with `text=`, strings that hold their placeholders: a list of records;
        - a generator or iterator of these: an iterator of results, computed ahead.

        `response_format=` or `grammar=` ask for a form of the answers (docs/structured_output.md).

        A record is `{"input_text", "generated_text"}`, or with `return_tensors=True`
        `{"input_text", "generated_token_ids"}` (prompt and answer, int64). Raises the error of the
        first prompt that was refused or failed, after the others ended.
        """
        call = self._call_options(options)
        if isinstance(images if text is None else text, Iterator):
            source = images if text is None else text
            return self._iterate(source, call)
        groups, is_list = group_inputs(images, text)
        inputs = [[self._input(shown, pictures, call) for shown, pictures in group] for group in groups]
        records = self._answer([item for group in inputs for item in group], call)
        results, place = [], 0
        for group in inputs:
            results.append([record for each in records[place : place + len(group)] for record in each])
            place += len(group)
        return results if is_list else results[0]

    def close(self) -> None:
        """Free the device, unless the engine was given by the caller."""
        if self._is_owner:
            self.engine.close()

    def _check_names(self, options: Mapping[str, Any]) -> None:
        for name in options:
            if name not in _CALL_OPTIONS and not is_generation_option(name):
                raise InvalidRequest(f"unknown pipeline option {name!r}")

    def _call_options(self, given: Mapping[str, Any]) -> _Call:
        self._check_names(given)
        options = {**self._defaults, **given}
        inner = options.get("generate_kwargs") or {}
        if given.get("max_new_tokens") is not None and "max_new_tokens" in inner:
            raise InvalidRequest("max_new_tokens is given twice, by itself and in generate_kwargs")
        generation = {name: value for name, value in options.items() if is_generation_option(name)}
        generation.update(inner)
        if options.get("stop_sequence") is not None:
            generation["stop_strings"] = options["stop_sequence"]
        sampling = sampling_from_generation(generation, self.engine.processor.generation_defaults)
        skip = options.get("skip_special_tokens")
        return _Call(
            response_format_of(options).added_to(Options(sampling)),
            options.get("processor_kwargs"),
            options.get("continue_final_message"),
            _return_type(options),
            True if skip is None else bool(skip),
        )

    def _input(self, shown: str | Chat, images: Sequence[Any], call: _Call) -> _Input:
        if isinstance(shown, str):
            return _Input(shown, Prompt(text=shown, images=images, media_options=call.media_options))
        prefill = _continues(shown, call)
        prompt = Prompt(messages=shown, continue_final_message=prefill, media_options=call.media_options)
        return _Input(shown, prompt)

    def _answer(self, inputs: Sequence[_Input], call: _Call) -> list[list[dict[str, Any]]]:
        """Records for each input, in order."""
        answers = dict(run_batch(self.engine, ((item.prompt, call.options) for item in inputs)))
        completions = [succeeded(answers[index]) for index in sorted(answers)]
        return [self._records(item, one, call) for item, one in zip(inputs, completions, strict=True)]

    def _iterate(self, source: Iterable[Any], call: _Call) -> Iterator[list[dict[str, Any]]]:
        """Results in the order of `source`, which is read ahead no further than the engine's window."""
        inputs: dict[int, _Input] = {}

        def jobs() -> Iterator[tuple[Prompt, Options]]:
            for index, given in enumerate(source):
                shown, images = single_input(given)
                inputs[index] = self._input(shown, images, call)
                yield inputs[index].prompt, call.options

        ready: dict[int, Completion] = {}
        expected = 0
        for index, answer in run_batch(self.engine, jobs()):
            ready[index] = succeeded(answer)
            while expected in ready:
                yield self._records(inputs.pop(expected), ready.pop(expected), call)
                expected += 1

    def _records(self, item: _Input, completion: Completion, call: _Call) -> list[dict[str, Any]]:
        key = "generated_token_ids" if call.return_type == TENSORS else "generated_text"
        return [
            {"input_text": item.shown, key: self._generated(item.shown, completion, choice.token_ids, call)}
            for choice in completion.choices
        ]

    def _generated(self, shown: str | Chat, completion: Completion, token_ids: list[int], call: _Call) -> Any:
        if call.return_type == TENSORS:
            import torch  # lazy: an engine with torch has it loaded already

            return torch.tensor([*completion.prompt_token_ids.tolist(), *token_ids])
        # The whole answer, a stop string at its end included: what transformers returns.
        text = self.engine.processor.tokenizer.decode(token_ids, skip_special_tokens=call.skip_special_tokens)
        if call.return_type == NEW_TEXT:
            return text
        if isinstance(shown, str):
            return shown + text
        if _continues(shown, call):
            return [*shown[:-1], _extended(shown[-1], text)]
        return [*shown, {"role": "assistant", "content": text}]


def _continues(chat: Chat, call: _Call) -> bool:
    """Whether the last message is a beginning to be continued."""
    if call.continue_final is not None:
        return call.continue_final
    return bool(chat) and chat[-1].get("role") == "assistant"


def _extended(message: dict[str, Any], text: str) -> dict[str, Any]:
    """`message` with `text` after its own."""
    content = message["content"]
    if isinstance(content, str):
        return {"role": message["role"], "content": content + text}
    last = {**content[-1], "text": content[-1].get("text", "") + text}
    return {"role": message["role"], "content": [*content[:-1], last]}


def _return_type(options: Mapping[str, Any]) -> int:
    kind = options.get("return_type")
    if kind is not None:
        number = getattr(kind, "value", kind)
        if number not in (TENSORS, NEW_TEXT, FULL_TEXT):
            raise InvalidRequest(f"return_type is 0 (tensors), 1 (new text) or 2 (full text), not {kind!r}")
        return number
    if options.get("return_full_text") is not None:
        if options.get("return_tensors") is not None:
            raise InvalidRequest("return_full_text and return_tensors exclude each other")
        return FULL_TEXT if options["return_full_text"] else NEW_TEXT
    return TENSORS if options.get("return_tensors") is not None else FULL_TEXT


def _model_name(model: Any) -> str | Path | None:
    """What to load: given a model of transformers, the folder or hub id it came from."""
    if model is None or isinstance(model, (str, Path)):
        return model
    name = getattr(model, "name_or_path", "")
    if not name:
        raise ConfigError(
            f"model must be a folder, a hub id or an mmengine.Engine, not a {type(model).__name__} "
            "that does not know where it was loaded from"
        )
    return name


def _device_name(device: Any) -> str:
    if device is None:
        return "auto"
    if isinstance(device, int):
        return "cpu" if device < 0 else f"cuda:{device}"
    return str(device)


def _dtype_name(dtype: Any) -> str:
    return "auto" if dtype is None else str(dtype).removeprefix("torch.")


pipeline = Pipeline  # transformers' name for making one
