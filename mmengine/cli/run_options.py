"""Options of `mmengine run`, in the groups that its help shows."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mmengine.cli.settings import engine_config
from mmengine.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:  # heavy: loaded when a command runs
    from mmengine.config import EngineConfig

MAX_SHARDS = 65536  # of one batch
SAMPLING, MODEL, FILES = "Sampling (in a request file: on each line)", "Model", "Files"


@dataclass(frozen=True, slots=True)
class Question:
    """One question, and the form of its answer."""

    prompt: Annotated[str | None, typer.Argument(help="The question.", show_default=False)] = None
    image: Annotated[
        list[str] | None, typer.Option(help="An image file, or its URL; may be repeated.", metavar="PATH")
    ] = None
    video: Annotated[
        list[str] | None, typer.Option(help="A video file, or its URL; may be repeated.", metavar="PATH")
    ] = None
    min_pixels: Annotated[
        int | None, typer.Option(help="Of an image, or a frame: smaller ones are enlarged.")
    ] = None
    max_pixels: Annotated[
        int | None, typer.Option(help="Of an image, or a frame: larger ones are made smaller.")
    ] = None
    system: Annotated[str | None, typer.Option(help="A system message.")] = None
    schema: Annotated[
        Path | None,
        typer.Option(
            help="A JSON schema: the answer is JSON that it describes; exit code 1 where it was cut before."
        ),
    ] = None
    on_truncation: Annotated[
        Literal["length", "close"],
        typer.Option(help="With --schema, where --max-tokens ends: cut the answer, or complete it in time."),
    ] = "length"
    reasoning: Annotated[
        bool | None, typer.Option(help="With --schema: whether the model reasons first.", show_default="auto")
    ] = None

    thinking_token_budget: Annotated[
        int | None, typer.Option(help="Tokens that may be reasoning: then it is ended. -1: no bound.")
    ] = None

    adapter: Annotated[str, typer.Option(help="Which of --lora answers.", show_default="the only one")] = ""

    def check(self) -> None:
        """Raise InvalidRequest for options that ask for nothing."""
        if self.on_truncation == "close" and self.schema is None:
            raise InvalidRequest(
                "--on-truncation close needs --schema: without one nothing has to be completed"
            )
        if self.reasoning is not None and self.schema is None:
            raise InvalidRequest("--reasoning needs --schema: it says where the form of the answer begins")
        if not (self.image or self.video) and (self.min_pixels, self.max_pixels) != (None, None):
            raise InvalidRequest("--min-pixels and --max-pixels need --image or --video")
        if not self.prompt:
            raise InvalidRequest(
                'give a question, as in mmengine run "What is this?" --image a.png, or --batch'
            )

    def messages(self) -> list[dict[str, Any]]:
        sizes = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        given = {name: pixels for name, pixels in sizes.items() if pixels is not None}
        parts = [{"type": "image", "image": path, **given} for path in self.image or []]
        parts += [{"type": "video", "video": path, **given} for path in self.video or []]
        user = {"role": "user", "content": [*parts, {"type": "text", "text": self.prompt}]}
        return [*([{"role": "system", "content": self.system}] if self.system else []), user]

    def response_format(self) -> dict[str, Any] | None:
        """What the file with a JSON schema asks for. Raises InvalidRequest."""
        if self.schema is None:
            return None
        import msgspec  # lazy: not needed for help

        try:
            found = self.schema.read_bytes()
            msgspec.json.decode(found)
        except OSError as error:
            raise InvalidRequest(f"--schema {self.schema} cannot be read: {error.strerror}") from None
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise InvalidRequest(f"--schema {self.schema} is not valid JSON ({error})") from None
        # The schema as text: a key may be in it twice.
        form = {"type": "json_schema", "json_schema": {"schema": found}}
        return {**form, "on_truncation": self.on_truncation, "reasoning": self.reasoning}


@dataclass(frozen=True, slots=True)
class Printing:
    """What is printed."""

    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False
    verbose: Annotated[bool, typer.Option("--verbose", help="Tell on stderr what happens.")] = False


@dataclass(frozen=True, slots=True)
class Sampling:
    """The fields of SamplingParams that the command line has."""

    max_tokens: Annotated[int, typer.Option(rich_help_panel=SAMPLING, help="Longest answer.")] = 256
    min_tokens: Annotated[int, typer.Option(rich_help_panel=SAMPLING, help="Shortest answer.")] = 0
    temperature: Annotated[float, typer.Option(rich_help_panel=SAMPLING, help="0 is greedy.")] = 0.0
    top_k: Annotated[int, typer.Option(rich_help_panel=SAMPLING, help="0 is off.")] = 0
    top_p: Annotated[float, typer.Option(rich_help_panel=SAMPLING, help="1 is off.")] = 1.0
    min_p: Annotated[float, typer.Option(rich_help_panel=SAMPLING, help="0 is off.")] = 0.0
    repetition_penalty: Annotated[float, typer.Option(rich_help_panel=SAMPLING, help="1 is off.")] = 1.0
    presence_penalty: Annotated[float, typer.Option(rich_help_panel=SAMPLING, help="0 is off.")] = 0.0
    frequency_penalty: Annotated[float, typer.Option(rich_help_panel=SAMPLING, help="0 is off.")] = 0.0
    seed: Annotated[int | None, typer.Option(rich_help_panel=SAMPLING, help="Drawn when left out.")] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(rich_help_panel=SAMPLING, metavar="TEXT", help="Ends the text; may be repeated."),
    ] = None
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", rich_help_panel=SAMPLING, help="Go on.")] = False
    logprobs: Annotated[int | None, typer.Option(rich_help_panel=SAMPLING, help="With --json.")] = None
    n: Annotated[int, typer.Option("--n", rich_help_panel=SAMPLING, help="Answers to the prompt.")] = 1


@dataclass(frozen=True, slots=True)
class Model:
    """The model, where it runs, and settings of its engine."""

    model: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=MODEL,
            help="A folder, a GGUF file, or a hub id as owner/name, owner/name@revision or "
            "modelscope:owner/name; without one, the embedded checkpoint.",
        ),
    ] = None
    device: Annotated[str, typer.Option(rich_help_panel=MODEL, help="auto, cpu, cuda or cuda:N.")] = "auto"
    dtype: Annotated[str, typer.Option(rich_help_panel=MODEL, help="auto, float32 or bfloat16.")] = "auto"
    quantize: Annotated[
        Literal["int8", "fp8"] | None,
        typer.Option(
            rich_help_panel=MODEL,
            help="Hold the decoder's weights as codes of a byte, on a CPU: int8 loses next to nothing.",
        ),
    ] = None
    activations: Annotated[
        Literal["int8"] | None,
        typer.Option(
            rich_help_panel=MODEL,
            help="Multiply weights held as int8 or int4 by activations rounded to int8: outside parity.",
        ),
    ] = None
    tensor_parallel: Annotated[
        int, typer.Option(rich_help_panel=MODEL, help="Devices that the model is cut over.")
    ] = 1
    grammar_backend: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=MODEL, help="What enforces a schema or a grammar: llguidance, or a plugin's name."
        ),
    ] = None
    spec: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=MODEL,
            help="Who drafts tokens: auto, none, grammar, ngram, suffix, eagle3, eagle3=FOLDER.",
        ),
    ] = None
    lora: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=MODEL,
            metavar="NAME=PATH",
            help="A LoRA adapter, a folder or a hub id, and by which name it is asked for; may be repeated.",
        ),
    ] = None
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            rich_help_panel=MODEL,
            metavar="NAME=VALUE",
            help="A setting of the engine, as max_model_len=2048; may be repeated. "
            "docs/reference/limits.md has their names and ranges.",
        ),
    ] = None

    def loras(self) -> dict[str, str]:
        """Raises ConfigError."""
        found: dict[str, str] = {}
        for given in self.lora or []:
            name, equals, source = given.partition("=")
            if not (equals and name and source):
                raise ConfigError(f"--lora {given!r:.80} is no NAME=PATH, such as --lora mine=folder")
            if name in found:
                raise ConfigError(f"--lora gives the name {name!r:.80} twice")
            found[name] = source
        return found

    def config(
        self, *, keeps_media: bool, kept_of_log: list[str], unless_set: tuple[str, ...] = ()
    ) -> "EngineConfig":
        """Settings of the engine. `keeps_media`: whether images and videos are kept beside a log.
        `kept_of_log`: settings; `unless_set`: those where none of that name was given, as name=value. Raises
        ConfigError."""
        return engine_config(
            [
                *unless_set,
                *(self.setting or []),
                *kept_of_log,
                *([] if keeps_media else ["media_store_bytes=0"]),
                *([f"grammar_backend={self.grammar_backend}"] if self.grammar_backend else []),
                *([f"spec={self.spec}"] if self.spec else []),
                *([f"quantize={self.quantize}"] if self.quantize else []),
                *([f"activations={self.activations}"] if self.activations else []),
                *([f"tensor_parallel={self.tensor_parallel}"] if self.tensor_parallel != 1 else []),
            ]
        )


@dataclass(frozen=True, slots=True)
class Files:
    """A file of requests, its answers, and the log."""

    batch: Annotated[
        Path | None,
        typer.Option(rich_help_panel=FILES, help="Answer the requests of this file (JSON lines)."),
    ] = None
    out: Annotated[Path | None, typer.Option(rich_help_panel=FILES, help="Where the answers go.")] = None
    log: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=FILES,
            help="Folder for the event log. A batch that was interrupted goes on with its own log; else the "
            "folder must hold none.",
        ),
    ] = None
    shards: Annotated[
        int,
        typer.Option(
            min=1,
            max=MAX_SHARDS,
            rich_help_panel=FILES,
            help="Cut the batch into so many parts, which as many processes answer over a shared folder: the "
            "same command on each, but for --shard. The log is then a folder of logs.",
        ),
    ] = 1
    shard: Annotated[
        int,
        typer.Option(
            min=0,
            rich_help_panel=FILES,
            help="Which part this process answers first; then those that nobody answers any more.",
        ),
    ] = 0
    force_resume: Annotated[
        bool,
        typer.Option(
            "--force-resume",
            rich_help_panel=FILES,
            help="Go on though model, processor, dtype or device changed.",
        ),
    ] = False
    recovery: Annotated[
        Literal["strict", "tail", "salvage"],
        typer.Option(
            rich_help_panel=FILES,
            help="What damage of an interrupted batch's log is forgiven: none; bytes cut short at its end; "
            "records in the middle too, where a snapshot stands behind them.",
        ),
    ] = "tail"
    log_bytes: Annotated[
        int | None,
        typer.Option(
            min=0,
            rich_help_panel=FILES,
            help="Of the log, that are kept; what is not answered stays. 0: all.",
        ),
    ] = None
    log_days: Annotated[
        float | None, typer.Option(rich_help_panel=FILES, help="That the log is kept; likewise.")
    ] = None
    no_media_store: Annotated[
        bool,
        typer.Option(
            "--no-media-store",
            rich_help_panel=FILES,
            help="Keep no images and videos beside the log; requests that need theirs after a crash fail.",
        ),
    ] = False
