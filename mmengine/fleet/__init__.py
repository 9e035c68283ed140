"""Makes many engines act as a single engine: an ingress (the process that clients call) routes requests to
replicas (processes with an engine each) and moves requests away from failed replicas.

This package knows neither Ray nor HTTP. An ingress contains a FleetEngine, which a server uses like an
engine. Each replica contains an AsyncEngine inside a Replica. A Carrier transports bytes between ingress and
replicas.
"""
