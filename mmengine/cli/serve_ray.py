"""`mmengine serve --ray`: this process serves HTTP, and Ray runs the replicas."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from mmengine.cli.loading import say
from mmengine.errors import ConfigError
from mmengine.extras import install_hint

if TYPE_CHECKING:  # Heavy; loaded when a command runs.
    from mmengine.cli.run_options import Model
    from mmengine.cli.serve_options import Fleet, Log
    from mmengine.config import EngineConfig
    from mmengine.server.http.auth import ApiKeys
    from mmengine.server.settings import ServerSettings


def serve_ray(
    model: "Model",
    log: "Log",
    fleet: "Fleet",
    settings: "ServerSettings",
    keys: "ApiKeys",
    engine: "EngineConfig",
) -> None:
    """Serve HTTP in this process, with replicas on Ray. Raises ConfigError if Ray is not installed, and for
    options that --ray does not support.
    """
    if find_spec("ray") is None:
        raise ConfigError(f"--ray needs Ray: {install_hint('ray')}")
    if settings.health_port is not None:
        raise ConfigError("--ray has no health port; leave --health-port out, and use /health")
    from mmengine.server.chat.media_fetch import make_media_fetcher
    from mmengine.server.lifecycle.listening_socket import address_of, listen  # Lazy: help needs no server
    from mmengine_ray.serving import run_ingress, start_ray
    from mmengine_ray.settings import RaySettings

    ray_settings = RaySettings(
        model=model.source,
        device=model.device,
        dtype=model.dtype,
        engine=engine,
        log="" if log.log is None else str(log.log.absolute()),
        replicas=fleet.replicas,
        max_replicas=fleet.max_replicas,
        num_gpus=fleet.replica_gpus,
        num_cpus=fleet.replica_cpus,
        server=settings,
    )
    with listen(settings) as bound:
        scheme = "https" if settings.ssl_certfile else "http"
        where, names = f"{scheme}://{address_of(bound)}/v1", ", ".join(ray_settings.served_names)
        say("starting Ray" if not fleet.ray_address else f"joining Ray at {fleet.ray_address}")
        start_ray(fleet.ray_address or None)
        say(f"starting {fleet.replicas} replicas")
        run_ingress(
            ray_settings,
            keys,
            bound,
            lambda: say(f"serving {names} at {where} by {fleet.replicas} replicas"),
            make_media_fetcher(settings),
            say,
        )
