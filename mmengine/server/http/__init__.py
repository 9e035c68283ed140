"""Code that all routes share: errors, authentication, admission, CORS, reading and checking of bodies,
pagination, route records, and metrics.
"""
