"""Ray Serve's consistent-hashing router, extended to tell the ingress which replicas are live."""

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

LIVE: frozenset[str] = frozenset()  # replicas that take requests, as of the last update by Serve's controller


def is_leaving(replica: str) -> bool:
    """Return whether `replica` is draining or dead. Call this only for a replica that has sent a message,
    because LIVE may lack a replica that is still starting.
    """
    return bool(LIVE) and replica not in LIVE


class Router(ConsistentHashRouter):
    """The router of deployment handles. It runs in the ingress, where RayCarrier calls `is_leaving`."""

    def update_replicas(self, replicas: list) -> None:
        global LIVE
        super().update_replicas(replicas)
        LIVE = frozenset(each.replica_id.unique_id for each in replicas)
