"""Code that all routes share: errors, authentication, admission, limits for bodies, pagination, and
metrics.
"""
