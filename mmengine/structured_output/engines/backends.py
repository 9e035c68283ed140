"""The registry of grammar engines: llguidance is built in, and other engines register an entry point.

An entry point in the group `mmengine.grammar_backends` names a callable that takes the arguments of
OfTokenizer (base.py) and returns a Backend.
"""

from collections.abc import Callable

from mmengine.registry import Registry
from mmengine.structured_output.engines.base import Backend

GRAMMAR_BACKENDS: Registry[Callable[..., Backend]] = Registry(
    "mmengine.grammar_backends",
    "grammar_backend",
    own={"llguidance": "mmengine.structured_output.engines.llguidance.backend:LLGuidance"},
)
