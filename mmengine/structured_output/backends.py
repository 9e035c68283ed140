"""The grammar engines that can be chosen: one line each."""

from collections.abc import Callable
from importlib import import_module

from mmengine.errors import ConfigError
from mmengine.structured_output.base import Backend

BACKENDS = {
    "llguidance": ("mmengine.structured_output.llguidance_backend", "LLGuidance", "mmengine-vl"),
    "xgrammar": ("mmengine.structured_output.xgrammar_backend", "XGrammar", "mmengine-vl[xgrammar]"),
}


def backend_class(name: str) -> Callable[..., Backend]:
    """What makes the engine `name`, imported only now. Raises ConfigError where it is not installed."""
    module, attribute, requirement = BACKENDS[name]
    try:
        return getattr(import_module(module), attribute)
    except ImportError as error:
        raise ConfigError(
            f'grammar_backend {name} cannot be loaded ({error}); pip install "{requirement}", or choose '
            f"another ({', '.join(sorted({*BACKENDS} - {name}))})"
        ) from None
