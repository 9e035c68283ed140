"""Many engines that act as a single engine: an ingress routes requests to replicas and moves requests away
from failed replicas.

Nothing here knows Ray or HTTP. An ingress holds a FleetEngine, which a server uses like an engine; each
replica holds an AsyncEngine inside a Replica. A Carrier exchanges bytes between them.
"""
