"""The registry of grammar engines. llguidance is built in; packages can register further engines.

A package registers an entry point in the group `mmengine.grammar_backends`. The entry point names a callable
that takes OfTokenizer's arguments (base.py) and returns a Backend.
"""

from collections.abc import Callable

from mmengine.registry import Registry
from mmengine.structured_output.engines.base import Backend

GRAMMAR_BACKENDS: Registry[Callable[..., Backend]] = Registry(
    "mmengine.grammar_backends",
    "grammar_backend",
    own={"llguidance": "mmengine.structured_output.engines.llguidance.backend:LLGuidance"},
)
