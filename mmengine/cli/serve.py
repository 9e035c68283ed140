"""`mmengine serve`: serves a model over HTTP. With a log, a supervisor runs the engine in a child process."""

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import typer

from mmengine.cli import supervisor
from mmengine.cli.grouped import grouped
from mmengine.cli.kv_events import publishing
from mmengine.cli.loading import Loading, loading, say
from mmengine.cli.run_options import Model
from mmengine.cli.serve_checks import (
    EMBEDDED_NAME,
    check_loras,
    check_template,
    check_tracing,
)
from mmengine.cli.serve_config import Config, Named, check_installed
from mmengine.cli.serve_options import (
    DEFAULT_LOG_BYTES,
    Fleet,
    Http,
    Kept,
    Limits,
    Log,
    Loras,
    Media,
    Routers,
    server_settings,
)
from mmengine.cli.settings import kept_of_log
from mmengine.errors import ConfigError, LogError, MMEngineError, code_of
from mmengine.models.progress import weights_reported_to

if TYPE_CHECKING:  # Heavy; loaded when a command runs.
    from mmengine.build import Built
    from mmengine.config import EngineConfig
    from mmengine.serve.async_engine.async_engine import AsyncEngine
    from mmengine.server.http.auth import ApiKeys
    from mmengine.server.lifecycle.heartbeat import HeartbeatSender
    from mmengine.server.settings import ServerSettings

HELP = """Serve a model over HTTP with OpenAI's chat API.

[bold]Examples[/bold]

  mmengine serve

  mmengine serve Qwen/Qwen3-VL-8B-Instruct --host 0.0.0.0 --api-key-file keys --log run.log

  mmengine serve --config serve.yaml

  mmengine serve --ray --replicas 4 --log /shared/logs

  curl localhost:8000/v1/chat/completions -H 'content-type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "What is a triangle?"}]}'

""" + (
    "Each option is also read from the environment (MMENGINE_PORT) and from the --config file (port: 8000); "
    "the command line wins, then the environment. The first Ctrl-C or SIGTERM lets streams finish, the "
    "second ends them. docs/reference/http.md lists the accepted fields of a call."
)
BATCHED = ("policy=priority",)  # Default for a new log: calls have priority over batch requests.
# Maximum seconds to wait until another process unlocks the log, and seconds between two checks.
LOCK_WAIT_S, LOCK_AGAIN_S = 5.0, 0.05
P = ParamSpec("P")
T = TypeVar("T")


@grouped(environment="MMENGINE_")
def serve(
    named: Named,
    config: Config,
    http: Http,
    model: Model,
    limits: Limits,
    media: Media,
    loras: Loras,
    log: Log,
    kept: Kept,
    routers: Routers,
    fleet: Fleet,
) -> None:
    if supervisor.is_supervised():
        supervisor.obey_supervisor()
        # SIGHUP is ignored until the server is ready to reload the keys.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    check_installed()
    model = named.of(model)
    from mmengine.server.http.auth import ADMIN_ENVIRONMENT, ApiKeys  # Lazy: help needs no server
    from mmengine.server.lifecycle.tls import check_tls

    settings = server_settings(http, limits, media, kept, loras)
    check_tls(settings)
    check_tracing(settings)
    if settings.live and log.log is None:
        raise ConfigError("--live needs a log; give --log FOLDER")
    keys, admin_keys = ApiKeys(http.api_key_file), ApiKeys(loras.admin_key_file, ADMIN_ENVIRONMENT)
    check_loras(model, settings, admin_keys)
    if fleet.ray:
        if routers.kv_events:
            raise ConfigError(
                "--kv-events reads a single log, and --ray has a log per replica; leave --kv-events out"
            )
        if model.lora or settings.lora_root:
            raise ConfigError("--ray does not support adapters; leave --lora and --lora-root out")
        from mmengine.cli.serve_ray import serve_ray  # Lazy: most servers do without Ray

        serve_ray(model, log, fleet, settings, keys, _engine_config(model, log, is_new=log.log is not None))
        return
    if log.log is not None and not log.no_supervise and not supervisor.is_supervised():
        # Report errors in the settings before a process is started.
        _engine_config(model, log, is_new=False)
        with _told(routers, log):
            raise typer.Exit(_guarded(settings, log.log))
    if http.request_log:
        from mmengine.cli.records import show_records  # Lazy: help needs no logs

        show_records()
    from mmengine.events.segment import segment_paths  # Lazy: help and a supervisor need no logs

    is_new = log.log is not None and not segment_paths(log.log)
    told = nullcontext() if supervisor.is_supervised() else _told(routers, log)
    with told:
        _answer(http, model, log, settings, keys, admin_keys, _engine_config(model, log, is_new))


def _told(routers: Routers, log: Log) -> AbstractContextManager[None]:
    """Return a context that publishes KV events for routers if an endpoint is set."""
    return publishing(log.log, routers.kv_events, routers.kv_events_replay, routers.kv_events_topic)


def _engine_config(model: Model, log: Log, is_new: bool) -> "EngineConfig":
    """Return the engine's config. `is_new`: whether the defaults for a new log apply. Raises ConfigError."""
    return model.config(
        keeps_media=not log.no_media_store,
        kept_of_log=kept_of_log(log.log, log.log_bytes, log.log_days),
        unless_set=(*(BATCHED if is_new else ()), f"log_retain_bytes={DEFAULT_LOG_BYTES}"),
    )


def _guarded(settings: "ServerSettings", log: Path) -> int:
    """Supervise the process that serves, and return the exit code."""
    from mmengine.cli.guard import Guard  # Lazy: help needs no processes
    from mmengine.server.lifecycle.listening_socket import listen

    _wait_for_log(log)
    with listen(settings) as bound:
        return Guard(sys.argv[1:], bound, _listen_for_health(settings)).run()


def _listen_for_health(settings: "ServerSettings") -> socket | None:
    """Return the socket of the health port, and print its address. Return None without a health port."""
    from mmengine.server.lifecycle.listening_socket import address_of, listen_for_health

    health = listen_for_health(settings)
    if health is not None:
        say(f"health at http://{address_of(health)}/health")
    return health


def _wait_for_log(folder: Path) -> None:
    """Wait until the log is unlocked. A killed process holds the lock until the system has freed its memory.

    Raises LogError after LOCK_WAIT_S.
    """
    from mmengine.events.lock import is_locked  # Lazy: help needs no logs

    until = time.monotonic() + LOCK_WAIT_S
    while is_locked(folder):
        if time.monotonic() > until:
            raise LogError(f"another process is writing the log in {folder}; stop it, or name another folder")
        time.sleep(LOCK_AGAIN_S)


def _answer(
    http: Http,
    model: Model,
    log: Log,
    settings: "ServerSettings",
    keys: "ApiKeys",
    admin_keys: "ApiKeys",
    engine_config: "EngineConfig",
) -> None:
    """Load the model, and serve it until a signal."""
    from mmengine.cli.guard import HASTE  # Lazy: help needs no server
    from mmengine.server.lifecycle.listening_socket import address_of

    bound, heartbeats = _listen(log, settings)
    health_socket = _listen_for_health(settings) if heartbeats is None else None
    with bound:
        names = settings.served_model_names or (model.model or EMBEDDED_NAME,)
        with loading(model.model or "the included checkpoint") as progress:
            from mmengine.server.chat.media_fetch import make_media_fetcher
            from mmengine.server.lifecycle.lifecycle import run  # Lazy: torch
            from mmengine.server.lifecycle.lifecycle import serve as serve_engine
            from mmengine.server.storage.storage import Storage

            media_fetcher = make_media_fetcher(settings)
            if http.chat_template is not None:
                check_template(model.source, http.chat_template, settings.chat_template)
            with weights_reported_to(progress):
                engine = _engine(model, log, engine_config, progress, heartbeats, _loras(model, settings))
        say("running the first steps")
        scheme = "https" if settings.ssl_certfile else "http"
        where = f"{scheme}://{address_of(bound)}"

        def listening() -> None:
            guard = "" if keys.any else ", without an API key"
            live = f", live page {where}/live" if settings.live else ""
            say(f"serving {', '.join(names)} at {where}/v1{guard}{live}")

        open_storage = (
            None
            if log.log is None
            else partial(Storage, log.log, settings, has_several_keys=keys.are_several)
        )
        in_haste = heartbeats is not None and HASTE in os.environ
        try:
            run(
                serve_engine(
                    engine,
                    settings,
                    keys,
                    names,
                    bound,
                    listening,
                    media_fetcher,
                    open_storage,
                    heartbeats,
                    in_haste,
                    log.log if settings.live else None,
                    admin_keys,
                    health_socket,
                )
            )
        except MMEngineError as error:
            if heartbeats is None:
                raise
            say(str(error))
            heartbeats.report_end(str(error))
            os._exit(code_of(error))  # A normal exit would wait for a thread that is stuck in a device call.


def _listen(log: Log, settings: "ServerSettings") -> tuple[socket, "HeartbeatSender | None"]:
    """Return the listening socket and the heartbeat sender. A supervised process inherits the socket. Without
    a supervisor, the sender is None.
    """
    from mmengine.cli.guard import BEATS, SOCKET  # Lazy: help needs no server
    from mmengine.server.lifecycle.heartbeat import HeartbeatSender
    from mmengine.server.lifecycle.listening_socket import adopt_socket, listen

    if supervisor.is_supervised():
        return adopt_socket(int(os.environ.pop(SOCKET))), HeartbeatSender(int(os.environ.pop(BEATS)))
    if log.log is not None:
        _wait_for_log(log.log)
    return listen(settings), None


def _loras(model: Model, settings: "ServerSettings") -> dict[str, str] | None:
    """Return the adapters to load at startup, or None if the engine needs no support for adapters."""
    return model.loras() if model.lora or settings.lora_root else None


def _engine(
    model: Model,
    log: Log,
    config: "EngineConfig",
    progress: Loading,
    heartbeats: "HeartbeatSender | None",
    loras: dict[str, str] | None,
) -> "AsyncEngine":
    from mmengine.build import build  # Lazy: torch
    from mmengine.core.resume import Resume
    from mmengine.serve.async_engine.async_engine import AsyncEngine

    def built(found: "Built") -> None:
        progress.loaded(found)
        if heartbeats is not None:
            heartbeats.report_built()  # Report this before the first step, which may crash the process.

    resume = None
    if log.log is not None:
        resume = Resume(mode=log.recovery, force=log.force_resume, cause=supervisor.ended_by())
    return AsyncEngine(
        model.source,
        config=config,
        device=model.device,
        dtype=model.dtype,
        log=log.log,
        resume=resume,
        loras=loras,
        builder=then(build, built),
    )


def then(call: Callable[P, T], told: Callable[[T], None]) -> Callable[P, T]:
    """Return a function that calls `call`, then calls `told` with the result, and returns the result."""

    def both(*arguments: P.args, **options: P.kwargs) -> T:
        found = call(*arguments, **options)
        told(found)
        return found

    return both
