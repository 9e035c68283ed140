"""`mmengine run`: one question from the command line, or a file of them."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mmengine.cli.settings import engine_config
from mmengine.errors import InvalidRequest

if TYPE_CHECKING:
    from mmengine.core.resume import Resume
    from mmengine.serve.engine import Engine

HELP = """Answer a question about images or videos, or a file of questions.

[bold]Examples[/bold]

  mmengine run "What is in the image?" --image shapes.png

  mmengine run "Which way does the shape move?" --video clip.mp4 --json

  mmengine run "Which is older?" --image a.png --image b.png --model Qwen/Qwen3-VL-4B-Instruct

  mmengine run --batch requests.jsonl --out answers.jsonl --log run.log

""" + (
    'A line of a request file is {"custom_id": "a", "messages": […], "max_tokens": 64, …}; paths in it are '
    "relative to the file. An answer line holds custom_id, text, token_ids, finish_reason and usage, or "
    "custom_id and error. Ctrl-C once finishes what runs, twice stops. A run with --log that was stopped, or "
    "killed, is finished by the same command: each request has one line in the end, with the tokens that it "
    "would have had."
)
_CONTROL = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "�")
SAMPLING, MODEL, BATCH = "Sampling (in a request file: on each line)", "Model", "Files"


def run(
    prompt: Annotated[str | None, typer.Argument(help="The question.", show_default=False)] = None,
    image: Annotated[list[Path] | None, typer.Option(help="An image file; may be repeated.")] = None,
    video: Annotated[list[Path] | None, typer.Option(help="A video file; may be repeated.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    schema: Annotated[
        Path | None, typer.Option(help="A JSON schema: the answer is JSON that it describes.")
    ] = None,
    on_truncation: Annotated[
        Literal["length", "close"],
        typer.Option(help="With --schema, where --max-tokens ends: cut the answer, or complete it in time."),
    ] = "length",
    reasoning: Annotated[
        bool | None, typer.Option(help="With --schema: whether the model reasons first.", show_default="auto")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    max_tokens: Annotated[int, typer.Option(rich_help_panel=SAMPLING, help="Longest answer.")] = 256,
    min_tokens: Annotated[int, typer.Option(rich_help_panel=SAMPLING, help="Shortest answer.")] = 0,
    temperature: Annotated[float, typer.Option(rich_help_panel=SAMPLING, help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(rich_help_panel=SAMPLING, help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(rich_help_panel=SAMPLING, help="1 is off.")] = 1.0,
    min_p: Annotated[float, typer.Option(rich_help_panel=SAMPLING, help="0 is off.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(rich_help_panel=SAMPLING, help="1 is off.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(rich_help_panel=SAMPLING, help="0 is off.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(rich_help_panel=SAMPLING, help="0 is off.")] = 0.0,
    seed: Annotated[int | None, typer.Option(rich_help_panel=SAMPLING, help="Drawn when left out.")] = None,
    stop: Annotated[list[str] | None, typer.Option(rich_help_panel=SAMPLING, help="Ends the text.")] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", rich_help_panel=SAMPLING, help="Go on.")
    ] = False,
    logprobs: Annotated[int | None, typer.Option(rich_help_panel=SAMPLING, help="With --json.")] = None,
    n: Annotated[int, typer.Option("--n", rich_help_panel=SAMPLING, help="Answers to the prompt.")] = 1,
    model: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=MODEL, help="A folder or a hub id; without one, the embedded checkpoint."
        ),
    ] = None,
    device: Annotated[str, typer.Option(rich_help_panel=MODEL, help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(rich_help_panel=MODEL, help="auto, float32 or bfloat16.")] = "auto",
    tensor_parallel: Annotated[
        int, typer.Option(rich_help_panel=MODEL, help="Devices that the model is cut over.")
    ] = 1,
    grammar_backend: Annotated[
        Literal["llguidance", "xgrammar"] | None,
        typer.Option(rich_help_panel=MODEL, help="What enforces a schema or a grammar."),
    ] = None,
    spec: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=MODEL,
            help="Who drafts tokens: auto, none, grammar, ngram, suffix, eagle3, eagle3=FOLDER.",
        ),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", rich_help_panel=MODEL, help="An engine setting, as token_budget=512."),
    ] = None,
    batch: Annotated[
        Path | None,
        typer.Option(rich_help_panel=BATCH, help="Answer the requests of this file (JSON lines)."),
    ] = None,
    out: Annotated[Path | None, typer.Option(rich_help_panel=BATCH, help="Where the answers go.")] = None,
    log: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=BATCH,
            help="Folder for the event log. A batch that was interrupted goes on with its own log; else the "
            "folder must hold none.",
        ),
    ] = None,
    force_resume: Annotated[
        bool,
        typer.Option(
            "--force-resume",
            rich_help_panel=BATCH,
            help="Go on though model, processor, dtype or device changed.",
        ),
    ] = False,
    recovery: Annotated[
        Literal["strict", "tail", "salvage"],
        typer.Option(
            rich_help_panel=BATCH,
            help="What damage of an interrupted batch's log is forgiven: none; bytes cut short at its end; "
            "records in the middle too, where a snapshot stands behind them.",
        ),
    ] = "tail",
    no_media_store: Annotated[
        bool,
        typer.Option(
            "--no-media-store",
            rich_help_panel=BATCH,
            help="Keep no images and videos beside the log; requests that need theirs after a crash fail.",
        ),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Tell on stderr what happens.")] = False,
) -> None:
    from mmengine.cli import supervisor  # lazy: help needs no processes

    _configure_logging(verbose)
    config = engine_config(
        [
            *(setting or []),
            *(["media_store_bytes=0"] if no_media_store else []),
            *([f"grammar_backend={grammar_backend}"] if grammar_backend else []),
            *([f"spec={spec}"] if spec else []),
            *([f"tensor_parallel={tensor_parallel}"] if tensor_parallel != 1 else []),
        ]
    )

    def make_engine(resume: "Resume | None" = None) -> "Engine":
        from mmengine.serve.engine import Engine  # lazy: torch

        if resume is not None:
            cause = supervisor.ended_by()
            resume = replace(resume, mode=recovery, force=force_resume, cause=cause)
        return Engine(model, config=config, device=device, dtype=dtype, log=log, resume=resume)

    if batch is not None:
        _refuse_beside_batch(
            prompt=prompt, image=image, video=video, system=system, schema=schema, json=json_output
        )
        if out is None:
            raise InvalidRequest("--batch needs --out, the file that the answers go to")
        if log is not None and not supervisor.is_supervised():
            size = lambda: out.stat().st_size if out.exists() else 0  # noqa: E731
            raise typer.Exit(supervisor.supervise(sys.argv[1:], size))
        if supervisor.is_supervised():
            supervisor.obey_supervisor()
        from mmengine.cli.batch import run_batch_file  # lazy: numpy, msgspec

        raise typer.Exit(run_batch_file(batch, out, log, make_engine))
    if on_truncation == "close" and schema is None:
        raise InvalidRequest("--on-truncation close needs --schema: without one nothing has to be completed")
    if reasoning is not None and schema is None:
        raise InvalidRequest("--reasoning needs --schema: it says where the form of the answer begins")
    if not prompt:
        raise InvalidRequest('give a question, as in mmengine run "What is this?" --image a.png, or --batch')
    if out is not None:
        raise InvalidRequest("--out belongs to --batch; redirect the output instead")
    sampling = {
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "seed": seed,
        "stop": tuple(stop or ()),
        "ignore_eos": ignore_eos,
        "logprobs": logprobs,
        "n": n,
    }
    messages = _messages(prompt, image or [], video or [], system)
    form = _response_format(schema, on_truncation=on_truncation, reasoning=reasoning)
    _answer_one(messages, sampling, form, make_engine, json_output)


def _messages(
    prompt: str, images: list[Path], videos: list[Path], system: str | None
) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": str(path)} for path in images]
    parts += [{"type": "video", "video": str(path)} for path in videos]
    user = {"role": "user", "content": [*parts, {"type": "text", "text": prompt}]}
    return [*([{"role": "system", "content": system}] if system else []), user]


def _response_format(schema: Path | None, **ways: Any) -> dict[str, Any] | None:
    """What a file with a JSON schema asks for, and in which `ways`."""
    if schema is None:
        return None
    import msgspec  # lazy: not needed for help

    try:
        found = schema.read_bytes()
        msgspec.json.decode(found)
    except OSError as error:
        raise InvalidRequest(f"--schema {schema} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InvalidRequest(f"--schema {schema} is not valid JSON ({error})") from None
    # The schema as text: a key may be in it twice.
    return {"type": "json_schema", "json_schema": {"schema": found}, **ways}


def _answer_one(
    messages: list[dict[str, Any]],
    sampling: dict[str, Any],
    response_format: dict[str, Any] | None,
    make_engine: Any,
    as_json: bool,
) -> None:
    from mmengine.cli.batch import draft_lines  # lazy: numpy, msgspec
    from mmengine.serve.options import make_sampling
    from mmengine.structured_output.spec import grammar_of  # lazy: msgspec

    params = make_sampling(sampling)  # both are refused before the model is loaded
    grammar_of(response_format)
    live = sys.stdout.isatty() and not as_json and params.n == 1
    with make_engine() as engine:
        engine.submit(messages, params, stream=live, response_format=response_format)
        completion = None
        while completion is None:
            for output in engine.step():
                if live:
                    print(printable(output.text), end="", flush=True)
                completion = output.completion or completion
        drafts = list(draft_lines(engine))
    error = completion.error()
    if error is not None:
        raise error
    if as_json:
        import msgspec  # lazy: not needed for help

        print(msgspec.json.encode(completion.as_json()).decode())
    elif live:
        print()
    else:
        for choice in completion.choices:
            print(choice.text if choice.content is None else choice.content)
    if not as_json:  # there usage says it
        for line in drafts:
            print(line, file=sys.stderr)
    if response_format is not None and completion.finish_reason == "length":
        print(f"mmengine: {completion.choices[0].detail}; raise --max-tokens", file=sys.stderr)


def printable(text: str) -> str:
    """Text without control characters, which could steer a terminal."""
    return text.translate(_CONTROL)


def _refuse_beside_batch(**given: Any) -> None:
    for name, value in given.items():
        if value:
            shown = "a question" if name == "prompt" else f"--{name}"
            raise InvalidRequest(f"{shown} and --batch exclude each other; it belongs into the request lines")


def _configure_logging(verbose: bool) -> None:
    """The library is silent; the command shows its records on stderr when asked."""
    if verbose:
        import logging  # lazy: seldom needed

        logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
        logging.getLogger("mmengine").setLevel(logging.INFO)
