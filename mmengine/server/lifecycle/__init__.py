"""Starts and stops the server process: listening sockets, TLS, warm-up, heartbeats, the health port, and
shutdown.
"""
