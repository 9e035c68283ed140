"""Many engines as one: who has a request, who goes on with it, and what they say to one another.

Nothing here knows of Ray or of HTTP. An ingress holds a FleetEngine, which a server takes for an engine; each
replica holds an AsyncEngine behind a Replica. Between them go bytes, by whatever carries them.
"""
