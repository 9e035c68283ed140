"""Settings of the server; those of the engine behind it are EngineConfig's."""

import ipaddress
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from mmengine.decode_errors import out_of_range
from mmengine.errors import ConfigError, shown

MAX_MODEL_NAMES = 32
MAX_NAME_CHARS = 256


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times are in seconds, sizes in bytes."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000  # 0: one that is free
    health_host: str = ""  # "": host
    health_port: Annotated[int, Meta(ge=0, le=65535)] | None = None  # of a supervisor; 0: one that is free
    served_model_names: tuple[str, ...] = ()  # (): the model's own name
    chat_template: str = ""  # source of another one than the model's
    generation_config: Literal["auto", "none"] = "auto"  # whose sampling is the default; none: OpenAI's
    unknown_fields: Literal["refuse", "ignore"] = "refuse"
    metrics_compat: Literal["none", "vllm"] = "none"  # whose names /metrics has beside ours
    # Of messages; both: as reasoning too, which other clients read.
    reasoning_fields: Literal["reasoning_content", "both"] = "reasoning_content"
    live: bool = False  # /live shows the log
    otlp_traces_endpoint: str = ""  # URL of a collector; "": no spans are made
    open_metrics: bool = False  # without a key for other machines too
    # One body; it is counted while it is read.
    max_body_bytes: Annotated[int, Meta(ge=1024, le=2**30)] = 64 * 2**20
    max_bodies_bytes: Annotated[int, Meta(ge=1024, le=2**40)] = 512 * 2**20  # all that are read or prepared
    max_header_bytes: Annotated[int, Meta(ge=1024, le=2**24)] = 64 * 2**10  # request line included
    key_share: Annotated[float, Meta(ge=0.01, le=1)] = (
        0.5  # of all calls, and of max_bodies_bytes, that one of several keys may have
    )
    max_prompts: Annotated[int, Meta(ge=1, le=4096)] = 64  # of one call of /v1/completions
    max_messages: Annotated[int, Meta(ge=1, le=2**20)] = 4096  # of one call, or items of its input
    max_tools: Annotated[int, Meta(ge=1, le=4096)] = 128  # of one call
    max_tool_bytes: Annotated[int, Meta(ge=16, le=2**24)] = 256 * 2**10  # all tools of one call, as JSON
    max_schema_bytes: Annotated[int, Meta(ge=16, le=2**24)] = 4 * 2**20  # the form of one answer, as JSON
    strict_tools: bool = False  # tools whose schemas cannot be enforced are refused, strict or not
    max_pixels: Annotated[int, Meta(ge=1024, le=2**28)] = 16_777_216  # that a request may ask for of an image
    max_backlog: Annotated[int, Meta(ge=16, le=2**24)] = 8192  # news that wait for a slow reader
    slow_reader_s: Annotated[float, Meta(ge=0.1, le=86400)] = 30.0  # one write may wait for its reader
    body_timeout_s: Annotated[float, Meta(ge=0.1, le=86400)] = 60.0  # within which a head or a body has come
    ping_s: Annotated[float, Meta(ge=0.05, le=86400)] = 15.0  # of silence, before a stream says something
    keep_alive_s: Annotated[int, Meta(ge=1, le=86400)] = 75  # of a connection without a request
    drain_s: Annotated[int, Meta(ge=0, le=86400)] = 30  # that streams may take after SIGTERM
    reattach_s: Annotated[float, Meta(ge=0, le=86400)] = 60.0  # an answer waits for its client to come again
    max_connections: Annotated[int, Meta(ge=1, le=2**20)] = 2048  # that wait to be taken
    allow_media_urls: tuple[str, ...] = ()  # names of hosts, or public for all; (): none is fetched
    allow_http_media: bool = False  # http: URLs too
    media_ports: tuple[Annotated[int, Meta(ge=1, le=65535)], ...] = (80, 443)
    media_root: str = ""  # the folder below which file: URLs and paths are read; "": none are
    lora_root: str = ""  # the folder below which adapters are loaded by calls; "": none are
    media_timeout_s: Annotated[float, Meta(ge=0.1, le=3600)] = 10.0  # for one URL, redirects included
    max_media_bytes: Annotated[int, Meta(ge=1024, le=2**30)] = 64 * 2**20  # of one URL or file
    max_media_urls: Annotated[int, Meta(ge=1, le=1024)] = 64  # URLs and files of one call
    max_media_fetches: Annotated[int, Meta(ge=1, le=1024)] = 16  # at once
    # All that are fetched and not yet prepared; one call may have half of it.
    max_media_in_flight_bytes: Annotated[int, Meta(ge=1024, le=2**40)] = 2**30
    store_ttl: Annotated[float, Meta(ge=1, le=10**9)] = 30 * 86400.0  # an answer is kept after its end
    store_bytes: Annotated[int, Meta(ge=2**16, le=2**50)] = 8 * 2**30  # all answers that are kept
    max_file_bytes: Annotated[int, Meta(ge=1024, le=2**40)] = 512 * 2**20  # one file that is uploaded
    files_bytes: Annotated[int, Meta(ge=1024, le=2**50)] = 16 * 2**30  # all files, those of batches included
    max_batch_lines: Annotated[int, Meta(ge=1, le=10**6)] = 50_000  # of one batch
    batch_priority: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 100  # of lines; that of a call is 0 by itself
    ssl_certfile: str = ""
    ssl_keyfile: str = ""
    ssl_keyfile_password: str = ""
    ssl_ca_certs: str = ""  # clients must show a certificate that one of these signed

    @classmethod
    def of(cls, values: dict[str, object]) -> "ServerSettings":
        """Raises ConfigError for a value of another type or out of range."""
        try:
            settings = msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            found = out_of_range(error, values, cls)
            if found is None:
                raise ConfigError(f"the server's settings cannot be read: {error}") from None
            name, low, high, value = found
            raise ConfigError(f"{name} must lie in {low} to {high}, not {shown(value)}") from None
        names = settings.served_model_names
        if len(names) > MAX_MODEL_NAMES or any(not 1 <= len(name) <= MAX_NAME_CHARS for name in names):
            raise ConfigError(
                f"at most {MAX_MODEL_NAMES} served_model_names of 1 to {MAX_NAME_CHARS} characters are taken"
            )
        if bool(settings.ssl_certfile) != bool(settings.ssl_keyfile):
            raise ConfigError("ssl_certfile and ssl_keyfile belong together; give both, or neither")
        if not settings.ssl_certfile and (settings.ssl_ca_certs or settings.ssl_keyfile_password):
            raise ConfigError("ssl_ca_certs and ssl_keyfile_password need ssl_certfile and ssl_keyfile")
        return settings


def is_loopback(host: str) -> bool:
    """Whether an address, or the name localhost, is this machine alone."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
