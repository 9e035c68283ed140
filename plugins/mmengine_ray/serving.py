"""The ingress of `mmengine serve --ray`: this process serves HTTP, and Ray runs the replicas."""

import socket
from collections.abc import Callable

import ray
from ray import serve

from mmengine.processing.fetch.fetcher import MediaFetcher
from mmengine.server.http.auth import ApiKeys
from mmengine.server.lifecycle import lifecycle
from mmengine_ray.deployments import fleet_engine, open_durable, replica_deployment, store_opener
from mmengine_ray.settings import RaySettings

APPLICATION = "mmengine"
LOOPBACK = "127.0.0.1"


def start_ray(address: str | None) -> None:
    """Join the Ray cluster at `address`, or start a cluster that only this machine can reach."""
    if address:
        ray.init(address=address, log_to_driver=False)
    else:
        ray.init(include_dashboard=False, log_to_driver=False, _node_ip_address=LOOPBACK)


def run_ingress(
    settings: RaySettings,
    keys: ApiKeys,
    bound: socket.socket,
    listening: Callable[[], None],
    media_fetcher: MediaFetcher | None,
    warn: Callable[[str], None],
) -> None:
    """Serve until a signal arrives, then end the replicas too. `warn`: shows a message to the user.

    Raises LogError if another ingress serves with the same log.
    """
    durable = open_durable(settings, warn)
    serve.start(proxy_location="Disabled")
    replicas = serve.run(replica_deployment(settings), name=APPLICATION, route_prefix=None)

    async def run() -> None:
        engine = await fleet_engine(settings, replicas, durable, warn)
        storage = store_opener(engine, settings, keys)
        names = settings.served_names
        await lifecycle.serve(engine, settings.server, keys, names, bound, listening, media_fetcher, storage)

    try:
        lifecycle.run(run())
    finally:
        serve.delete(APPLICATION)
        serve.shutdown()
        ray.shutdown()
