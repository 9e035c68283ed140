"""`mmengine run`: answers a question on the command line, or a file with requests."""

import re
import sys
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mmengine.cli.grouped import grouped
from mmengine.cli.loading import IMAGE, PROMPT, Bar, loading, prompt_bar
from mmengine.cli.media_options import MediaUrls
from mmengine.cli.run_options import Files, Model, Printing, Question, Sampling
from mmengine.cli.settings import kept_of_log
from mmengine.errors import InvalidRequest

if TYPE_CHECKING:  # Heavy; loaded when a command runs.
    from collections.abc import Callable

    from mmengine.config import EngineConfig
    from mmengine.core.resume import Resume
    from mmengine.processing.fetch.fetcher import MediaFetcher
    from mmengine.serve.engine.engine import Engine
    from mmengine.serve.text.request_output import Completion

    MediaOptions = dict[str, MediaFetcher] | None
    MakeEngine = Callable[[Resume | None], Engine]
    MakeEngineOf = Callable[[Path | None, Resume | None], Engine]

HELP = """Answer a question about images or videos, or a file of questions.

[bold]Examples[/bold]

  mmengine run "What is in the image?" --image demo/image1.png

  mmengine run "Which way does the shape move?" --video clip.mp4 --json

  mmengine run "Which is older?" --image a.png --image b.png --model Qwen/Qwen3-VL-4B-Instruct

  mmengine run --batch requests.jsonl --out answers.jsonl --log run.log

  mmengine run --batch requests.jsonl --out answers.jsonl --log /shared/run --shards 8 --shard 3

""" + (
    'A line of a request file is {"custom_id": "a", "messages": […], "max_tokens": 64, …}; paths in it are '
    "relative to the file. An answer line contains custom_id, text, token_ids, finish_reason and usage, or "
    "custom_id and error. The first Ctrl-C finishes running requests, the second stops. The same command "
    "finishes a run with --log that was stopped or killed: each request gets exactly one line, with the same "
    "tokens. Exit code of a batch: 0 if each line has an answer, 1 if any has an error, 130 if it was "
    "stopped."
)
_CONTROL = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "�")


@grouped()
def run(
    question: Question,
    printing: Printing,
    sampling: Sampling,
    model: Model,
    media: MediaUrls,
    files: Files,
) -> None:
    if printing.verbose:
        from mmengine.cli.records import show_records  # Lazy: seldom needed

        show_records()
    media_options = media.media_options()
    kept = kept_of_log(files.log, files.log_bytes, files.log_days)
    config = model.config(keeps_media=not files.no_media_store, kept_of_log=kept)
    tells = sys.stderr.isatty() or printing.verbose
    # `make_engine` takes the log and the resume options.
    make_engine = partial(load_engine, model, files, config, tells)
    if files.shards > 1 and (files.batch is None or files.log is None):
        raise InvalidRequest("--shards needs --batch, --out and --log (a folder shared by all processes)")
    if files.batch is not None:
        _refuse_beside_batch(question, printing, sampling)
        raise typer.Exit(_answer_file(files.batch, files, make_engine, media_options))
    _check_is_question(question.prompt, model.model)
    question.check()
    media.check([*(question.image or []), *(question.video or [])])
    if files.out is not None:
        raise InvalidRequest("--out belongs to --batch; redirect the output instead")
    make_one = partial(make_engine, files.log)
    adapter = question.adapter or (next(iter(model.loras())) if len(model.lora or ()) == 1 else "")
    _answer_one(
        question, sampling, make_one, printing.json_output, media_options, adapter, model_text(model.model)
    )


def load_engine(
    model: Model,
    files: Files,
    config: "EngineConfig",
    tells: bool,
    log: Path | None,
    resume: "Resume | None",
) -> "Engine":
    """Load the engine. `tells`: whether to print progress even if loading is fast."""
    from mmengine.cli import supervisor  # Lazy: help needs no processes
    from mmengine.models.progress import weights_reported_to
    from mmengine.serve.engine.engine import Engine  # Lazy: torch

    if resume is not None:
        cause = supervisor.ended_by()
        resume = replace(resume, mode=files.recovery, force=files.force_resume, cause=cause)
    with loading(model.model or "the included checkpoint", quiet=not tells) as progress:
        with weights_reported_to(progress):
            engine = Engine(
                model.source,
                config=config,
                device=model.device,
                dtype=model.dtype,
                log=log,
                resume=resume,
                loras=model.loras() or None,
            )
        progress.loaded(engine.built)
    return engine


def _answer_file(
    requests: Path, files: Files, make_engine: "MakeEngineOf", media_options: "MediaOptions"
) -> int:
    """Answer a request file, and return the exit code. With a log, this process only supervises another
    process, which answers the requests.
    """
    from mmengine.cli import supervisor  # Lazy: help needs no processes

    out = files.out
    if out is None:
        raise InvalidRequest("--batch needs --out, a file for the answers")
    if files.log is not None and not supervisor.is_supervised():
        return supervisor.supervise(sys.argv[1:], lambda: _num_bytes(out, files.shards))
    if supervisor.is_supervised():
        supervisor.obey_supervisor()
    from mmengine.cli.batch import code_of_answers, run_batch_file  # Lazy: numpy, msgspec

    if files.shards == 1 or files.log is None:
        return run_batch_file(requests, out, files.log, partial(make_engine, files.log), media_options)
    from mmengine.cli.batch_shards import Shards
    from mmengine.serve.batch.request_file import Shard

    def run_shard(answers: Path, log: Path, shard: Shard) -> int:
        return run_batch_file(requests, answers, log, partial(make_engine, log), media_options, shard)

    code = Shards(requests, out, files.log, Shard(files.shard, files.shards)).run(run_shard)
    return code or code_of_answers(out)


def _num_bytes(out: Path, shards: int) -> int:
    if shards == 1:
        return out.stat().st_size if out.exists() else 0
    from mmengine.cli.batch_shards import num_answer_bytes  # Lazy: numpy, msgspec

    return num_answer_bytes(out, shards)


def _answer_one(
    question: Question,
    options: Sampling,
    make_engine: "MakeEngine",
    as_json: bool,
    media_options: "MediaOptions",
    adapter: str,
    model: str,
) -> None:
    """Answer a question. `model`: a line of text that names the answering model."""
    from mmengine.cli.batch import draft_lines  # Lazy: numpy, msgspec
    from mmengine.serve.prompt.options import Options, make_sampling
    from mmengine.serve.prompt.prompt import Prompt
    from mmengine.serve.text.request_output import CUT, CUT_AT_STOP, REPEATED, require_success
    from mmengine.structured_output.request.spec import grammar_of  # Lazy: msgspec

    response_format = question.response_format()
    # Refuse invalid sampling options, budgets and schemas before the model is loaded.
    params, budget = make_sampling(asdict(options)), question.thinking_token_budget
    Options(params, thinking_token_budget=budget).check()
    grammar_of(response_format)
    live = sys.stdout.isatty() and not as_json and params.n == 1
    with make_engine(None) as engine:
        if sys.stderr.isatty():
            engine.on_large_media(lambda large: print(f"mmengine: {large}", file=sys.stderr))
        prompt = Prompt(messages=question.messages(), media_options=media_options)
        request_id = engine.submit(
            prompt,
            params,
            stream=live,
            response_format=response_format,
            thinking_token_budget=budget,
            adapter=adapter,
        )
        print(model, file=sys.stderr)
        with prompt_bar() as bar:
            completion = _stepped(engine, request_id, bar, live)
        drafts = list(draft_lines(engine))
    require_success(completion)
    if as_json:
        import msgspec  # Lazy: not needed for help

        print(msgspec.json.encode(completion.as_json()).decode())
    elif live:
        print()
    else:
        for choice in completion.choices:
            print(choice.text if choice.content is None else choice.content)
    if not as_json:  # In JSON, `usage` contains these numbers.
        for line in drafts:
            print(line, file=sys.stderr)
    cut = [choice.detail for choice in completion.choices if choice.detail in (CUT, CUT_AT_STOP, REPEATED)]
    if response_format is not None and cut:
        print(f"mmengine: {cut[0]}{'; raise --max-tokens' if cut[0] == CUT else ''}", file=sys.stderr)
        raise typer.Exit(1)


def _stepped(engine: "Engine", request_id: str, bar: Bar, live: bool) -> "Completion":
    """Run the engine until the answer is complete. With `live`, print new text after each step."""
    completion: Completion | None = None
    while completion is None:
        outputs = engine.step()
        computed, whole = engine.requests.prompt_tokens(request_id)
        percent = engine.requests.encoded_percent(request_id)
        bar.stage = PROMPT if percent is None else IMAGE
        if outputs or computed == whole:
            bar.end()
        elif percent is None:
            bar(computed, whole)
        else:
            bar(percent, 100)
        for output in outputs:
            if live:
                print(printable(output.text), end="", flush=True)
            completion = output.completion or completion
    return completion


def model_text(model: str | None) -> str:
    """Return a line that names the answering model."""
    if model is not None:
        return f"mmengine: {model} answers."
    return (
        "mmengine: the included checkpoint answers, a demo model that knows only pictures of shapes; name "
        "another with --model."
    )


def _check_is_question(text: str | None, model: str | None) -> None:
    """Raise InvalidRequest if `text` is the name or folder of a model, and no model is named."""
    if model is None and text and " " not in text:
        is_folder = Path(text).is_dir() or text.endswith(".gguf")
        if is_folder or re.fullmatch(
            r"(hf:|modelscope:|hf\.co/)?[\w.-]+/[\w.-]+(:[\w.-]+)?(@[\w./-]+)?", text
        ):
            raise InvalidRequest(
                f"{text!r:.80} is a model's name, and the question is missing: mmengine run QUESTION --model "
                f"{text:.80}, or mmengine chat {text:.80}"
            )


def printable(text: str) -> str:
    """Replace control characters, which could control the terminal, with U+FFFD."""
    return text.translate(_CONTROL)


def _refuse_beside_batch(question: Question, printing: Printing, sampling: Sampling) -> None:
    if printing.json_output:
        raise InvalidRequest("--json and --batch exclude each other; the answers of a batch are JSON anyway")
    for group, where in ((question, "in the request lines"), (sampling, "on each request line")):
        for field in fields(group):
            if getattr(group, field.name) not in (field.default, [], ""):
                shown = "a question" if field.name == "prompt" else f"--{field.name.replace('_', '-')}"
                raise InvalidRequest(f"{shown} and --batch exclude each other; with --batch, set it {where}")
