"""Two deployments of Ray Serve: replicas of an engine, and the ingress before them."""

import asyncio
import os
from collections.abc import AsyncIterator
from importlib import import_module
from pathlib import Path

import msgspec
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.config import AutoscalingPolicy as Policy
from ray.serve.handle import DeploymentHandle

from mmengine.config import EngineConfig
from mmengine.fleet.engine import FleetEngine
from mmengine.fleet.journey import Patience
from mmengine.fleet.replica import Replica
from mmengine.models.loader import resolve_folder
from mmengine.models.registry import plugin_for
from mmengine.serve.async_engine import AsyncEngine
from mmengine.server.any_server import AnyServer
from mmengine.server.app import App
from mmengine.server.auth import ApiKeys
from mmengine.server.media import media_door
from mmengine_ray.carrier import RayCarrier
from mmengine_ray.scaling import WAITING, ByWaitingTokens
from mmengine_ray.settings import RaySettings

REPLICA = "EngineReplica"
RESTARTS = 20  # of a replica whose engine cannot be made, before Serve gives it up


class Facts(msgspec.Struct, frozen=True):
    """What a replica tells of itself. `pid`, `log`: of its process."""

    name: str
    config: EngineConfig
    max_open: int
    pid: int
    log: str


class EngineReplica:
    """An engine with a log of its own: one for each life, by Serve's id of it, which no other life has."""

    def __init__(self, settings: bytes):
        self._settings = settings_ = RaySettings.decoded(settings)
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
        log = str(self._log or "")
        return msgspec.json.encode(
            Facts(self._replica.name, engine.config, engine.max_open, os.getpid(), log)
        )

    async def check_health(self) -> None:
        self._replica.check()

    async def record_routing_stats(self) -> dict[str, object]:
        load = self._replica.load()
        return {"free_blocks": load.free_blocks, "num_open": load.num_open, "log": str(self._log or "")}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return {WAITING: float(self._replica.load().waiting_tokens)}

    async def __del__(self) -> None:
        self._replica.leave("it ends")
        await self._replica.engine.close(leave=True)


class Ingress:
    """Speaks the HTTP of `mmengine serve`, below Serve's proxies."""

    async def _begin(self, settings: bytes, replicas: DeploymentHandle) -> None:
        given = RaySettings.decoded(settings)
        engine = await fleet_engine(given, replicas)
        keys = ApiKeys(Path(given.api_key_file) if given.api_key_file else None)
        self._app = App(engine, given.server, keys, given.served_names, media_door(given.server))
        self._running = asyncio.get_running_loop().create_task(self._app.run())

    __init__ = _begin  # Serve waits for it

    def __serve_build_asgi_app__(self) -> AnyServer:
        return AnyServer(self._app)


async def fleet_engine(settings: RaySettings, replicas: DeploymentHandle) -> FleetEngine:
    """The replicas as an engine, on this loop; waits for the first of them. Raises ModelError."""
    facts = msgspec.json.decode(await replicas.facts.remote(), type=Facts)
    folder = resolve_folder(settings.model)
    processor = plugin_for(folder).load_processor(folder)
    processor.max_prompt_tokens = facts.config.max_model_len - 1
    most = max(settings.replicas, settings.max_replicas) * min(facts.max_open, settings.max_open)
    patience = Patience(settings.silence_s, settings.patience_s)
    return FleetEngine(RayCarrier(replicas), processor, facts.config, most, patience)


def replicas_of(settings: RaySettings) -> Application:
    """The replicas alone, for an ingress that is no part of Serve."""
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
    """Replicas and an ingress, for `serve run` and config files."""
    most = max(settings.replicas, settings.max_replicas) * settings.max_open
    ingress = serve.deployment(
        name="Ingress",
        ray_actor_options={"num_cpus": min(1.0, settings.num_cpus)},
        max_ongoing_requests=2 * most,
        max_queued_requests=most,
        graceful_shutdown_timeout_s=float(settings.server.drain_s),
    )(serve.ingress()(Ingress))
    return ingress.bind(settings.encoded(), replicas_of(settings))


def _imported(path: str) -> object:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
