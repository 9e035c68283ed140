"""A replacement for transformers' image-text-to-text pipeline, with the same calls and results.

    pipe = pipeline("image-text-to-text", model="Qwen/Qwen3-VL-4B-Instruct")
    pipe(text=messages, max_new_tokens=64)                 # a chat
    pipe(text=[messages, other_messages])                  # many chats, batched
    pipe(images=image, text="<|vision_start|>…", return_full_text=False)

All prompts in a call run in continuous batches, so `batch_size` is accepted without effect.
docs/reference/pipeline.md lists which calls agree with transformers, and explains the differences.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mmengine.errors import FIELD, ConfigError, ErrorCode, FieldPath, InvalidRequest, MMEngineError
from mmengine.serve.engine.engine import Engine
from mmengine.serve.pipeline.call_options import settle_generation, settle_processing, settle_template
from mmengine.serve.pipeline.construction import Construction
from mmengine.serve.pipeline.generation_options import options_from_generation
from mmengine.serve.pipeline.inputs import (
    Chat,
    Results,
    group_inputs,
    single_input,
    source_of,
    without_video_urls,
)
from mmengine.serve.pipeline.model_view import ModelView, model_view, processor_of, tokenizer_of
from mmengine.serve.pipeline.records import Recorder, continues
from mmengine.serve.pipeline.streamer import Streamer, as_streamer, stream_answer
from mmengine.serve.prompt.options import Options
from mmengine.serve.prompt.prompt import Prompt
from mmengine.serve.text.request_output import Completion, answer_to_prompt
from mmengine.serve.text.response_format import response_format_of

TASK = "image-text-to-text"


@dataclass(frozen=True, slots=True)
class _Call:
    """A pipeline call's checked options."""

    options: Options
    media_options: dict[str, Any]
    template_options: dict[str, Any]
    continue_final: bool | None
    generation_prompt: bool | None
    recorder: Recorder
    streamer: Streamer | None


@dataclass(frozen=True, slots=True)
class _Input:
    """A prompt in two representations: `shown` is the caller's input, and `prompt` is the engine's."""

    shown: str | Chat
    prompt: Prompt


class Pipeline:
    """A pipeline for `model`: a folder, a hub id, an Engine, or None for the included checkpoint.

    `device` is a name such as "cpu" or "cuda", or a number as in transformers (-1 for the CPU). `device_map`
    may name a single device. `dtype` is a name or a torch dtype. `revision` is a branch, a tag or a commit at
    the hub. `model_kwargs` is a dict with further arguments, such as `dtype`. Other keyword arguments are
    defaults for every call, or arguments for Engine (config, log, attention, loras, and settings by name).
    Raises ModelError, InvalidRequest for a generation or processing option that is not supported, and
    ConfigError for an argument that is unknown or not supported.

    The class also works as `pipeline_class` for transformers:

        transformers.pipeline("image-text-to-text", model=mmengine.Engine(folder), pipeline_class=Pipeline)

    Pass an Engine as `model` to transformers.pipeline. For a folder or a hub id, transformers would first
    load its own model, which this class does not use.
    """

    # transformers.pipeline reads these flags. With False, transformers loads no processor and no tokenizer.
    _load_processor = False
    _load_image_processor = False
    _load_video_processor = False
    _load_feature_extractor = False
    _load_tokenizer = False

    def __init__(self, task: str = TASK, model: Any = None, **options: Any):
        if task != TASK:
            raise ConfigError(f"mmengine supports only the task {TASK!r}, not {task!r}")
        made = Construction.of(model, options)
        self._defaults = made.defaults
        settle_generation({}, made.defaults)
        settle_processing(made.defaults)
        self._is_owner = not isinstance(model, Engine)
        self.engine: Engine = model if isinstance(model, Engine) else Engine(made.model, **made.engine)
        try:
            made.check_defaults(self.engine.processor.template_variables)
        except ConfigError:
            self.close()
            raise
        self.task = task

    def __call__(self, images: Any = None, text: Any = None, **options: Any) -> Any:
        """Answer one or more prompts. The arguments are the same as for transformers' pipeline.

        - `text=chat` or `images=chat`, where a chat is a list of messages: returns a list with a record for
          each answer.
        - A list of chats or strings: returns a list with a list of records for each chat or string.
        - `images=` and `text=` (a string or strings with placeholders): returns a list of records.
        - A generator, iterator or dataset that yields such inputs: returns an iterator over their results.
          Results are computed before the reader asks for them.

        With `streamer=`, the prompts are answered one after the other, and the streamer receives each answer
        token by token. `response_format=` or `grammar=` sets the answers' format
        (docs/how-to/structured_output.md). `logprobs=` requests logprobs.

        A record is a dict with `input_text` and `generated_text`. With `return_tensors=True`, the text is
        replaced by `generated_token_ids` (prompt and answer, int64). With `logprobs`, the record also has a
        field `logprobs`. If prompts fail or are refused, the first error is raised after all other prompts
        have ended.
        """
        call = self._call_options(options)
        source = source_of(images, text)
        if isinstance(source, list):
            images, text = None, source
        elif source is not None:
            return Results(self._iterate(source, call), source)
        groups, is_list = group_inputs(images, text, self.engine.processor.count_images)
        inputs = [[self._input(shown, pictures, call) for shown, pictures in group] for group in groups]
        records = self._answer([item for group in inputs for item in group], call)
        results, place = [], 0
        for group in inputs:
            results.append([record for each in records[place : place + len(group)] for record in each])
            place += len(group)
        return results if is_list else results[0]

    @cached_property
    def tokenizer(self) -> Any:
        """transformers' tokenizer for the model, which works with transformers' streamers.

        For a GGUF file, or if transformers is not installed, this is the engine's tokenizer.
        """
        return tokenizer_of(self.engine)

    @cached_property
    def processor(self) -> Any:
        """transformers' processor for the model.

        For a GGUF file, or if transformers is not installed, this is the engine's processor.
        """
        return processor_of(self.engine)

    @cached_property
    def model(self) -> ModelView:
        """The model's config, device and dtype, for reading only."""
        return model_view(self.engine)

    @property
    def device(self) -> Any:
        """The torch device on which the model runs."""
        return self.model.device

    def close(self) -> None:
        """Close the engine and free the device, unless the caller passed the engine."""
        if self._is_owner:
            self.engine.close()

    def _call_options(self, given: dict[str, Any]) -> _Call:
        processor, options = self.engine.processor, {**self._defaults, **given}
        generation = settle_generation(given, self._defaults)
        streamer = generation.pop("streamer", None)
        settled = options_from_generation(generation, processor.generation_defaults, processor.eos_token_ids)
        return _Call(
            response_format_of(options).added_to(settled),
            settle_processing(options),
            settle_template(options, processor.template_variables),
            options.get("continue_final_message"),
            options.get("add_generation_prompt"),
            Recorder(processor.tokenizer, options),
            as_streamer(streamer, settled),
        )

    def _input(self, shown: str | Chat, images: Sequence[Any], call: _Call) -> _Input:
        if isinstance(shown, str):
            return _Input(shown, Prompt(text=shown, images=images, media_options=call.media_options))
        prefill = continues(shown, call.continue_final)
        if prefill and call.generation_prompt:
            raise InvalidRequest(
                f"{FIELD} and add_generation_prompt exclude each other: an answer continues "
                "the last message, or begins a new one",
                path=FieldPath("continue_final_message"),
            )
        prompt = Prompt(
            messages=without_video_urls(shown),
            continue_final_message=prefill,
            add_generation_prompt=call.generation_prompt is not False,
            media_options=call.media_options,
            template_options=call.template_options,
        )
        return _Input(shown, prompt)

    def _answer(self, inputs: Sequence[_Input], call: _Call) -> list[list[dict[str, Any]]]:
        """Answer all inputs, and return a list of records for each input, in order."""
        if call.streamer is not None:
            return [self._stream(item, call, call.streamer) for item in inputs]
        answers = dict(self.engine.run_batch((item.prompt, call.options) for item in inputs))
        completions = [_ended(answers[index], call, index, len(inputs) > 1) for index in sorted(answers)]
        return [call.recorder.records(item.shown, one) for item, one in zip(inputs, completions, strict=True)]

    def _stream(self, item: _Input, call: _Call, streamer: Streamer) -> list[dict[str, Any]]:
        completion = _ended(stream_answer(self.engine, item.prompt, call.options, streamer), call, 0, False)
        return call.recorder.records(item.shown, completion)

    def _iterate(self, source: Iterable[Any], call: _Call) -> Iterator[list[dict[str, Any]]]:
        """Yield the results in the same order as `source`.

        `source` is read only as far ahead as `run_batch` prepares jobs.
        """
        if call.streamer is not None:
            for given in source:
                yield self._stream(self._input(*single_input(given), call), call, call.streamer)
            return
        inputs: dict[int, _Input] = {}

        def jobs() -> Iterator[tuple[Prompt, Options]]:
            for index, given in enumerate(source):
                shown, images = single_input(given)
                inputs[index] = self._input(shown, images, call)
                yield inputs[index].prompt, call.options

        ready: dict[int, Completion] = {}
        expected = 0
        for index, answer in self.engine.run_batch(jobs()):
            ready[index] = _ended(answer, call, index, True)
            while expected in ready:
                yield call.recorder.records(inputs.pop(expected).shown, ready.pop(expected))
                expected += 1


def _ended(
    answer: Completion | MMEngineError, call: _Call, index: int, is_one_of_several: bool
) -> Completion:
    """Return the answer to prompt `index` if the answer is complete or was cut by max_time.

    Otherwise raises the answer's error. If the call has several prompts, the error names the prompt.
    """
    if isinstance(answer, Completion) and call.options.deadline_s:
        bad = [one for one in answer.choices if one.finish_reason in ("abort", "error", "rejected")]
        if all(one.code is ErrorCode.DEADLINE_EXCEEDED for one in bad):
            return answer
    return answer_to_prompt(answer, index, is_one_of_several)


pipeline = Pipeline  # transformers' name for the constructor
