"""The options of `mmengine serve`, in groups."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from mmengine.bounded_files import read_bounded
from mmengine.cli.grouped import from_settings
from mmengine.cli.media_options import MEDIA, MediaUrls
from mmengine.errors import ConfigError
from mmengine.server.settings import ServerSettings

MAX_TEMPLATE_BYTES = 2**20
# Without a limit, a server that runs for months would fill the disk.
DEFAULT_LOG_BYTES = 16 * 2**30
HTTP, LIMITS, LOG, KEPT, FLEET = "HTTP", "Limits", "Log", "Kept beside the log", "Replicas"
ROUTERS, LORAS = "Routers", "LoRA adapters"


@from_settings(
    ServerSettings,
    HTTP,
    "host",
    "port",
    "health_port",
    "health_host",
    "open_metrics",
    "live",
    "otlp_traces_endpoint",
    "metrics_compat",
    "ssl_keyfile_password",
    "generation_config",
    "unknown_fields",
    "unsupported",
    "reasoning_fields",
    "strict_tools",
)
class Http:
    """The address, API keys, TLS, and the HTTP API's behaviour."""

    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=HTTP,
            metavar="NAME",
            help="Model name for calls; may be repeated.",
        ),
    ] = None
    cors_origins: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=HTTP,
            metavar="ORIGIN",
            help="Origin whose pages may call the server from a browser, such as http://localhost:3000; "
            "* for all; may be repeated (default: none).",
        ),
    ] = None
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=HTTP,
            help="File of API keys, one per line; each call must have one. Read again on SIGHUP. "
            "MMENGINE_API_KEY sets a single key.",
        ),
    ] = None
    ssl_certfile: Annotated[Path | None, typer.Option(rich_help_panel=HTTP, help="TLS certificate.")] = None
    ssl_keyfile: Annotated[Path | None, typer.Option(rich_help_panel=HTTP, help="TLS key.")] = None
    ssl_ca_certs: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=HTTP,
            help="CA certificates, one of which must have signed a client's certificate.",
        ),
    ] = None
    chat_template: Annotated[
        Path | None, typer.Option(rich_help_panel=HTTP, help="Jinja file that replaces the model's template.")
    ] = None
    request_log: Annotated[
        bool, typer.Option(rich_help_panel=HTTP, help="Log a line per request to stderr, without content.")
    ] = True


@from_settings(
    ServerSettings,
    LIMITS,
    "max_body_bytes",
    "max_bodies_bytes",
    "key_share",
    "share_prefix_cache",
    "max_header_bytes",
    "max_pixels",
    "max_messages",
    "max_inputs",
    "max_prompts",
    "max_tools",
    "max_tool_bytes",
    "max_schema_bytes",
    "max_backlog",
    "slow_reader_s",
    "body_timeout_s",
    "ping_s",
    "keep_alive_s",
    "max_connections",
    "drain_s",
    "reattach_s",
)
class Limits:
    """Limits on clients' calls and connections."""


@dataclass(frozen=True, slots=True)
class Media(MediaUrls):
    """Media sources that messages may name. data: URLs are always allowed."""

    media_root: Annotated[
        Path | None,
        typer.Option(rich_help_panel=MEDIA, help="Folder from which file: URLs and paths are read."),
    ] = None


@dataclass(frozen=True, slots=True)
class Loras:
    """Options that let calls load LoRA adapters."""

    lora_root: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=LORAS,
            help="Folder from which /v1/load_lora_adapter loads adapters; needs an admin key.",
        ),
    ] = None
    admin_key_file: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=LORAS,
            help="File of admin keys, one per line. Read again on SIGHUP. MMENGINE_ADMIN_KEY sets a single "
            "key.",
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class Log:
    """The event log."""

    log: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=LOG,
            help="Folder for the event log; an existing log is resumed. The server then runs under a "
            "supervisor, which restarts it after a failure; without a log it is a single process.",
        ),
    ] = None
    recovery: Annotated[
        Literal["strict", "tail", "salvage"],
        typer.Option(rich_help_panel=LOG, help="Accepted damage in an existing log."),
    ] = "tail"
    force_resume: Annotated[
        bool,
        typer.Option(
            "--force-resume", rich_help_panel=LOG, help="Resume although model, dtype or device changed."
        ),
    ] = False
    log_bytes: Annotated[
        int | None,
        typer.Option(
            min=0,
            rich_help_panel=LOG,
            help="Bytes of the log to keep; undelivered answers stay. 0: all.",
            show_default=str(DEFAULT_LOG_BYTES),
        ),
    ] = None
    log_days: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=LOG,
            help="Days for which the log is kept; undelivered answers stay.",
            show_default="0: for ever",
        ),
    ] = None
    no_media_store: Annotated[
        bool,
        typer.Option("--no-media-store", rich_help_panel=LOG, help="Store no images beside the log."),
    ] = False
    no_supervise: Annotated[
        bool,
        typer.Option("--no-supervise", rich_help_panel=LOG, help="Run as a single process, also with a log."),
    ] = False


@from_settings(
    ServerSettings,
    KEPT,
    "store_ttl",
    "store_bytes",
    "max_file_bytes",
    "files_bytes",
    "max_batch_lines",
    "batch_priority",
)
class Kept:
    """Options for the store beside the log, which keeps answers, files and batches."""


@dataclass(frozen=True, slots=True)
class Routers:
    """Options for routers that receive KV events (docs/how-to/routers.md)."""

    kv_events: Annotated[
        str,
        typer.Option(
            rich_help_panel=ROUTERS,
            help="Endpoint for KV events in vLLM's format, such as tcp://*:5557; needs --log. Its readers "
            "can read prompts.",
        ),
    ] = ""
    kv_events_replay: Annotated[
        str, typer.Option(rich_help_panel=ROUTERS, help="Endpoint for requests to repeat KV events.")
    ] = ""
    kv_events_topic: Annotated[
        str, typer.Option(rich_help_panel=ROUTERS, help="Topic prefix of each message; llm-d: kv@POD@MODEL.")
    ] = ""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Options for running replicas on Ray."""

    ray: Annotated[
        bool,
        typer.Option(
            "--ray",
            rich_help_panel=FLEET,
            help="Run replicas on Ray Serve; --log is then the folder of their logs.",
        ),
    ] = False
    replicas: Annotated[int, typer.Option(min=1, rich_help_panel=FLEET, help="Number of replicas.")] = 1
    max_replicas: Annotated[
        int,
        typer.Option(
            min=0,
            rich_help_panel=FLEET,
            help="Maximum number of replicas, scaled by waiting tokens; 0: --replicas.",
        ),
    ] = 0
    replica_cpus: Annotated[
        float, typer.Option(min=0.01, rich_help_panel=FLEET, help="CPUs per replica, as Ray counts them.")
    ] = 1.0
    replica_gpus: Annotated[
        float, typer.Option(min=0.0, rich_help_panel=FLEET, help="GPUs per replica, as Ray counts them.")
    ] = 0.0
    ray_address: Annotated[
        str,
        typer.Option(rich_help_panel=FLEET, help="Address of a running Ray.", show_default="starts Ray here"),
    ] = ""


def server_settings(http: Http, limits: Limits, media: Media, kept: Kept, loras: Loras) -> ServerSettings:
    """Return the server's settings from these option groups. Raises ConfigError."""
    known = ServerSettings.__struct_fields__
    groups = (http, limits, media, kept)
    values = {name: getattr(group, name) for group in groups for name in known if hasattr(group, name)}
    values = {name: value for name, value in values.items() if value is not None}
    values["media_root"] = "" if media.media_root is None else str(media.media_root)
    values["lora_root"] = "" if loras.lora_root is None else str(loras.lora_root)
    values["cors_origins"] = tuple(http.cors_origins or ())
    values["served_model_names"] = tuple(http.served_model_name or ())
    values["chat_template"] = _template(http.chat_template)
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        path = getattr(http, name)
        values[name] = "" if path is None else str(path)
    return ServerSettings.of(values)


def _template(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        return read_bounded(path, MAX_TEMPLATE_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"--chat-template {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--chat-template {path} is not UTF-8 text") from None
