"""Serve's own consistent hashing, which also tells this process who is among the replicas."""

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

LIVE: frozenset[str] = frozenset()  # replicas that take requests, as Serve's controller told last


def is_leaving(replica: str) -> bool:
    """Whether a replica that answered is no more among those that take requests: it drains, or is dead."""
    return bool(LIVE) and replica not in LIVE


class Router(ConsistentHashRouter):
    """Lives where the handle is: in the ingress, in which `is_leaving` asks."""

    def update_replicas(self, replicas: list) -> None:
        global LIVE
        super().update_replicas(replicas)
        LIVE = frozenset(each.replica_id.unique_id for each in replicas)
