"""`mmengine chat`: a conversation in the terminal."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mmengine.cli.grouped import grouped
from mmengine.cli.loading import loading
from mmengine.cli.media_options import MediaUrls
from mmengine.cli.run import model_text, printable
from mmengine.cli.run_options import SAMPLING, Model
from mmengine.errors import ConfigError, MMEngineError

if TYPE_CHECKING:  # Heavy; loaded when a command runs.
    from mmengine.serve.engine.engine import Engine

HELP = """Chat with a model in the terminal.

A line is a message. The words @PATH in a line are images, and /help lists
the commands. Ctrl-C stops an answer. Ctrl-D ends the chat.

[bold]Examples[/bold]

  mmengine chat

  mmengine chat Qwen/Qwen3-VL-2B-Instruct --system "Answer in one sentence."
"""
COMMANDS = """/image PATH   attach an image to the next message (or write @PATH in it)
/video PATH   attach a video to the next message
/system TEXT  set the system message; without TEXT remove it
/clear        forget the conversation, not the system message
/help         show these commands
/exit         end the chat
"""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The command's model argument, and the options that apply to each answer."""

    first: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Model, as in --model.", show_default=False)
    ] = None
    system: Annotated[str, typer.Option(help="System message.")] = ""
    max_tokens: Annotated[
        int, typer.Option(rich_help_panel=SAMPLING, help="Maximum number of answer tokens.")
    ] = 1024
    temperature: Annotated[
        float, typer.Option(rich_help_panel=SAMPLING, help="Sampling temperature; 0 is greedy.")
    ] = 0.0
    top_p: Annotated[float, typer.Option(rich_help_panel=SAMPLING, help="Nucleus probability; 1 is off.")] = (
        1.0
    )
    seed: Annotated[
        int | None, typer.Option(rich_help_panel=SAMPLING, help="Sampling seed (default: random).")
    ] = None


@grouped()
def chat(options: ChatOptions, model: Model, media: MediaUrls) -> None:
    from mmengine.models.progress import weights_reported_to
    from mmengine.serve.engine.engine import Engine  # Lazy: torch

    if options.first is not None and model.model not in (None, options.first):
        raise ConfigError(
            f"chat {options.first!r:.80} and --model {model.model!r:.80} name different models; name only one"
        )
    name = options.first or model.model
    config = model.config(keeps_media=True, kept_of_log=[])
    media_options = media.media_options()
    with loading(name or "the included checkpoint") as progress:
        with weights_reported_to(progress):
            engine = Engine(
                replace(model, model=name).source,
                config=config,
                device=model.device,
                dtype=model.dtype,
                loras=model.loras() or None,
            )
        progress.loaded(engine.built)
    with engine:
        print(model_text(name), "/help lists the commands.", file=sys.stderr)
        sampling: dict[str, Any] = {"max_tokens": options.max_tokens, "temperature": options.temperature}
        sampling |= {"top_p": options.top_p, "seed": options.seed}
        sampling["adapter"] = next(iter(model.loras()), "")
        Conversation(engine, sampling, options.system, media_options).run()


class Conversation:
    """A chat with `engine`. Contains the messages so far, and the media for the next message."""

    def __init__(
        self, engine: "Engine", sampling: dict[str, Any], system: str, media_options: dict[str, Any] | None
    ) -> None:
        self._engine, self._sampling, self._media_options = engine, sampling, media_options
        self._system = system
        self.messages: list[dict[str, Any]] = []
        self._attached: list[dict[str, Any]] = []

    def run(self) -> None:
        """Read lines and answer them until the input ends."""
        if sys.stdin.isatty():
            import readline  # noqa: F401, importing readline gives `input` a history and editing keys
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
            except (EOFError, KeyboardInterrupt):
                print()
                return
            if line in ("/exit", "/quit"):
                return
            try:
                if line.startswith("/"):
                    self._command(line)
                elif line or self._attached:
                    self._answer(line)
            except MMEngineError as error:
                print(f"mmengine: {error}", file=sys.stderr)

    def _command(self, line: str) -> None:
        name, _, value = line.partition(" ")
        value = value.strip()
        match name:
            case "/image" | "/video" if value:
                self._attach("image" if name == "/image" else "video", value)
            case "/system":
                self._system = value
            case "/clear":
                self.messages.clear()
                self._attached.clear()
            case "/help":
                print(COMMANDS, end="", file=sys.stderr)
            case "/image" | "/video":
                print(f"mmengine: {name} needs a path", file=sys.stderr)
            case _:
                print(f"mmengine: unknown command {name:.40}; /help lists the commands", file=sys.stderr)

    def _attach(self, kind: Literal["image", "video"], path: str) -> None:
        source = path if "://" in path else str(Path(path).expanduser())
        self._attached.append({"type": kind, kind: source})

    def _answer(self, line: str) -> None:
        """Print the answer to a message while it is generated. A refused message leaves the conversation
        unchanged.
        """
        words = line.split(" ")
        for word in words:
            if _is_path(word):
                self._attach("image", word[1:])
        parts = list(self._attached)
        text = " ".join(word for word in words if not _is_path(word))
        self._attached.clear()
        message = {"role": "user", "content": [*parts, {"type": "text", "text": text}] if parts else text}
        system = [{"role": "system", "content": self._system}] if self._system else []
        answer = self._stream([*system, *self.messages, message])
        self.messages += [message, {"role": "assistant", "content": answer}]

    def _stream(self, messages: list[dict[str, Any]]) -> str:
        """Print the text of the answer and return it; after Ctrl-C, return the text so far."""
        from mmengine.serve.prompt.prompt import Prompt  # Lazy: numpy

        text, reason = "", None
        prompt = Prompt(messages, media_options=self._media_options)
        with _interrupts() as interrupts:
            request_id = self._engine.submit(prompt, **self._sampling)
            with self._engine.outputs_of(request_id) as outputs:
                for output in outputs:
                    text += output.text
                    reason = output.finish_reason or reason
                    print(printable(output.text), end="", flush=True)
                    if output.finish_reason == "error":
                        print(f"\nmmengine: {output.detail}", end="", file=sys.stderr)
                    if interrupts:
                        print("\nmmengine: stopped", end="", file=sys.stderr)
                        break
        print()
        if reason == "repetition":
            print("mmengine: the answer repeated itself", file=sys.stderr)
        if reason == "length":
            print("mmengine: cut at its token limit; raise --max-tokens", file=sys.stderr)
        return text


def _is_path(word: str) -> bool:
    """Return whether a word names an image: @a.png does, @alice does not."""
    return word.startswith("@") and ("." in word or "/" in word or Path(word[1:]).is_file())


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Let a step finish after the first SIGINT.

    Yields a list that gets an entry at the first SIGINT. The second SIGINT raises KeyboardInterrupt.
    """
    found: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        found.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield found
    finally:
        signal.signal(signal.SIGINT, before)
