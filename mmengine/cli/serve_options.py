"""Options of `mmengine serve`, beside those of the model."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mmengine.cli.media_options import MEDIA, MediaUrls
from mmengine.errors import ConfigError

if TYPE_CHECKING:  # heavy: loaded when a command runs
    from mmengine.server.settings import ServerSettings

MAX_TEMPLATE_BYTES = 2**20
DEFAULT_LOG_BYTES = 16 * 2**30  # a server that runs for months does not fill its disk
HTTP, LIMITS, LOG, KEPT, FLEET = "HTTP", "Limits", "Log", "Kept beside the log", "Replicas"
ROUTERS, LORAS = "Routers", "LoRA adapters"


@dataclass(frozen=True, slots=True)
class Http:
    """Where it listens, and who may call."""

    host: Annotated[
        str, typer.Option(rich_help_panel=HTTP, help="Address; 0.0.0.0 is all of this machine's.")
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option(rich_help_panel=HTTP, help="0: one that is free.")] = 8000
    health_port: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=HTTP,
            help="Answers /health, also while a model loads or is started again; with --log. 0: one that is "
            "free.",
        ),
    ] = None
    health_host: Annotated[
        str, typer.Option(rich_help_panel=HTTP, help="Its address.", show_default="as --host")
    ] = ""
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=HTTP,
            metavar="NAME",
            help="A name by which calls may ask for the model; may be repeated.",
        ),
    ] = None
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=HTTP,
            help="Keys, one a line, one of which each call must have; read again at SIGHUP. Or "
            "MMENGINE_API_KEY, for one.",
        ),
    ] = None
    open_metrics: Annotated[
        bool, typer.Option("--open-metrics", rich_help_panel=HTTP, help="/metrics without a key for all.")
    ] = False
    live: Annotated[
        bool,
        typer.Option("--live", rich_help_panel=HTTP, help="/live shows requests as they run; with --log."),
    ] = False
    otlp_traces_endpoint: Annotated[
        str,
        typer.Option(
            rich_help_panel=HTTP,
            help="Send a span of each call to this collector of OpenTelemetry, as "
            "http://localhost:4318/v1/traces; with the extra tracing.",
        ),
    ] = ""
    metrics_compat: Annotated[
        Literal["none", "vllm"],
        typer.Option(rich_help_panel=HTTP, help="Whose names /metrics has too, beside mmengine_…"),
    ] = "none"
    ssl_certfile: Annotated[Path | None, typer.Option(rich_help_panel=HTTP, help="For TLS.")] = None
    ssl_keyfile: Annotated[Path | None, typer.Option(rich_help_panel=HTTP, help="For TLS.")] = None
    ssl_keyfile_password: Annotated[
        str, typer.Option(rich_help_panel=HTTP, help="Of the key; better as MMENGINE_SSL_KEYFILE_PASSWORD.")
    ] = ""
    ssl_ca_certs: Annotated[
        Path | None,
        typer.Option(rich_help_panel=HTTP, help="Clients must show a certificate that one of these signed."),
    ] = None
    chat_template: Annotated[
        Path | None, typer.Option(rich_help_panel=HTTP, help="A Jinja file in place of the model's template.")
    ] = None
    generation_config: Annotated[
        Literal["auto", "none"],
        typer.Option(
            rich_help_panel=HTTP, help="Whose sampling is the default: the checkpoint's, or OpenAI's."
        ),
    ] = "auto"
    unknown_fields: Annotated[
        Literal["refuse", "ignore"],
        typer.Option(rich_help_panel=HTTP, help="What becomes of a field of a call that nobody knows."),
    ] = "refuse"
    reasoning_fields: Annotated[
        Literal["reasoning_content", "both"],
        typer.Option(rich_help_panel=HTTP, help="Of messages; both: as reasoning too, for other clients."),
    ] = "reasoning_content"
    strict_tools: Annotated[
        bool,
        typer.Option(
            "--strict-tools",
            rich_help_panel=HTTP,
            help="Refuse each tool whose schema cannot be enforced, not only those that ask for it.",
        ),
    ] = False
    request_log: Annotated[
        bool, typer.Option(rich_help_panel=HTTP, help="A line on stderr for each request, without content.")
    ] = True


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client may take."""

    max_body_bytes: Annotated[int, typer.Option(rich_help_panel=LIMITS, help="Of one call.")] = 64 * 2**20
    max_bodies_bytes: Annotated[
        int, typer.Option(rich_help_panel=LIMITS, help="Of all that are read or prepared.")
    ] = 512 * 2**20
    key_share: Annotated[
        float,
        typer.Option(
            rich_help_panel=LIMITS, help="Of all calls, and of bodies, that one of several keys may have."
        ),
    ] = 0.5
    max_header_bytes: Annotated[int, typer.Option(rich_help_panel=LIMITS, help="Of one call.")] = 64 * 2**10
    max_pixels: Annotated[
        int, typer.Option(rich_help_panel=LIMITS, help="That a call may ask for of an image.")
    ] = 16_777_216
    max_messages: Annotated[int, typer.Option(rich_help_panel=LIMITS, help="Of one call.")] = 4096
    max_prompts: Annotated[
        int, typer.Option(rich_help_panel=LIMITS, help="Of one call of /v1/completions.")
    ] = 64
    max_tools: Annotated[int, typer.Option(rich_help_panel=LIMITS, help="Of one call.")] = 128
    max_tool_bytes: Annotated[
        int, typer.Option(rich_help_panel=LIMITS, help="Of all tools of one call, as JSON.")
    ] = 256 * 2**10
    max_schema_bytes: Annotated[
        int, typer.Option(rich_help_panel=LIMITS, help="Of response_format or structured_outputs, as JSON.")
    ] = 4 * 2**20
    max_backlog: Annotated[
        int, typer.Option(rich_help_panel=LIMITS, help="News of a stream that wait for its reader.")
    ] = 8192
    slow_reader_s: Annotated[
        float, typer.Option(rich_help_panel=LIMITS, help="That a stream waits for its reader.")
    ] = 30.0
    body_timeout_s: Annotated[float, typer.Option(rich_help_panel=LIMITS, help="For a body to come.")] = 60.0
    ping_s: Annotated[
        float, typer.Option(rich_help_panel=LIMITS, help="Of silence, before a stream says : ping.")
    ] = 15.0
    keep_alive_s: Annotated[
        int, typer.Option(rich_help_panel=LIMITS, help="That a connection without a call stays open.")
    ] = 75
    max_connections: Annotated[int, typer.Option(rich_help_panel=LIMITS, help="That wait to be taken.")] = (
        2048
    )
    drain_s: Annotated[
        int, typer.Option(rich_help_panel=LIMITS, help="That streams may take after SIGTERM.")
    ] = 30
    reattach_s: Annotated[
        float,
        typer.Option(
            rich_help_panel=LIMITS,
            help="For which an answer waits for its client to ask again, by its key or id; 0: not at all.",
        ),
    ] = 60.0


@dataclass(frozen=True, slots=True)
class Media(MediaUrls):
    """What messages may name, beside the data: URLs that are always taken."""

    media_root: Annotated[
        Path | None,
        typer.Option(rich_help_panel=MEDIA, help="Read file: URLs and paths below this folder."),
    ] = None


@dataclass(frozen=True, slots=True)
class Loras:
    """Who may load LoRA adapters while it serves."""

    lora_root: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=LORAS,
            help="Folder below which adapters are loaded by /v1/load_lora_adapter; with an admin key.",
        ),
    ] = None
    admin_key_file: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=LORAS,
            help="Keys for such calls, one a line; read again at SIGHUP. Or MMENGINE_ADMIN_KEY, for one.",
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class Log:
    """The event log."""

    log: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=LOG,
            help="Folder for the event log; one that is there goes on. What serves then runs below a "
            "supervisor, which starts it again when it breaks down; without a log it is one process.",
        ),
    ] = None
    recovery: Annotated[
        Literal["strict", "tail", "salvage"],
        typer.Option(rich_help_panel=LOG, help="What damage of a log that is there is forgiven."),
    ] = "tail"
    force_resume: Annotated[
        bool,
        typer.Option(
            "--force-resume", rich_help_panel=LOG, help="Go on though model, dtype or device changed."
        ),
    ] = False
    log_bytes: Annotated[
        int | None,
        typer.Option(
            min=0,
            rich_help_panel=LOG,
            help="Of the log, that are kept; what was not delivered stays. 0: all.",
            show_default=str(DEFAULT_LOG_BYTES),
        ),
    ] = None
    log_days: Annotated[
        float | None,
        typer.Option(rich_help_panel=LOG, help="That the log is kept; likewise.", show_default="0: for ever"),
    ] = None
    no_media_store: Annotated[
        bool,
        typer.Option("--no-media-store", rich_help_panel=LOG, help="Keep no images beside the log."),
    ] = False
    no_supervise: Annotated[
        bool,
        typer.Option("--no-supervise", rich_help_panel=LOG, help="One process with a log too."),
    ] = False


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept beside the log: answers, files, batches."""

    store_ttl: Annotated[
        float, typer.Option(rich_help_panel=KEPT, help="Seconds for which a finished answer is kept.")
    ] = 30 * 86400.0
    store_bytes: Annotated[
        int, typer.Option(rich_help_panel=KEPT, help="Of all answers; the oldest finished go first.")
    ] = 8 * 2**30
    max_file_bytes: Annotated[
        int, typer.Option(rich_help_panel=KEPT, help="Of one file that is uploaded.")
    ] = 512 * 2**20
    files_bytes: Annotated[int, typer.Option(rich_help_panel=KEPT, help="Of all files.")] = 16 * 2**30
    max_batch_lines: Annotated[int, typer.Option(rich_help_panel=KEPT, help="Of one batch.")] = 50_000
    batch_priority: Annotated[
        int,
        typer.Option(
            rich_help_panel=KEPT, help="Of a batch's requests; a smaller one goes first, a call is 0."
        ),
    ] = 100


@dataclass(frozen=True, slots=True)
class Routers:
    """Who is told what the KV cache holds (docs/how-to/routers.md)."""

    kv_events: Annotated[
        str,
        typer.Option(
            rich_help_panel=ROUTERS,
            help="Endpoint for KV events as vLLM's, such as tcp://*:5557; with --log. Whoever reads it reads "
            "prompts.",
        ),
    ] = ""
    kv_events_replay: Annotated[
        str, typer.Option(rich_help_panel=ROUTERS, help="Endpoint where they can be asked for again.")
    ] = ""
    kv_events_topic: Annotated[
        str, typer.Option(rich_help_panel=ROUTERS, help="What each message begins with; llm-d: kv@POD@MODEL.")
    ] = ""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Several replicas, where one machine is not enough."""

    ray: Annotated[
        bool,
        typer.Option(
            "--ray",
            rich_help_panel=FLEET,
            help="Replicas on Ray Serve behind this process; --log is then the folder of their logs.",
        ),
    ] = False
    replicas: Annotated[int, typer.Option(min=1, rich_help_panel=FLEET, help="How many.")] = 1
    max_replicas: Annotated[
        int,
        typer.Option(
            min=0, rich_help_panel=FLEET, help="Up to so many, by the tokens that wait. 0: as many."
        ),
    ] = 0
    replica_cpus: Annotated[
        float, typer.Option(min=0.01, rich_help_panel=FLEET, help="Of a replica, as Ray counts them.")
    ] = 1.0
    replica_gpus: Annotated[float, typer.Option(min=0.0, rich_help_panel=FLEET, help="Likewise.")] = 0.0
    ray_address: Annotated[
        str,
        typer.Option(rich_help_panel=FLEET, help="Of a Ray that runs.", show_default="one is started here"),
    ] = ""


def server_settings(http: Http, limits: Limits, media: Media, kept: Kept, loras: Loras) -> "ServerSettings":
    """Raises ConfigError."""
    from mmengine.server.settings import ServerSettings  # lazy: msgspec

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
        raise ConfigError(f"--chat-template {path} is no UTF-8 text") from None
