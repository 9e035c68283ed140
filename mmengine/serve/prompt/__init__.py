"""Checks callers' prompts and options, and converts them to requests for the engine core.

This package must not depend on an engine or on answers.
"""
