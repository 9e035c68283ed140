"""Options of `mmengine serve`, in addition to the model's."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mmengine.cli.media_options import MEDIA, MediaUrls
from mmengine.errors import ConfigError

if TYPE_CHECKING:  # Heavy; loaded when a command runs.
    from mmengine.server.settings import ServerSettings

MAX_TEMPLATE_BYTES = 2**20
DEFAULT_LOG_BYTES = 16 * 2**30  # Bounded, so that a server that runs for months does not fill its disk.
HTTP, LIMITS, LOG, KEPT, FLEET = "HTTP", "Limits", "Log", "Kept beside the log", "Replicas"
ROUTERS, LORAS = "Routers", "LoRA adapters"


@dataclass(frozen=True, slots=True)
class Http:
    """The address, and access."""

    host: Annotated[
        str,
        typer.Option(
            rich_help_panel=HTTP, help="Listening address; 0.0.0.0 for all addresses of this machine."
        ),
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option(rich_help_panel=HTTP, help="Listening port; 0 for a free one.")] = 8000
    health_port: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=HTTP,
            help="Port for /health, also while a model loads or restarts; needs --log. 0 for a free one.",
        ),
    ] = None
    health_host: Annotated[
        str, typer.Option(rich_help_panel=HTTP, help="Address of --health-port.", show_default="as --host")
    ] = ""
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=HTTP,
            metavar="NAME",
            help="Model name for calls; may be repeated.",
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
    open_metrics: Annotated[
        bool, typer.Option("--open-metrics", rich_help_panel=HTTP, help="Serve /metrics without a key.")
    ] = False
    live: Annotated[
        bool,
        typer.Option(
            "--live", rich_help_panel=HTTP, help="Serve /live, a page with the running requests; needs --log."
        ),
    ] = False
    otlp_traces_endpoint: Annotated[
        str,
        typer.Option(
            rich_help_panel=HTTP,
            help="OpenTelemetry collector for a span per call, such as http://localhost:4318/v1/traces; "
            "needs the extra tracing.",
        ),
    ] = ""
    metrics_compat: Annotated[
        Literal["none", "vllm"],
        typer.Option(rich_help_panel=HTTP, help="Additional metric names in /metrics, beside mmengine_…"),
    ] = "none"
    ssl_certfile: Annotated[Path | None, typer.Option(rich_help_panel=HTTP, help="TLS certificate.")] = None
    ssl_keyfile: Annotated[Path | None, typer.Option(rich_help_panel=HTTP, help="TLS key.")] = None
    ssl_keyfile_password: Annotated[
        str,
        typer.Option(
            rich_help_panel=HTTP, help="Password of the TLS key; prefer MMENGINE_SSL_KEYFILE_PASSWORD."
        ),
    ] = ""
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
    generation_config: Annotated[
        Literal["auto", "none"],
        typer.Option(
            rich_help_panel=HTTP, help="Default sampling: the checkpoint's (auto), or OpenAI's (none)."
        ),
    ] = "auto"
    unknown_fields: Annotated[
        Literal["refuse", "ignore"],
        typer.Option(rich_help_panel=HTTP, help="Handling of unknown fields in a call."),
    ] = "refuse"
    reasoning_fields: Annotated[
        Literal["reasoning_content", "both"],
        typer.Option(
            rich_help_panel=HTTP, help="Names of the reasoning field in messages; both adds reasoning."
        ),
    ] = "reasoning_content"
    strict_tools: Annotated[
        bool,
        typer.Option(
            "--strict-tools",
            rich_help_panel=HTTP,
            help="Refuse every tool whose schema cannot be enforced, not only strict tools.",
        ),
    ] = False
    request_log: Annotated[
        bool, typer.Option(rich_help_panel=HTTP, help="Log a line per request to stderr, without content.")
    ] = True


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits per client."""

    max_body_bytes: Annotated[
        int, typer.Option(rich_help_panel=LIMITS, help="Maximum bytes per call's body.")
    ] = 64 * 2**20
    max_bodies_bytes: Annotated[
        int,
        typer.Option(rich_help_panel=LIMITS, help="Maximum bytes of all bodies that are read or prepared."),
    ] = 512 * 2**20
    key_share: Annotated[
        float,
        typer.Option(
            rich_help_panel=LIMITS, help="Maximum share of calls and bodies for one of several keys."
        ),
    ] = 0.5
    max_header_bytes: Annotated[
        int, typer.Option(rich_help_panel=LIMITS, help="Maximum bytes per call's headers.")
    ] = 64 * 2**10
    max_pixels: Annotated[
        int, typer.Option(rich_help_panel=LIMITS, help="Maximum value of a call's max_pixels per image.")
    ] = 16_777_216
    max_messages: Annotated[int, typer.Option(rich_help_panel=LIMITS, help="Maximum messages per call.")] = (
        4096
    )
    max_prompts: Annotated[
        int, typer.Option(rich_help_panel=LIMITS, help="Maximum prompts per call of /v1/completions.")
    ] = 64
    max_tools: Annotated[int, typer.Option(rich_help_panel=LIMITS, help="Maximum tools per call.")] = 128
    max_tool_bytes: Annotated[
        int, typer.Option(rich_help_panel=LIMITS, help="Maximum bytes of all tools per call, as JSON.")
    ] = 256 * 2**10
    max_schema_bytes: Annotated[
        int,
        typer.Option(
            rich_help_panel=LIMITS, help="Maximum bytes of response_format or structured_outputs, as JSON."
        ),
    ] = 4 * 2**20
    max_backlog: Annotated[
        int, typer.Option(rich_help_panel=LIMITS, help="Maximum events of a stream that wait for its reader.")
    ] = 8192
    slow_reader_s: Annotated[
        float, typer.Option(rich_help_panel=LIMITS, help="Seconds that a stream waits for its reader.")
    ] = 30.0
    body_timeout_s: Annotated[
        float, typer.Option(rich_help_panel=LIMITS, help="Seconds for a body to arrive.")
    ] = 60.0
    ping_s: Annotated[
        float, typer.Option(rich_help_panel=LIMITS, help="Seconds of silence before a stream sends : ping.")
    ] = 15.0
    keep_alive_s: Annotated[
        int, typer.Option(rich_help_panel=LIMITS, help="Seconds that an idle connection stays open.")
    ] = 75
    max_connections: Annotated[
        int, typer.Option(rich_help_panel=LIMITS, help="Maximum connections that wait to be accepted.")
    ] = 2048
    drain_s: Annotated[
        int, typer.Option(rich_help_panel=LIMITS, help="Seconds for streams to finish after SIGTERM.")
    ] = 30
    reattach_s: Annotated[
        float,
        typer.Option(
            rich_help_panel=LIMITS,
            help="Seconds that an answer waits for its client to reconnect, by key or id; 0 to disable.",
        ),
    ] = 60.0


@dataclass(frozen=True, slots=True)
class Media(MediaUrls):
    """Sources that messages may name beside data: URLs, which are always accepted."""

    media_root: Annotated[
        Path | None,
        typer.Option(rich_help_panel=MEDIA, help="Folder from which file: URLs and paths are read."),
    ] = None


@dataclass(frozen=True, slots=True)
class Loras:
    """Access to loading LoRA adapters at run time."""

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


@dataclass(frozen=True, slots=True)
class Kept:
    """The store beside the log: answers, files, batches."""

    store_ttl: Annotated[
        float, typer.Option(rich_help_panel=KEPT, help="Seconds for which a finished answer is stored.")
    ] = 30 * 86400.0
    store_bytes: Annotated[
        int,
        typer.Option(
            rich_help_panel=KEPT, help="Maximum bytes of all answers; the oldest finished are deleted first."
        ),
    ] = 8 * 2**30
    max_file_bytes: Annotated[
        int, typer.Option(rich_help_panel=KEPT, help="Maximum bytes per uploaded file.")
    ] = 512 * 2**20
    files_bytes: Annotated[int, typer.Option(rich_help_panel=KEPT, help="Maximum bytes of all files.")] = (
        16 * 2**30
    )
    max_batch_lines: Annotated[int, typer.Option(rich_help_panel=KEPT, help="Maximum lines per batch.")] = (
        50_000
    )
    batch_priority: Annotated[
        int,
        typer.Option(
            rich_help_panel=KEPT, help="Priority of batch requests; smaller goes first, a call has 0."
        ),
    ] = 100


@dataclass(frozen=True, slots=True)
class Routers:
    """Receivers of KV events (docs/how-to/routers.md)."""

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
    """Replicas, if a single machine is not enough."""

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


def server_settings(http: Http, limits: Limits, media: Media, kept: Kept, loras: Loras) -> "ServerSettings":
    """Return the server's settings. Raises ConfigError."""
    from mmengine.server.settings import ServerSettings  # Lazy: msgspec

    values: dict[str, object] = {field.name: getattr(limits, field.name) for field in fields(limits)}
    values |= {field.name: getattr(kept, field.name) for field in fields(kept)}
    given = ((field.name, getattr(media, field.name)) for field in fields(media))
    values |= {name: value for name, value in given if value is not None}
    values["media_root"] = "" if media.media_root is None else str(media.media_root)
    values["lora_root"] = "" if loras.lora_root is None else str(loras.lora_root)
    known = ServerSettings.__struct_fields__
    values |= {field.name: getattr(http, field.name) for field in fields(http) if field.name in known}
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
        data = path.read_bytes()
        if len(data) > MAX_TEMPLATE_BYTES:
            raise ConfigError(f"--chat-template {path} has more than {MAX_TEMPLATE_BYTES} bytes")
        return data.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"--chat-template {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--chat-template {path} is not UTF-8 text") from None
