"""Defines two Ray Serve deployments: the replicas, each with an engine, and the ingress."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from functools import partial
from importlib import import_module
from pathlib import Path

import msgspec
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.config import AutoscalingPolicy as Policy
from ray.serve.handle import DeploymentHandle

from mmengine.config import EngineConfig
from mmengine.events.lock import is_locked
from mmengine.fleet.attempt import RoutingLimits
from mmengine.fleet.durable_requests import (
    INGRESS,
    NOT_ADOPTED,
    REQUESTS,
    DurableRequests,
    open_durable_requests,
)
from mmengine.fleet.engine import FleetEngine
from mmengine.fleet.replica import Replica
from mmengine.models.loader import resolve_folder
from mmengine.models.registry import plugin_for
from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.serve.engine.boxes import box_unit_of
from mmengine.serve.requests.operator_log import operator_log
from mmengine.server.app.app import App
from mmengine.server.chat.media_fetch import make_media_fetcher
from mmengine.server.http.auth import ApiKeys
from mmengine.server.storage.storage import Storage
from mmengine.server.transport.any_asgi_server import AnyServer
from mmengine_ray.carrier import RayCarrier
from mmengine_ray.scaling import WAITING, ByWaitingTokens
from mmengine_ray.settings import RaySettings

REPLICA = "EngineReplica"
LOOKS = 8  # maximum number of attempts to see a live replica's lock
RESTARTS = 20  # constructor failures of a replica after which Serve gives up


class Facts(msgspec.Struct, frozen=True):
    """Facts about a replica. `pid`, `log`: the replica's process id and log. `sees_ingress`: whether the
    replica sees the ingress's file lock.
    """

    name: str
    config: EngineConfig
    max_open: int
    pid: int
    log: str
    sees_ingress: bool = False


class EngineReplica:
    """A replica with an engine and a log. The log's name is Serve's unique id for the replica."""

    def __init__(self, settings: bytes):
        settings_ = RaySettings.decoded(settings)
        self._requests = Path(settings_.log, INGRESS, REQUESTS)
        name = serve.get_replica_context().replica_id.unique_id
        self._log = Path(settings_.log, name) if settings_.log else None
        options = {"builder": _imported(settings_.builder)} if settings_.builder else {}
        engine = AsyncEngine(
            settings_.model,
            config=settings_.engine,
            device=settings_.device,
            dtype=settings_.dtype,
            log=self._log,
            **options,
        )
        self._replica = Replica(name, engine, beat_s=settings_.beat_s, hang_s=settings_.hang_s)

    async def run(self, data: bytes) -> AsyncIterator[bytes]:
        async for word in self._replica.run(data):
            yield word

    async def facts(self) -> bytes:
        engine = self._replica.engine
        log, sees = str(self._log or ""), await asyncio.to_thread(is_locked, self._requests)
        facts = Facts(self._replica.name, engine.config, engine.max_open, os.getpid(), log, sees)
        return msgspec.json.encode(facts)

    async def check_health(self) -> None:
        self._replica.check()

    async def record_routing_stats(self) -> dict[str, object]:
        load = self._replica.load()
        return {"free_blocks": load.free_blocks, "num_open": load.num_open, "log": str(self._log or "")}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return {WAITING: float(self._replica.load().waiting_tokens)}

    async def __del__(self) -> None:
        self._replica.leave("the replica ends")
        await self._replica.engine.close(leave=True)


class Ingress:
    """The ingress: an ASGI application with the HTTP API of `mmengine serve`, for Serve's proxies."""

    async def _begin(self, settings: bytes, replicas: DeploymentHandle) -> None:
        given = RaySettings.decoded(settings)
        durable = await asyncio.to_thread(open_durable, given, _warn)
        engine = await fleet_engine(given, replicas, durable, _warn)
        keys = ApiKeys(Path(given.api_key_file) if given.api_key_file else None)
        make_storage = store_opener(engine, given, keys)
        storage = make_storage() if make_storage is not None else None
        self._app = App(
            engine, given.server, keys, given.served_names, make_media_fetcher(given.server), storage
        )
        self._running = asyncio.get_running_loop().create_task(self._app.run())

    __init__ = _begin  # Serve awaits the constructor

    def __serve_build_asgi_app__(self) -> AnyServer:
        return AnyServer(self._app)


def open_durable(settings: RaySettings, warn: Callable[[str], None]) -> DurableRequests | None:
    """Open the store for requests that survive a restart of the ingress, in a folder beside the replicas'
    logs.

    Returns None if the settings name no log folder. Calls `warn` and returns None if requests cannot be
    stored. Raises OSError, and LogError if another ingress holds the requests' lock.
    """
    return open_durable_requests(Path(settings.log), settings.patience_s, warn) if settings.log else None


def store_opener(engine: FleetEngine, settings: RaySettings, keys: ApiKeys) -> Callable[[], Storage] | None:
    """Return a function that opens the store of responses, files and batches, or None if nothing is
    stored.
    """
    if not engine.keeps_held:
        return None
    folder = Path(settings.log) / INGRESS
    return partial(Storage, folder, settings.server, has_several_keys=keys.are_several)


def _warn(text: str) -> None:
    operator_log.warning(text)


async def fleet_engine(
    settings: RaySettings,
    replicas: DeploymentHandle,
    durable: DurableRequests | None,
    warn: Callable[[str], None],
) -> FleetEngine:
    """Return the replicas as a single engine on this event loop. Waits until the first replica responds.

    If the ingress and a replica do not see each other's file locks, `durable` is closed and `warn` is called.
    Raises ModelError.
    """
    facts = msgspec.json.decode(await replicas.facts.remote(), type=Facts)
    if durable is not None and (reason := await _unseen_lock(replicas, facts, durable.folder)):
        durable.close()
        durable = None
        warn(f"{NOT_ADOPTED}: {reason}")
    folder = resolve_folder(settings.model)
    plugin = plugin_for(folder)
    processor = plugin.load_processor(folder)
    processor.max_prompt_tokens = facts.config.max_model_len - 1
    most = max(settings.replicas, settings.max_replicas) * min(facts.max_open, settings.max_open)
    limits = RoutingLimits(settings.silence_s, settings.patience_s)
    box_unit = partial(box_unit_of, folder, plugin)
    return FleetEngine(RayCarrier(replicas), processor, facts.config, most, limits, durable, box_unit)


async def _unseen_lock(replicas: DeploymentHandle, facts: Facts, folder: Path) -> str:
    """Return why this process and a live replica do not see each other's file locks. Returns "" if the
    replica sees this process's lock and this process sees the replica's lock, or if no replica stays alive
    during the check.
    """
    if not facts.sees_ingress:
        return f"replica {facts.name} does not see the lock that its ingress holds in {folder}"
    for _ in range(LOOKS):
        if is_locked(Path(facts.log)):
            return ""
        name = facts.name
        facts = msgspec.json.decode(await replicas.facts.remote(), type=Facts)
        if facts.name == name:  # the replica was alive when this process read its lock
            return f"the lock that replica {name} holds on its log is not seen from its ingress"
    return ""


def replica_deployment(settings: RaySettings) -> Application:
    """Return an application that has only the replicas, for an ingress outside Serve."""
    scaled = settings.max_replicas > settings.replicas
    count: dict[str, object] = {"num_replicas": settings.replicas}
    if scaled:
        kwargs = {"waiting_tokens": settings.waiting_tokens, "max_open": settings.max_open}
        policy = Policy(
            policy_function=f"{ByWaitingTokens.__module__}:{ByWaitingTokens.__name__}", policy_kwargs=kwargs
        )
        count = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=settings.replicas, max_replicas=settings.max_replicas, policy=policy
            )
        }
    deployment = serve.deployment(
        name=REPLICA,
        **count,
        ray_actor_options={"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus},
        max_ongoing_requests=settings.max_open,
        max_queued_requests=settings.max_open,
        graceful_shutdown_timeout_s=settings.drain_s,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=settings.health_s,
        health_check_timeout_s=max(5.0, settings.health_s),
        max_constructor_retry_count=RESTARTS,
        request_router_config=RequestRouterConfig(request_router_class="mmengine_ray.router.Router"),
    )(EngineReplica)
    return deployment.bind(settings.encoded())


def application(settings: RaySettings) -> Application:
    """Return the replicas and an ingress as one application, for `serve run` and config files."""
    most = max(settings.replicas, settings.max_replicas) * settings.max_open
    ingress = serve.deployment(
        name="Ingress",
        ray_actor_options={"num_cpus": min(1.0, settings.num_cpus)},
        max_ongoing_requests=2 * most,
        max_queued_requests=most,
        graceful_shutdown_timeout_s=float(settings.server.drain_s),
    )(serve.ingress()(Ingress))
    return ingress.bind(settings.encoded(), replica_deployment(settings))


def _imported(path: str) -> object:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
