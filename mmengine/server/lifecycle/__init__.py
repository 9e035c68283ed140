"""From a model to a listening server and back: sockets, TLS, heartbeats, and the health port."""
