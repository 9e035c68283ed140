"""`mmengine serve`: OpenAI's chat API over HTTP."""

from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmengine.cli.grouped import grouped
from mmengine.cli.loading import loading, say
from mmengine.cli.run_options import Model
from mmengine.cli.serve_options import DEFAULT_LOG_BYTES, Http, Kept, Limits, Log, Media, server_settings
from mmengine.cli.settings import kept_of_log
from mmengine.errors import ConfigError, InvalidRequest
from mmengine.models.progress import weights_told

if TYPE_CHECKING:  # heavy: loaded when a command runs
    from mmengine.serve.async_engine import AsyncEngine

HELP = """Serve a model over HTTP, as OpenAI's chat API.

[bold]Examples[/bold]

  mmengine serve

  mmengine serve --model Qwen/Qwen3-VL-8B-Instruct --host 0.0.0.0 --api-key-file keys --log run.log

  mmengine serve --config serve.yaml

  curl localhost:8000/v1/chat/completions -H 'content-type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "What is a triangle?"}]}'

""" + (
    "Each option is also read from the environment, as MMENGINE_PORT, and from the file of --config, "
    "as port: 8000; the command line wins, then the environment. Ctrl-C or SIGTERM lets streams finish, "
    "a second one does not. The fields of a call that are taken are listed in docs/server.md."
)
NEEDED = ("starlette", "uvicorn", "uvloop", "httptools", "yaml", "python_multipart")
BATCHED = ("policy=priority",)  # of a new log: calls go before the requests of batches
MAX_CONFIG_BYTES = 2**20  # of the file of --config
EMBEDDED_NAME = "mmengine-shapes"


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """The options of a YAML file become defaults. Raises ConfigError."""
    if path is None:
        return None
    check_installed()
    import yaml  # lazy: only with --config

    try:
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from None
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigError(f"--config {path} has more than {MAX_CONFIG_BYTES} bytes; it holds options alone")
    try:
        found = yaml.safe_load(data)
    except (yaml.YAMLError, ValueError, RecursionError):  # a day that no month has, lists in lists
        raise ConfigError(f"--config {path} is no YAML that can be read") from None
    if not isinstance(found, dict):
        raise ConfigError(f"--config {path} must hold option: value, as port: 8000")
    known = {opt.lstrip("-"): each for each in context.command.params for opt in each.opts}
    options = {}
    for given, value in found.items():
        name = str(given).replace("_", "-")
        if name not in known or name in ("config", "help"):
            raise ConfigError(
                f"--config {path}: there is no option {str(given)!r}; see mmengine serve --help"
            )
        option = known[name]
        options[option.name] = _several(value) if getattr(option, "multiple", False) else value
    context.default_map = options
    return path


def _several(value: object) -> list[str]:
    """Values of an option that may be given several times: one, a list of them, or for --set a mapping."""
    if isinstance(value, dict):
        return [f"{name}={_word(each)}" for name, each in value.items()]
    return [_word(each) for each in (value if isinstance(value, list) else [value])]


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True, slots=True)
class Config:
    """Where options stand."""

    config: Annotated[
        Path | None,
        typer.Option(help="A YAML file with options.", is_eager=True, callback=read_config),
    ] = None


@grouped(environment="MMENGINE_")
def serve(
    config: Config, http: Http, model: Model, limits: Limits, media: Media, log: Log, kept: Kept
) -> None:
    check_installed()
    from mmengine.events.segment import segment_paths  # lazy: help needs no logs
    from mmengine.server.auth import ApiKeys  # lazy: help needs no server
    from mmengine.server.keep.everything import Keep
    from mmengine.server.lifecycle import listen, run
    from mmengine.server.lifecycle import serve as serve_engine
    from mmengine.server.media import media_door
    from mmengine.server.tls import check_tls

    settings = server_settings(http, limits, media, kept)
    check_tls(settings)
    keys, door = ApiKeys(http.api_key_file), media_door(settings)
    by_itself = BATCHED if log.log is not None and not segment_paths(log.log) else ()
    of_log = kept_of_log(log.log, log.log_bytes, log.log_days)
    engine_config = model.config(
        keeps_media=not log.no_media_store,
        kept_of_log=of_log,
        unless_set=(*by_itself, f"log_retain_bytes={DEFAULT_LOG_BYTES}"),
    )
    if http.request_log:
        from mmengine.cli.records import show_records  # lazy: help needs no logs

        show_records()
    names = settings.served_model_names or (model.model or EMBEDDED_NAME,)
    with listen(settings) as bound:
        with loading(model.model or "the embedded checkpoint") as progress:
            if http.chat_template is not None:
                check_template(model.model, http.chat_template, settings.chat_template)
            with weights_told(progress):
                engine = _engine(model, log, engine_config)
        say("running the first steps")
        host, port = bound.getsockname()[:2]
        scheme = "https" if settings.ssl_certfile else "http"
        where = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

        def listening() -> None:
            guard = "" if keys.any else ", without an API key"
            say(f"serving {', '.join(names)} at {where}/v1{guard}")

        open_keep = (
            None if log.log is None else partial(Keep, log.log, settings, has_several_keys=keys.are_several)
        )
        run(serve_engine(engine, settings, keys, names, bound, listening, door, open_keep))


def _engine(model: Model, log: Log, config: object) -> "AsyncEngine":
    from mmengine.core.resume import Resume  # lazy: torch
    from mmengine.serve.async_engine import AsyncEngine

    resume = Resume(mode=log.recovery, force=log.force_resume) if log.log is not None else None
    return AsyncEngine(
        model.model, config=config, device=model.device, dtype=model.dtype, log=log.log, resume=resume
    )


def check_template(model: str | None, path: Path, source: str) -> None:
    """Whether the model's processor can read it, before weights are. Raises ConfigError."""
    from mmengine.models.loader import resolve_folder  # lazy: help needs no models
    from mmengine.models.registry import plugin_for

    folder = resolve_folder(model)
    processor = plugin_for(folder).load_processor(folder)
    try:
        processor.call_format({"chat_template": source})
    except InvalidRequest as error:
        raise ConfigError(f"--chat-template {path} is no template that can be read: {error}") from None


def check_installed() -> None:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"mmengine serve needs {', '.join(missing)}; install them with: pip install 'mmengine-vl[serve]'"
        )
