"""Exit codes of errors that are raised on purpose."""

from mmengine.errors import ConfigError, CorruptLog, Diverged, InvalidRequest, MMEngineError

_CODES = {InvalidRequest: 2, ConfigError: 2, Diverged: 3, CorruptLog: 4}


def code_of(error: MMEngineError) -> int:
    """2: what was asked; 3: a log whose decisions are not those derived again; 4: a log that is damaged; 1:
    the rest."""
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), 1)
