"""The HTTP server's settings and their checks. The engine's settings are in EngineConfig."""

import ipaddress
import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from mmengine.decode_errors import out_of_range
from mmengine.errors import ConfigError, shown
from mmengine.setting_fields import between, described

MAX_MODEL_NAMES = 32
MAX_NAME_CHARS = 256
_ANY_ORIGIN = "*"
# A scheme, a host and an optional port, as browsers send them: in lower case and without a path.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A server's settings. Times are in seconds, sizes in bytes."""

    host: Annotated[str, described("Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int, between(0, 65535, "TCP port; 0 selects a free port. Starting fails if the port is in use.")
    ] = 8000
    health_host: Annotated[str, described("Address of the health port; default: `host`.")] = ""
    health_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        described("Port that serves only the health routes; 0 selects a free port."),
    ] = None
    served_model_names: Annotated[
        tuple[str, ...], described("Names of the model in calls; default: the model's own name.")
    ] = ()
    chat_template: Annotated[
        str, described("Source of a chat template that replaces the model's template.")
    ] = ""
    generation_config: Annotated[
        Literal["auto", "none"], described("Sampling defaults: the checkpoint's (auto), or OpenAI's (none).")
    ] = "auto"
    unknown_fields: Annotated[
        Literal["refuse", "ignore"], described("Refuse unknown fields of a body with 400, or ignore them.")
    ] = "refuse"
    unsupported: Annotated[
        Literal["lenient", "strict"],
        described(
            "Whether hosted tools, optional fields and unknown fields of /v1/messages and /v1/responses are "
            "ignored and named in a header (lenient), or refused with 400 (strict)."
        ),
    ] = "lenient"
    cors_origins: Annotated[
        tuple[str, ...],
        described("Origins whose web pages may call the server; `*` allows all origins; default: none."),
    ] = ()
    metrics_compat: Annotated[
        Literal["none", "vllm"], described("vllm: export the metrics under vLLM's names too.")
    ] = "none"
    reasoning_fields: Annotated[
        Literal["reasoning_content", "both"],
        described("Fields that contain reasoning; both: `reasoning_content` and `reasoning`."),
    ] = "reasoning_content"
    live: Annotated[bool, described("Whether `/live` shows the log.")] = False
    otlp_traces_endpoint: Annotated[
        str, described("URL of an OpenTelemetry collector; default: no traces.")
    ] = ""
    open_metrics: Annotated[bool, described("Whether other machines may read `/metrics` without a key.")] = (
        False
    )
    max_body_bytes: Annotated[
        int, between(1024, 2**30, "Maximum bytes of a body. A larger body gets 413.")
    ] = 64 * 2**20
    max_bodies_bytes: Annotated[
        int,
        between(1024, 2**40, "Maximum bytes of all bodies in progress. A body beyond the maximum gets 429."),
    ] = 512 * 2**20
    max_header_bytes: Annotated[
        int, between(1024, 2**24, "Maximum bytes of a request's head. A larger head gets 431.")
    ] = 64 * 2**10
    key_share: Annotated[
        float,
        between(
            0.01,
            1,
            "Maximum share of calls, body bytes and file bytes per API key, if there are several. "
            "More gets 429.",
        ),
    ] = 0.5
    share_prefix_cache: Annotated[
        bool,
        described(
            "Whether API keys share cached prefixes. If true, `cached_tokens` reveals which prompts other "
            "keys have sent."
        ),
    ] = False
    max_prompts: Annotated[
        int, between(1, 4096, "Maximum prompts per /v1/completions call. More get 400.")
    ] = 64
    max_inputs: Annotated[
        int, between(1, 2**16, "Maximum inputs or documents per call for vectors or scores. More get 400.")
    ] = 2048
    max_messages: Annotated[
        int, between(1, 2**20, "Maximum messages or input items per call. More get 400.")
    ] = 4096
    max_tools: Annotated[int, between(1, 4096, "Maximum tools per call. More get 400.")] = 128
    max_tool_bytes: Annotated[
        int, between(16, 2**24, "Maximum bytes of a call's tools as JSON. More get 400.")
    ] = 256 * 2**10
    max_schema_bytes: Annotated[
        int, between(16, 2**24, "Maximum bytes of a schema or grammar as JSON. More get 400.")
    ] = 4 * 2**20
    strict_tools: Annotated[
        bool, described("Whether tools with an unenforceable schema are refused even without `strict`.")
    ] = False
    max_pixels: Annotated[
        int,
        between(1024, 2**28, "Maximum pixels per image that a request may set. Larger values are clamped."),
    ] = 16_777_216
    max_backlog: Annotated[
        int,
        between(
            16,
            2**24,
            "Maximum pending events of a stream. If a stream has more, the stream and its request are "
            "cancelled.",
        ),
    ] = 8192
    slow_reader_s: Annotated[
        float,
        between(0.1, 86400, "Seconds that a write may wait for the client. Then the connection is closed."),
    ] = 30.0
    body_timeout_s: Annotated[
        float, between(0.1, 86400, "Maximum seconds for a head or a body to arrive. Then the call gets 408.")
    ] = 60.0
    ping_s: Annotated[float, between(0.05, 86400, "Seconds of silence before a stream sends `: ping`.")] = (
        15.0
    )
    keep_alive_s: Annotated[int, between(1, 86400, "Seconds that an idle connection stays open.")] = 75
    drain_s: Annotated[
        int,
        between(
            0,
            86400,
            "Seconds for streams to finish after SIGTERM. Afterwards streams are cut; with a log, the next "
            "process resumes their requests. The process ends within 5 more seconds.",
        ),
    ] = 30
    reattach_s: Annotated[
        float,
        between(
            0,
            86400,
            "Seconds that an answer waits for its client's retry. Then the request is cancelled, or the "
            "finished answer is dropped.",
        ),
    ] = 60.0
    max_connections: Annotated[
        int,
        between(1, 2**20, "Maximum connections in the socket's backlog. The kernel refuses or drops more."),
    ] = 2048
    allow_media_urls: Annotated[
        tuple[str, ...],
        described("Hosts whose `https:` URLs are fetched; `public` allows all public hosts; default: none."),
    ] = ()
    allow_http_media: Annotated[bool, described("Whether `http:` URLs are fetched too.")] = False
    media_ports: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=65535)], ...], described("Allowed ports of media URLs.")
    ] = (80, 443)
    media_root: Annotated[
        str, described("Folder below which `file:` URLs and paths are read; default: none.")
    ] = ""
    lora_root: Annotated[str, described("Folder below which calls may load adapters; default: none.")] = ""
    media_timeout_s: Annotated[
        float,
        between(0.1, 3600, "Maximum seconds to fetch a URL with its redirects. Then the call gets 400."),
    ] = 10.0
    max_media_bytes: Annotated[
        int, between(1024, 2**30, "Maximum bytes of a fetched URL or file. More get 400.")
    ] = 64 * 2**20
    max_media_urls: Annotated[int, between(1, 1024, "Maximum URLs and files per call. More get 400.")] = 64
    max_media_fetches: Annotated[
        int, between(1, 1024, "Maximum concurrent fetches. Further fetches wait.")
    ] = 16
    max_media_in_flight_bytes: Annotated[
        int,
        between(
            1024,
            2**40,
            "Maximum fetched bytes not yet prepared; a call may use half. Further fetches wait.",
        ),
    ] = 2**30
    store_ttl: Annotated[float, between(1, 10**9, "Seconds until a finished response is deleted.")] = (
        30 * 86400.0
    )
    store_bytes: Annotated[
        int,
        between(
            2**16, 2**50, "Maximum bytes of stored responses. The oldest finished responses are deleted."
        ),
    ] = 8 * 2**30
    max_file_bytes: Annotated[
        int, between(1024, 2**40, "Maximum bytes of an uploaded file. A larger file gets 413.")
    ] = 512 * 2**20
    files_bytes: Annotated[
        int,
        between(
            1024, 2**50, "Maximum bytes of all files. When full, uploads get 413 until files are deleted."
        ),
    ] = 16 * 2**30
    max_batch_lines: Annotated[
        int, between(1, 10**6, "Maximum lines of a batch. A longer file fails the batch.")
    ] = 50_000
    batch_priority: Annotated[
        int, between(0, 2**31 - 1, "Priority of batch requests. Smaller values run first; calls have 0.")
    ] = 100
    ssl_certfile: Annotated[str, described("TLS certificate, with `ssl_keyfile`.")] = ""
    ssl_keyfile: Annotated[str, described("TLS private key.")] = ""
    ssl_keyfile_password: Annotated[str, described("Password of the private key.")] = ""
    ssl_ca_certs: Annotated[
        str,
        described("Certificate authorities; each client needs a certificate from one of these authorities."),
    ] = ""

    @classmethod
    def of(cls, values: dict[str, object]) -> "ServerSettings":
        """Create settings from a dict. Raises ConfigError for an unknown name, a wrong type or a value out of
        range.
        """
        try:
            settings = msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            found = out_of_range(error, values, cls)
            if found is None:
                raise ConfigError(f"the server's settings cannot be read: {error}") from None
            name, low, high, value = found
            raise ConfigError(f"{name} must lie in {low} to {high}, not {shown(value)}") from None
        _check_origins(settings.cors_origins)
        names = settings.served_model_names
        if len(names) > MAX_MODEL_NAMES or any(not 1 <= len(name) <= MAX_NAME_CHARS for name in names):
            raise ConfigError(
                f"served_model_names takes at most {MAX_MODEL_NAMES} names of 1 to {MAX_NAME_CHARS} "
                f"characters"
            )
        if bool(settings.ssl_certfile) != bool(settings.ssl_keyfile):
            raise ConfigError("ssl_certfile and ssl_keyfile require each other; set both or neither")
        if not settings.ssl_certfile and (settings.ssl_ca_certs or settings.ssl_keyfile_password):
            raise ConfigError("ssl_ca_certs and ssl_keyfile_password require ssl_certfile and ssl_keyfile")
        return settings


def is_loopback(host: str) -> bool:
    """Whether `host` is a loopback address, or the name localhost."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _check_origins(origins: tuple[str, ...]) -> None:
    """Raise ConfigError for an origin that a browser would never send."""
    for origin in origins:
        if origin != _ANY_ORIGIN and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"cors_origins has {shown(origin)}; write an origin as https://chat.example.org or "
                "http://localhost:3000, in lower case and without a path; * allows all origins"
            )
