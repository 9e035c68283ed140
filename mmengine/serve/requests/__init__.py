"""Manages the resources that an engine holds for a request from submission to the request's end.

The resources are pixels, grammars, adapters and sessions. The package also has metrics, health and crash
recovery. The package must not depend on how callers wait for outputs.
"""
