"""Makes many engines act as a single engine. Clients call a process named ingress. The ingress routes
requests to replicas, which are processes with an engine each. If a replica fails, other replicas continue its
requests.

This package knows neither Ray nor HTTP. An ingress contains a FleetEngine, which a server uses like an
engine. Each replica contains an AsyncEngine inside a Replica. A Carrier transports bytes between ingress and
replicas.
"""
