"""The options of `mmengine run`, in groups."""

import codecs
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mmengine.checkpoint.gguf.pair import pair
from mmengine.cli.settings import complete_setting, engine_config
from mmengine.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:  # Heavy; loaded when a command runs.
    from mmengine.config import EngineConfig

MAX_SCHEMA_BYTES = 2**26  # Maximum file size. The engine's limit for a schema is lower.
MAX_SHARDS = 65536  # Maximum number of shards in a batch.
SAMPLING, MODEL, FILES = "Sampling (a request file sets these on each line)", "Model", "Files"


def read_schema(path: Path) -> bytes:
    """Return the file's JSON schema as bytes. A decoded schema would hide repeated keys from later checks.

    Raises InvalidRequest.
    """
    import msgspec  # Lazy: not needed for help

    from mmengine.bounded_files import read_bounded
    from mmengine.decode_errors import utf16_hint

    try:
        found = read_bounded(path, MAX_SCHEMA_BYTES).removeprefix(codecs.BOM_UTF8)
        msgspec.json.decode(found)
    except OSError as error:
        raise InvalidRequest(f"--schema {path} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        why = utf16_hint(found) or error
        raise InvalidRequest(f"--schema {path} is not valid JSON ({why})") from None
    return found


@dataclass(frozen=True, slots=True)
class Question:
    """The options for a single question and for the answer's format."""

    prompt: Annotated[str | None, typer.Argument(help="Question.", show_default=False)] = None
    image: Annotated[
        list[str] | None, typer.Option(help="Image file or URL; may be repeated.", metavar="PATH")
    ] = None
    video: Annotated[
        list[str] | None, typer.Option(help="Video file or URL; may be repeated.", metavar="PATH")
    ] = None
    min_pixels: Annotated[
        int | None, typer.Option(help="Minimum pixels per image or frame; smaller ones are enlarged.")
    ] = None
    max_pixels: Annotated[
        int | None, typer.Option(help="Maximum pixels per image or frame; larger ones are shrunk.")
    ] = None
    system: Annotated[str | None, typer.Option(help="System message.")] = None
    schema: Annotated[
        Path | None,
        typer.Option(
            help="File with a JSON schema for the answer; exit code 1 if the answer was cut before its end."
        ),
    ] = None
    on_truncation: Annotated[
        Literal["length", "close"],
        typer.Option(
            help="If an answer with --schema is too long: cut it at --max-tokens, or close it before."
        ),
    ] = "length"
    reasoning: Annotated[
        bool | None, typer.Option(help="With --schema: whether the model reasons first.", show_default="auto")
    ] = None

    thinking_token_budget: Annotated[
        int | None, typer.Option(help="Maximum number of reasoning tokens; -1 for no limit.")
    ] = None

    adapter: Annotated[
        str, typer.Option(help="Name of the LoRA adapter to use.", show_default="the only one")
    ] = ""

    def check(self) -> None:
        """Raise InvalidRequest for options that would have no effect, and for a missing question."""
        if self.on_truncation == "close" and self.schema is None:
            raise InvalidRequest("--on-truncation close needs --schema")
        if self.reasoning is not None and self.schema is None:
            raise InvalidRequest("--reasoning needs --schema")
        if not (self.image or self.video) and (self.min_pixels, self.max_pixels) != (None, None):
            raise InvalidRequest("--min-pixels and --max-pixels need --image or --video")
        if not self.prompt:
            raise InvalidRequest(
                'give a question, such as mmengine run "What is this?" --image a.png, or --batch'
            )

    def messages(self) -> list[dict[str, Any]]:
        sizes = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        given = {name: pixels for name, pixels in sizes.items() if pixels is not None}
        parts = [{"type": "image", "image": path, **given} for path in self.image or []]
        parts += [{"type": "video", "video": path, **given} for path in self.video or []]
        user = {"role": "user", "content": [*parts, {"type": "text", "text": self.prompt}]}
        return [*([{"role": "system", "content": self.system}] if self.system else []), user]

    def response_format(self) -> dict[str, Any] | None:
        """Return the response format with the schema from the file, or None. Raises InvalidRequest."""
        if self.schema is None:
            return None
        form = {"type": "json_schema", "json_schema": {"schema": read_schema(self.schema)}}
        return {**form, "on_truncation": self.on_truncation, "reasoning": self.reasoning}


@dataclass(frozen=True, slots=True)
class Printing:
    """Options for the command's output."""

    json_output: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False
    verbose: Annotated[bool, typer.Option("--verbose", help="Log progress to stderr.")] = False


@dataclass(frozen=True, slots=True)
class Sampling:
    """Options that set fields of SamplingParams."""

    max_tokens: Annotated[
        int, typer.Option(rich_help_panel=SAMPLING, help="Maximum number of answer tokens.")
    ] = 256
    min_tokens: Annotated[
        int, typer.Option(rich_help_panel=SAMPLING, help="Minimum number of answer tokens.")
    ] = 0
    temperature: Annotated[
        float, typer.Option(rich_help_panel=SAMPLING, help="Sampling temperature; 0 is greedy.")
    ] = 0.0
    top_k: Annotated[
        int, typer.Option(rich_help_panel=SAMPLING, help="Number of candidate tokens; 0 is off.")
    ] = 0
    top_p: Annotated[float, typer.Option(rich_help_panel=SAMPLING, help="Nucleus probability; 1 is off.")] = (
        1.0
    )
    min_p: Annotated[
        float, typer.Option(rich_help_panel=SAMPLING, help="Minimum relative probability; 0 is off.")
    ] = 0.0
    repetition_penalty: Annotated[
        float, typer.Option(rich_help_panel=SAMPLING, help="Factor against repeated tokens; 1 is off.")
    ] = 1.0
    presence_penalty: Annotated[
        float, typer.Option(rich_help_panel=SAMPLING, help="Penalty per present token; 0 is off.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, typer.Option(rich_help_panel=SAMPLING, help="Penalty per occurrence; 0 is off.")
    ] = 0.0
    seed: Annotated[
        int | None, typer.Option(rich_help_panel=SAMPLING, help="Sampling seed (default: random).")
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(rich_help_panel=SAMPLING, metavar="TEXT", help="Stop string; may be repeated."),
    ] = None
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", rich_help_panel=SAMPLING, help="Continue after an end of sequence."),
    ] = False
    logprobs: Annotated[
        int | None,
        typer.Option(rich_help_panel=SAMPLING, help="Number of logprobs per token; with --json."),
    ] = None
    n: Annotated[int, typer.Option("--n", rich_help_panel=SAMPLING, help="Number of answers.")] = 1


@dataclass(frozen=True, slots=True)
class Model:
    """The model, its device, and the engine's settings."""

    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-hf",
            rich_help_panel=MODEL,
            help="Model folder, GGUF file, or hub id such as owner/name, owner/name:TAG for a GGUF file, "
            "owner/name@revision or modelscope:owner/name (default: the included checkpoint).",
        ),
    ] = None
    mmproj: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=MODEL,
            metavar="FILE",
            help="Vision projector of a GGUF model, or none for text only (default: the one beside it).",
        ),
    ] = None
    device: Annotated[str, typer.Option(rich_help_panel=MODEL, help="Device: auto, cpu, cuda or cuda:N.")] = (
        "auto"
    )
    dtype: Annotated[str, typer.Option(rich_help_panel=MODEL, help="Dtype: auto, float32 or bfloat16.")] = (
        "auto"
    )
    quantize: Annotated[
        Literal["int8", "fp8"] | None,
        typer.Option(
            rich_help_panel=MODEL,
            help="Byte format of the decoder's weights on a CPU; int8 has no noticeable loss.",
        ),
    ] = None
    activations: Annotated[
        Literal["int8"] | None,
        typer.Option(
            rich_help_panel=MODEL,
            help="Round activations too, with int8 or int4 weights; tokens may differ from transformers'.",
        ),
    ] = None
    model_impl: Annotated[
        Literal["auto", "native", "transformers"],
        typer.Option(
            rich_help_panel=MODEL,
            help="Model implementation: native (mmengine's own), transformers (modules of "
            "transformers), or auto (native if that serves the model).",
        ),
    ] = "auto"
    tensor_parallel: Annotated[
        int, typer.Option(rich_help_panel=MODEL, help="Number of devices to shard the model over.")
    ] = 1
    grammar_backend: Annotated[
        str | None,
        typer.Option(rich_help_panel=MODEL, help="Grammar engine: llguidance, or a plugin's name."),
    ] = None
    max_digits: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=MODEL,
            help="Maximum number of digits of a JSON number that its schema leaves unlimited "
            "(default 40; 0: no limit).",
        ),
    ] = None
    spec: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=MODEL,
            help="Drafter: auto, none, grammar, ngram, suffix, eagle3[=FOLDER], mtp.",
        ),
    ] = None
    lora: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=MODEL,
            metavar="NAME=PATH",
            help="Name of a LoRA adapter, and its folder or hub id; may be repeated.",
        ),
    ] = None
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            rich_help_panel=MODEL,
            metavar="NAME=VALUE",
            autocompletion=complete_setting,
            help="Engine setting, such as max_model_len=2048; may be repeated. "
            "docs/reference/limits.md has the names and ranges.",
        ),
    ] = None

    @property
    def source(self) -> str | None:
        """Return the model, paired with its multimodal projector if `mmproj` is set. Raises ConfigError."""
        if self.mmproj is None:
            return self.model
        if self.model is None:
            raise ConfigError("--mmproj belongs to a GGUF model; name the model too")
        return pair(self.model, self.mmproj)

    def loras(self) -> dict[str, str]:
        """Return a dict from adapter names to their sources. Raises ConfigError."""
        found: dict[str, str] = {}
        for given in self.lora or []:
            name, equals, source = given.partition("=")
            if not (equals and name and source):
                raise ConfigError(f"--lora {given!r:.80} is not NAME=PATH, such as --lora mine=folder")
            if name in found:
                raise ConfigError(f"--lora has the name {name!r:.80} twice")
            found[name] = source
        return found

    def config(
        self, *, keeps_media: bool, kept_of_log: list[str], unless_set: tuple[str, ...] = ()
    ) -> "EngineConfig":
        """Return the engine's config. Raises ConfigError.

        `keeps_media`: whether images and videos are stored beside the log. `kept_of_log` and `unless_set`
        contain settings in the form NAME=VALUE. `kept_of_log`: limits for the log's size and age.
        `unless_set`: defaults, which the user's settings override.
        """
        return engine_config(
            [
                *unless_set,
                *(self.setting or []),
                *kept_of_log,
                *([] if keeps_media else ["media_store_bytes=0"]),
                *([f"grammar_backend={self.grammar_backend}"] if self.grammar_backend else []),
                *([f"max_digits={self.max_digits}"] if self.max_digits is not None else []),
                *([f"spec={self.spec}"] if self.spec else []),
                *([f"quantize={self.quantize}"] if self.quantize else []),
                *([f"activations={self.activations}"] if self.activations else []),
                *([f"model_impl={self.model_impl}"] if self.model_impl != "auto" else []),
                *([f"tensor_parallel={self.tensor_parallel}"] if self.tensor_parallel != 1 else []),
            ]
        )


@dataclass(frozen=True, slots=True)
class Files:
    """The request file, the answer file, and the log."""

    batch: Annotated[
        Path | None,
        typer.Option(rich_help_panel=FILES, help="File of requests (JSON lines)."),
    ] = None
    out: Annotated[Path | None, typer.Option(rich_help_panel=FILES, help="File for the answers.")] = None
    log: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=FILES,
            help="Folder for the event log. An interrupted batch continues with its own log; otherwise the "
            "folder must not contain a log.",
        ),
    ] = None
    shards: Annotated[
        int,
        typer.Option(
            min=1,
            max=MAX_SHARDS,
            rich_help_panel=FILES,
            help="Number of parts into which the batch is divided. Run the same command once per part, "
            "in processes that share a folder, each with its own --shard. --log is then a folder of logs.",
        ),
    ] = 1
    shard: Annotated[
        int,
        typer.Option(
            min=0,
            rich_help_panel=FILES,
            help="Part that this process answers first; then it takes over abandoned parts.",
        ),
    ] = 0
    force_resume: Annotated[
        bool,
        typer.Option(
            "--force-resume",
            rich_help_panel=FILES,
            help="Resume although model, processor, dtype or device changed.",
        ),
    ] = False
    recovery: Annotated[
        Literal["strict", "tail", "salvage"],
        typer.Option(
            rich_help_panel=FILES,
            help="Accepted damage in an interrupted batch's log. strict: none. tail: a truncated end. "
            "salvage: a truncated end, and damaged records before a snapshot.",
        ),
    ] = "tail"
    log_bytes: Annotated[
        int | None,
        typer.Option(
            min=0,
            rich_help_panel=FILES,
            help="Bytes of the log to keep; unanswered requests stay. 0: all.",
        ),
    ] = None
    log_days: Annotated[
        float | None,
        typer.Option(rich_help_panel=FILES, help="Days for which the log is kept; unanswered requests stay."),
    ] = None
    no_media_store: Annotated[
        bool,
        typer.Option(
            "--no-media-store",
            rich_help_panel=FILES,
            help="Store no images and videos beside the log. Unfinished requests with media then fail after "
            "a crash.",
        ),
    ] = False
