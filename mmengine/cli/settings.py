"""Builds the engine's config from command line options."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmengine.errors import ConfigError

if TYPE_CHECKING:  # Heavy; loaded when a command runs.
    from mmengine.config import EngineConfig

STEP_TIMEOUT_S = 600  # Default of step_timeout_s on the command line.

_OPTIONS = ("device", "dtype", "log", "lora", "model")  # Not accepted by --set: each has its own option.
DAY_S, MAX_DAYS = 86_400, 36_500


def kept_of_log(log: Path | None, log_bytes: int | None, log_days: float | None) -> list[str]:
    """Convert --log-bytes and --log-days to engine settings. Raises ConfigError if either is given without
    --log, and for --log-days outside its range.
    """
    for name, value in (("--log-bytes", log_bytes), ("--log-days", log_days)):
        if value is not None and log is None:
            raise ConfigError(f"{name} limits the log; give --log FOLDER, too")
    if log_days is not None and not 0 <= log_days <= MAX_DAYS:
        raise ConfigError(f"--log-days is {log_days}; it must be from 0 to {MAX_DAYS}")
    words = [] if log_bytes is None else [f"log_retain_bytes={log_bytes}"]
    return words if log_days is None else [*words, f"log_retain_s={round(log_days * DAY_S)}"]


def engine_config(settings: list[str]) -> "EngineConfig":
    """Build the engine's config from `name=value` texts. Raises ConfigError."""
    from mmengine.config import EngineConfig  # Lazy: msgspec

    values: dict[str, Any] = {"step_timeout_s": STEP_TIMEOUT_S}
    for word in settings:
        name, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"--set {word!r} is not name=value, such as token_budget=512")
        values[name] = _plain(value)
    unknown = sorted(set(values) - set(EngineConfig.__struct_fields__))
    if unknown:
        from mmengine.setting_names import advice_for

        advice = f"it is the option --{unknown[0]}" if unknown[0] in _OPTIONS else ""
        advice = advice or advice_for(unknown[0], is_command_line=True)
        advice = advice or f"the settings are {', '.join(EngineConfig.__struct_fields__)}"
        raise ConfigError(f"unknown engine setting {unknown[0]!r}; {advice}")
    config = EngineConfig.from_dict(values)
    config.check()
    return config


def complete_setting(incomplete: str) -> list[str]:
    """Return the engine settings that begin with `incomplete`, for shell completion after --set."""
    from mmengine.config import EngineConfig  # Lazy: msgspec

    return [f"{name}=" for name in EngineConfig.__struct_fields__ if name.startswith(incomplete)]


def _plain(value: str) -> bool | int | str:
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    try:
        return int(value)
    except ValueError:
        return value
