"""`mmengine serve --ray`: this process is the ingress, and speaks HTTP itself; its replicas are Ray's."""

import socket
from collections.abc import Callable

import ray
from ray import serve

from mmengine.processing.fetch.fetcher import MediaFetcher
from mmengine.server.http.auth import ApiKeys
from mmengine.server.lifecycle import lifecycle
from mmengine_ray.deployments import fleet_engine, kept_of, opening, replicas_of
from mmengine_ray.settings import RaySettings

APPLICATION = "mmengine"
LOOPBACK = "127.0.0.1"


def begin(address: str | None) -> None:
    """Join the Ray at this address, or start one on this machine, which only it can reach."""
    if address:
        ray.init(address=address, log_to_driver=False)
    else:
        ray.init(include_dashboard=False, log_to_driver=False, _node_ip_address=LOOPBACK)


def serve_fleet(
    settings: RaySettings,
    keys: ApiKeys,
    bound: socket.socket,
    listening: Callable[[], None],
    door: MediaFetcher | None,
    say: Callable[[str], None],
) -> None:
    """Answer until a signal ends it, and the replicas with it. `say`: tells a person. Raises LogError where
    another ingress serves with this log."""
    kept = kept_of(settings, say)
    serve.start(proxy_location="Disabled")
    replicas = serve.run(replicas_of(settings), name=APPLICATION, route_prefix=None)

    async def run() -> None:
        engine = await fleet_engine(settings, replicas, kept, say)
        keep = opening(engine, settings, keys)
        names = settings.served_names
        await lifecycle.serve(engine, settings.server, keys, names, bound, listening, door, keep)

    try:
        lifecycle.run(run())
    finally:
        serve.delete(APPLICATION)
        serve.shutdown()
        ray.shutdown()
