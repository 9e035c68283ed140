"""Engine settings from words of a command line."""

from typing import TYPE_CHECKING, Any

from mmengine.errors import ConfigError

if TYPE_CHECKING:  # heavy: loaded when a command runs
    from mmengine.config import EngineConfig

STEP_TIMEOUT_S = 600  # unless step_timeout_s is set


def engine_config(settings: list[str]) -> "EngineConfig":
    """From `name=value` words. Raises ConfigError."""
    from mmengine.config import EngineConfig  # lazy: msgspec

    values: dict[str, Any] = {"step_timeout_s": STEP_TIMEOUT_S}
    for word in settings:
        name, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"--set takes name=value, as token_budget=512, not {word!r}")
        values[name] = _plain(value)
    unknown = sorted(set(values) - set(EngineConfig.__struct_fields__))
    if unknown:
        known = ", ".join(EngineConfig.__struct_fields__)
        raise ConfigError(f"there is no engine setting {unknown[0]!r}; there are {known}")
    config = EngineConfig.from_dict(values)
    config.check()
    return config


def _plain(value: str) -> bool | int | str:
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    try:
        return int(value)
    except ValueError:
        return value
